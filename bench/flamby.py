"""The duration of Fed-Heart-Disease compared with FLamby's own loop, run for run.

    python bench/flamby.py --root data/heart_disease

FLamby's program cannot be installed with current versions of its dependencies, so its loop is written here again, as
in flamby/strategies/fed_avg.py and strategies/utils.py of owkin/FLamby @ edacf54: a ``DataLoader`` for each hospital whose
iterator goes on across rounds, a step per batch, updates as NumPy arrays, their mean by training patients, and after the last round
the accuracy at each hospital. It is compared with all of ``lightning-fed fit --config flamby/heart_disease``, which also
reads and checks its configuration and the four files, measures all clients every five rounds, and each model at each hospital, and
writes checkpoints and tables.

The two run the same seed one after the other, with one torch thread each. The program prints CPU seconds, which depend little on
other work of the machine, the ratio of each pair, and both accuracies, which differ only by the order of batches.
"""

import argparse
import contextlib
import csv
import io
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import process_time

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed.__main__ import main
from lightning_fed.data import HeartDisease

ROUNDS, STEPS, RATE, BATCH = 15, 100, 0.001, 4


def endless(loader: DataLoader[tuple[Tensor, ...]]) -> Iterator[list[Tensor]]:
    """Batches, epoch after epoch."""
    while True:
        yield from loader


class Hospital:
    """A client: its model, its optimizer, and where its batches have come to."""

    def __init__(self, model: nn.Module, patients: TensorDataset) -> None:
        self.model, self.size = model, len(patients)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        self.loss = nn.BCELoss()
        self.batches = endless(DataLoader(patients, batch_size=BATCH, shuffle=True))

    def train(self) -> list[np.ndarray]:
        """A turn: what its parameters have changed by."""
        before = [parameter.detach().numpy().copy() for parameter in self.model.parameters()]
        self.model.train()
        for _ in range(STEPS):
            inputs, targets = next(self.batches)
            loss = self.loss(self.model(inputs), targets)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return [new.detach().numpy() - old for new, old in zip(self.model.parameters(), before, strict=True)]

    def receive(self, change: list[np.ndarray], update: list[np.ndarray]) -> None:
        """Go back to the round's beginning, and on from there with the mean."""
        with torch.no_grad():
            for parameter, mean, own in zip(self.model.parameters(), change, update, strict=True):
                parameter += torch.from_numpy(mean - own)


def sets(root: str, train: bool) -> list[TensorDataset]:
    """Each hospital's patients, scaled."""
    data = HeartDisease(root, standardize="client", batch_size=BATCH, single_example="keep")
    loaders = [data.client(k).train_dataloader() if train else data.client(k).test_dataloader() for k in range(4)]
    parts = [[torch.cat(tensors) for tensors in zip(*loader, strict=True)] for loader in loaders]
    return [TensorDataset(inputs, targets.float().unsqueeze(1)) for inputs, targets in parts]


def their_run(seed: int, training: list[TensorDataset], tests: list[TensorDataset]) -> float:
    """The loop. Returns the mean accuracy over the hospitals."""
    torch.manual_seed(seed)
    first = nn.Linear(13, 1).state_dict()
    hospitals = []
    for patients in training:
        layer = nn.Linear(13, 1)
        layer.load_state_dict(first)
        hospitals.append(Hospital(nn.Sequential(layer, nn.Sigmoid()), patients))
    total = sum(hospital.size for hospital in hospitals)
    for _ in range(ROUNDS):
        updates = [hospital.train() for hospital in hospitals]
        change = [sum(h.size / total * u[i] for h, u in zip(hospitals, updates, strict=True)) for i in range(2)]
        for hospital, update in zip(hospitals, updates, strict=True):
            hospital.receive(change, update)
    model = hospitals[0].model.eval()
    found = []
    with torch.inference_mode():
        for patients in tests:
            batches = [(model(inputs) > 0.5, targets) for inputs, targets in DataLoader(patients, batch_size=BATCH)]
            found.append(torch.cat([(said == target).float() for said, target in batches]).mean().item())
    return statistics.mean(found)


def our_run(seed: int, root: str) -> float:
    """The run of the sweep that has this seed, as the command line plays it. Returns the same."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        options = {
            "seed_everything": seed,
            "data.init_args.root": root,
            "federation.run_dir": folder,
            "federation.progress": "false",
        }
        options |= {"model.init_args.backbone": f"{{class_path: LinearModel, init_args: {{inputs: 13, seed: {seed}}}}}"}
        main(["fit", "--config", "flamby/heart_disease", *(f"--{name}={value}" for name, value in options.items())])
        with (Path(folder) / "version_0" / "metrics.csv").open() as lines:
            return float([row["after/test_accuracy/mean"] for row in csv.DictReader(lines)][-1])


def timed(action: Callable[[], float]) -> tuple[float, float]:
    """Seconds of CPU, and what came of it."""
    start = process_time()
    found = action()
    return process_time() - start, found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data/heart_disease", help="the folder of the four processed.*.data")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44, 45, 46])
    given = parser.parse_args()
    torch.set_num_threads(1)
    our_run(given.seeds[0], given.root)  # imports, and what the first run finds out
    training, tests = sets(given.root, True), sets(given.root, False)
    ratios = []
    print("seed  FLamby's loop  lightning-fed  ratio  accuracies")
    for seed in given.seeds:
        theirs, accuracy = timed(lambda seed=seed: their_run(seed, training, tests))
        ours, other = timed(lambda seed=seed: our_run(seed, given.root))
        ratios.append(ours / theirs)
        print(f"{seed:4}  {theirs:11.2f} s  {ours:11.2f} s  {ratios[-1]:5.2f}  {accuracy:.4f} {other:.4f}")
    print(f"ratio: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")
