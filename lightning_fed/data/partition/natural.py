"""Natural partitions: the data say whose an example is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_fed.data.partition.base import Partitioner
from lightning_fed.data.partition.pools import Indices
from lightning_fed.errors import require
from lightning_fed.options import PositiveInt


@dataclass(frozen=True)
class ByColumn(Partitioner):
    """Every value of a column is a client: a user, a hospital, a file. Chance plays no part, and clients may differ in size by any
    factor.

    ``num_clients`` need not be given. If it is, so many clients take part, drawn by the seed.

    Args:
        column: its name; the data say which columns they have.
        min_examples: leave out clients with fewer examples, and those without an example to train on or one to test on. None: leave
            nobody out; clients without an example to test on are then refused, and those without one to train on must be ``unseen``
            in a federation.
    """

    column: str
    min_examples: PositiveInt | None = None

    def __post_init__(self) -> None:
        fine = self.min_examples is None or self.min_examples >= 1
        require(fine, f"ByColumn got min_examples={self.min_examples}: give a whole number from 1, or none.")

    def holders(self, column: Callable[[str], NDArray[Any]]) -> NDArray[Any]:
        return column(self.column)


def by_name(holders: NDArray[Any]) -> tuple[list[str], list[Indices]]:
    """The clients' names, numbers in numerical order and before anything else in alphabetical order, and what each of them holds.

    Args:
        holders: the name of each example's client, shape (N,).
    """
    missing = [place for place, name in enumerate(holders.tolist()) if name is None or name != name or name == ""]
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
