"""Public code compared with the paper: the same data, the same seeds, one difference.

    python bench/differences.py                              # an hour on an idle core; skips what docs/differences.csv has
    python bench/differences.py --only FedDyn --rounds 5 --csv 5.csv

scikit-learn's handwritten digits, 10 clients by Dirichlet 0.3, half of whom take part in each of 15 rounds of 2 epochs, an MLP with
two hidden layers, SGD with a rate of 0.1, batches of 16. A deviation is a subclass with this one difference and the same
hyperparameters. It is not the code in which the difference was found, whose numbers also depend on everything else. Each names a
test that it fails.
"""

import argparse
import csv
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from deviations import DEVIATIONS

from lightning_fed import FederatedModule, Federation, FederationError
from lightning_fed.data import Digits, DirichletPerClass
from lightning_fed.models import MLP

COLUMNS = ("method", "code", "what", "test", "seed", "ours", "theirs")
RESULTS = Path(__file__).parents[1] / "docs" / "differences.csv"


def accuracy(make: Callable[..., FederatedModule], seed: int, rounds: int, options: dict[str, Any]) -> float:
    """The monitored accuracy after the last round, the mean over clients; 0 where the training diverged."""
    data = Digits(8, num_clients=10, partition=DirichletPerClass(0.3), val_share=0.1, batch_size=16)
    length = {} if "steps" in options else {"epochs": 2}
    defaults = {"backbone": partial(MLP, inputs=3 * 8 * 8), "optimizer": partial(torch.optim.SGD, lr=0.1)}
    model = make(**defaults | length | options)
    federation = Federation(rounds, 0.5, seed=seed, evaluate_every=0, run_dir=None, logger=False, progress=False)
    try:
        federation.fit(model, data)
    except FederationError as error:
        if "diverged" not in str(error):
            raise
        return 0.0
    return federation.run.history[-1][f"after/test_{federation.run.metric}/mean"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="a method")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--csv", type=Path, default=RESULTS)
    given = parser.parse_args()
    chosen = [deviation for deviation in DEVIATIONS if given.only in (None, deviation.ours.__name__)]
    rows = list(csv.DictReader(given.csv.read_text().splitlines())) if given.csv.exists() else []
    known = {(row["method"], row["code"], row["what"], row["seed"]) for row in rows}
    ours: dict[str, float] = {}  # of a method, its options and a seed
    for deviation, seed in product(chosen, range(given.seeds)):
        name = deviation.ours.__name__
        if (name, deviation.code, deviation.what, str(seed)) in known:
            continue
        key = f"{name} {deviation.options} {seed}"
        if key not in ours:
            ours[key] = accuracy(deviation.ours, seed, given.rounds, deviation.options)
        theirs = accuracy(deviation.theirs, seed, given.rounds, deviation.options)
        values = (name, deviation.code, deviation.what, deviation.test, str(seed), f"{ours[key]:.4f}", f"{theirs:.4f}")
        rows.append(dict(zip(COLUMNS, values, strict=True)))
        places = {(other.ours.__name__, other.code, other.what): place for place, other in enumerate(DEVIATIONS)}
        rows.sort(key=lambda row: (places[row["method"], row["code"], row["what"]], row["seed"]))
        with given.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        print(f"{name:10} {deviation.what:70} {seed} {ours[key]:.3f} {theirs:.3f}", flush=True)
