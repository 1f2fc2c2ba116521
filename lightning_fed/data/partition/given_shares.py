"""The partition with given shares."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_fed.data.partition.base import Partitioner
from lightning_fed.data.partition.pools import Indices, cut
from lightning_fed.errors import require


@dataclass(frozen=True)
class GivenShares(Partitioner):
    """Every class is divided in given proportions: another code's division of the same data, or a hand-made one.

    A class is cut in proportion to its numbers, whatever their sum, in a separate test pool as in the training pool. The seed draws
    which of its examples a client gets. A class whose numbers are all 0 is not used.

    Args:
        shares: a row per client with a number per class, such as the client's number of examples of that class, or 0 and 1 for
            whether the client has it.
    """

    shares: Sequence[Sequence[float]]

    def __post_init__(self) -> None:
        widths = {len(row) for row in self.shares}
        require(len(widths) == 1, f"GivenShares got rows of {sorted(widths)} numbers: give a row per client, a number per class.")
        wrong = [share for row in self.shares for share in row if not 0 <= share < math.inf]
        require(not wrong, f"GivenShares got shares with {wrong[:1]}: give numbers from 0.")

    def split(self, members: list[Indices], num_clients: int, rng: np.random.Generator) -> list[Indices]:
        table = np.array(self.shares, dtype=float)
        require(
            table.shape == (num_clients, len(members)),
            f"GivenShares got shares of {table.shape[0]} clients and {table.shape[1]} classes, but there are {num_clients} clients "
            f"and {len(members)} classes: set num_clients to {table.shape[0]}, or give a row per client and a number per class.",
        )
        parts: list[list[Indices]] = [[] for _ in range(num_clients)]
        for indices, numbers in zip(members, table.T, strict=True):
            if total := numbers.sum():
                for part, piece in zip(parts, cut(indices, numbers / total), strict=True):
                    part.append(piece)
        return [np.concatenate(pieces) if pieces else np.array([], dtype=np.int64) for pieces in parts]
