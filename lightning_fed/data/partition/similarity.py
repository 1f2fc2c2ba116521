"""The partition whose clients have a given degree of similarity."""

import math
from dataclasses import dataclass

import numpy as np

from lightning_fed.data.partition.base import Partitioner
from lightning_fed.data.partition.pools import Indices
from lightning_fed.errors import require
from lightning_fed.options import ClosedUnitInterval


@dataclass(frozen=True)
class BySimilarity(Partitioner):
    r"""A part of the pool is dealt at random, the rest in the order of the labels (Karimireddy et al., ICML 2020, SCAFFOLD).

    Of :math:`N` shuffled examples, :math:`\lfloor qN \rfloor` are dealt evenly to the clients. The others are sorted by label and
    cut into one chunk of equal length per client: client 0 holds the first labels, the last client the last ones, in a separate
    test pool as in the train pool. If the classes' shares of the two pools differ, so do the boundaries between classes. Clients
    are disjoint, their sizes differ by at most one, and no example is left out.

    Give one of the two arguments; they sum to 1. Neither is called :math:`s`: PF2LoRA (Hao et al. 2025) defines its :math:`s` as
    the i.i.d. fraction, but uses it as the other one: in its experiments :math:`s` is ``sorted_fraction``.

    Args:
        iid_fraction: fraction of the pool that is dealt at random, :math:`q`; with 1, clients have similar data.
        sorted_fraction: fraction that is dealt by label, :math:`1-q`; with 1, a client has the fewest classes.
    """

    iid_fraction: ClosedUnitInterval | None = None
    sorted_fraction: ClosedUnitInterval | None = None

    def __post_init__(self) -> None:
        given = {"iid_fraction": self.iid_fraction, "sorted_fraction": self.sorted_fraction}
        told = ", ".join(f"{name}={value}" for name, value in given.items())
        require(sum(value is not None for value in given.values()) == 1, f"BySimilarity got {told}: give exactly one of the two.")
        require(all(value is None or 0 <= value <= 1 for value in given.values()), f"BySimilarity got {told}: give 0 to 1.")

    def split(self, members: list[Indices], num_clients: int, rng: np.random.Generator) -> list[Indices]:
        pool = np.concatenate(members)  # in the order of the labels, random within a label
        fraction = 1 - (self.sorted_fraction or 0.0) if self.iid_fraction is None else self.iid_fraction
        size = math.floor(fraction * len(pool) + 1e-6)  # in floats, (1 - 0.9) * 1000 is less than 100
        dealt = rng.permutation(len(pool))[:size]
        chunks = np.array_split(np.delete(pool, dealt), num_clients)
        # The first clients have the longer chunks, so the last ones get more of the dealt part.
        hands = np.array_split(pool[dealt], num_clients)[::-1]
        return [np.concatenate(parts) for parts in zip(hands, chunks, strict=True)]
