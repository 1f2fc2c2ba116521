"""What all partitions do with a pool of examples before and after their own division."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_fed.errors import require

Indices = NDArray[np.int64]
"""Positions in a pool of examples."""


def by_class(labels: NDArray[np.int64], num_clients: int, seed: int) -> list[Indices]:
    """The shuffled indices of each class that has examples, after checks that apply to all partitions."""
    require(num_clients >= 1, f"Got num_clients={num_clients}: a federation needs at least 1 client.")
    require(seed >= 0, f"Got seed={seed}: give a whole number from 0.")
    require(
        num_clients <= len(labels),
        f"{num_clients} clients cannot share {len(labels)} examples: set num_clients to at most {len(labels)} or give more data.",
    )
    order = np.random.default_rng([seed, 1]).permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    return np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)


def check_classes(train_labels: NDArray[np.int64], test_labels: NDArray[np.int64]) -> None:
    """Refuse pools of different classes, which no table can divide alike."""
    missing = set(np.unique(train_labels)) ^ set(np.unique(test_labels))
    require(
        not missing,
        f"{len(missing)} classes are in only one of the training set and the official test set, so clients cannot be "
        "tested on what they train on: set split to pooled, or partition to IID.",
    )


def table_stream(seed: int) -> np.random.Generator:
    """The random stream of a partition. The table is drawn first, so that it does not depend on the pool."""
    return np.random.default_rng([seed, 0])


def cut(indices: Indices, shares: NDArray[np.float64], at_least: int = 0) -> list[Indices]:
    """Cut a list into consecutive pieces of the given shares, which sum to 1, none shorter than ``at_least``."""
    free = len(indices) - at_least * len(shares)
    ends = np.floor(np.cumsum(shares) * free + 0.5).astype(np.int64) + at_least * np.arange(1, len(shares) + 1)
    return np.split(indices, ends[:-1])


def checked_parts(parts: Any, num_clients: int, size: int, name: str) -> list[Indices]:
    """What a partition's ``split`` returns, as a list. Refused unless it has an array of numbers of examples for each client."""
    given = [np.asarray(part) for part in parts] if isinstance(parts, Iterable) and not isinstance(parts, dict | set | str) else []
    returned = f"{len(given)} parts" if given else f"a {type(parts).__name__}"
    require(
        len(given) == num_clients,
        f"split() of {name} returned {returned} for {num_clients} clients: let it return a list with an array for each client.",
    )
    for client, part in enumerate(given):
        require(
            not part.size or (part.dtype.kind in "iu" and part.ndim == 1 and part.min() >= 0 and part.max() < size),
            f"split() of {name} gave client {client} something else than a list of indices from 0 to {size - 1}.",
        )
    return given


def finish(parts: list[Indices]) -> list[Indices]:
    """Refuse clients without examples, and sort each client's examples."""
    empty = sum(len(part) == 0 for part in parts)
    require(
        not empty,
        f"The partition leaves {empty} of {len(parts)} clients without examples: set num_clients lower, choose a "
        "milder partition or give more data.",
    )
    return [np.sort(part) for part in parts]
