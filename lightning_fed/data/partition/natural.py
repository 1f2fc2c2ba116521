"""Natural partitions: the data say which client an example belongs to."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_fed.data.partition.base import Partitioner
from lightning_fed.data.partition.pools import Indices
from lightning_fed.errors import require
from lightning_fed.options import PositiveInt

MISSING = ("", "nan", "<NA>", "NaT")
"""How NumPy and pandas write what is missing among names."""


@dataclass(frozen=True)
class ByColumn(Partitioner):
    """Every value of a column is a client: a user, a hospital, a file. Nothing is random; client sizes may differ by any factor.

    If ``num_clients`` is given, that many clients are drawn by the seed.

    Args:
        column: name of the column; it depends on the data which ones there are.
        min_examples: leave out clients with fewer examples, and those without a training or a test example. None: leave out no
            client; clients without a test example are then refused, and those without a training example must be ``unseen`` in a
            federation.
    """

    column: str
    min_examples: PositiveInt | None = None

    def __post_init__(self) -> None:
        fine = self.min_examples is None or self.min_examples >= 1
        require(fine, f"ByColumn got min_examples={self.min_examples}: give a whole number from 1, or None.")

    def leave_out(self, least: int) -> str:
        """Names the whole partition: data that have ``client`` made it themselves, and take no other beside it."""
        return f"set the partition, in place of client, to {replace(self, min_examples=least)}"

    def holders(self, column: Callable[[str], NDArray[Any]]) -> NDArray[Any]:
        return column(self.column)


def unnamed(names: NDArray[Any]) -> list[int]:
    """The places at which a name is missing."""
    return [place for place, name in enumerate(names.tolist()) if name is None or str(name) in MISSING]


def by_name(holders: NDArray[Any]) -> tuple[list[str], list[Indices]]:
    """The clients' names and the examples of each, from the name of each example's client, shape (N,); whole numbers from 0 by
    size, before all others in alphabetical order.
    """
    missing = unnamed(holders)
    require(
        not missing,
        f"{len(missing)} of {len(holders)} examples, number {missing[:1]} among them, do not say which client they belong to: fill "
        "in the column, or leave them out of the data.",
    )
    found, numbers = np.unique(holders.astype(str), return_inverse=True)
    names: list[str] = found.tolist()
    parts = np.split(np.argsort(numbers, kind="stable"), np.cumsum(np.bincount(numbers))[:-1])
    order = sorted(
        range(len(names)), key=lambda k: (not names[k].isdecimal(), int(names[k]) if names[k].isdecimal() else 0, names[k])
    )
    return [names[k] for k in order], [parts[k] for k in order]
