"""The partition in which each label belongs to one client."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_fed.data.partition.base import Partitioner
from lightning_fed.data.partition.pools import Indices, finish
from lightning_fed.errors import require


@dataclass(frozen=True)
class WholeLabels(Partitioner):
    """All examples of a label belong to one client: its restaurants, its topics (PF2LoRA's experiments on E2E and WebNLG).

    Labels are dealt from the largest to the smallest, each to the client with the fewest training examples so far, so that clients
    have similar sizes. With an official test set, its labels are dealt before the others, so that every client has test examples.
    Nothing is random: the seed does not matter. PF2LoRA's paper does not say how it deals its labels.
    """

    def pools(
        self, train_labels: NDArray[np.int64], test_labels: NDArray[np.int64], num_clients: int, seed: int
    ) -> tuple[list[Indices], list[Indices]]:
        """Divide both pools by the same table of labels; the labels of the test pool must be among those of the training pool."""
        labels, sizes = np.unique(train_labels, return_counts=True)
        unknown = np.setdiff1d(test_labels, labels)
        require(
            not len(unknown),
            f"{len(unknown)} labels of the test set are not in the training set, so no client could be tested on them: leave them "
            "out, or set split to pooled.",
        )
        tested = np.isin(labels, test_labels)
        require(
            tested.sum() >= num_clients,
            f"The test set has {tested.sum()} labels, too few for {num_clients} clients to be tested on one each: set num_clients "
            f"to at most {tested.sum()}.",
        )
        holders = deal(sizes, tested, num_clients)

        def parts(pool: NDArray[np.int64]) -> list[Indices]:
            holder = holders[np.searchsorted(labels, pool)]
            return finish([np.flatnonzero(holder == client) for client in range(num_clients)])

        return parts(train_labels), parts(test_labels)

    def split(self, members: list[Indices], num_clients: int, rng: np.random.Generator) -> list[Indices]:
        require(
            len(members) >= num_clients,
            f"The data have {len(members)} labels, too few for {num_clients} clients: set num_clients to at most {len(members)}.",
        )
        holders = deal([len(indices) for indices in members], np.zeros(len(members), dtype=bool), num_clients)
        return [
            np.concatenate([indices for indices, holder in zip(members, holders, strict=True) if holder == client])
            for client in range(num_clients)
        ]


def deal(sizes: Sequence[int] | NDArray[np.int64], early: NDArray[np.bool_], num_clients: int) -> NDArray[np.int64]:
    """The client of each label, from the numbers of examples of the labels, and which of them are dealt before the others."""
    held, holders = np.zeros(num_clients, dtype=np.int64), np.zeros(len(sizes), dtype=np.int64)
    for label in np.lexsort((-np.asarray(sizes), ~early)):
        holders[label] = held.argmin()
        held[holders[label]] += sizes[label]
    return holders
