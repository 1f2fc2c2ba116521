"""How often a report's intervals contain the truth for a new partition and training seed, compared with other intervals.

    python bench/new_partition.py                            # 20,000 sweeps of 5 partitions × 3 training seeds
    python bench/new_partition.py --partitions 5 --seeds 2

Differences between two methods are drawn around 0, with standard deviations of the partition, of the training seed and of their
interaction. The program prints in how many of 100 sweeps the 95 % interval contains 0.
"""

import argparse

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from lightning_fed.experiments.report.statistics import estimate

SETTINGS = {
    "the partition": (1.0, 0.0, 0.3),
    "training": (0.0, 1.0, 0.3),
    "both": (1.0, 1.0, 0.3),
    "their interaction, mostly": (0.3, 0.3, 1.0),
    "their interaction alone": (0.0, 0.0, 1.0),
}


def holds_as_if_independent(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether Student's interval over the values of each row holds 0."""
    half = stats.t.ppf(0.975, values.shape[1] - 1) * stats.sem(values, axis=1)
    return np.abs(values.mean(1)) <= half


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partitions", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sweeps", type=int, default=20_000)
    given = parser.parse_args()
    P, T = given.partitions, given.seeds
    for name, deviations in SETTINGS.items():
        rng = np.random.default_rng(0)
        shapes = ((P, 1), (1, T), (P, T))
        cells = sum(s * rng.normal(size=(given.sweeps, *shape)) for s, shape in zip(deviations, shapes, strict=True))
        ours = [abs(one.mean) <= one.half_width for one in map(estimate, cells)]
        others = (holds_as_if_independent(values).mean() for values in (cells.mean(2), cells.reshape(-1, P * T)))
        said = zip(("a report's", "over partitions' means", "over all runs"), (np.mean(ours), *others), strict=True)
        print(f"{name}: {', '.join(f'{which} {100 * share:.1f}' for which, share in said)}")
