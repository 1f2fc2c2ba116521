"""Each client's examples, divided into training, validation and test."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_fed.data.partition.base import Partitioner
from lightning_fed.data.partition.pools import Indices
from lightning_fed.errors import require


class Split(NamedTuple):
    """Indices of one client's examples."""

    train: Indices
    val: Indices
    test: Indices


def split_pooled(
    labels: NDArray[np.int64], partition: Partitioner, num_clients: int, seed: int, val_share: float, test_share: float
) -> list[Split]:
    """Partition one pool, then divide what each client holds by shares."""
    parts = partition(labels, num_clients, seed)
    held = np.concatenate(parts)
    require(
        len(np.unique(held)) == len(held),
        f"Clients of {type(partition).__name__} share examples: with split=pooled a client would train on another's "
        "test examples. Set split to official or choose a disjoint partition.",
    )
    splits = []
    for client, part in enumerate(parts):
        test, rest = _hold_out(part, test_share, len(part), [seed, 2, client])
        val, train = _hold_out(rest, val_share, len(part), [seed, 3, client])
        splits.append(Split(train, val, test))
    return _checked(splits, val_share)


def split_official(
    train_labels: NDArray[np.int64],
    test_labels: NDArray[np.int64],
    partition: Partitioner,
    num_clients: int,
    seed: int,
    val_share: float,
) -> list[Split]:
    """Partition both pools alike, then hold out validation examples of each client's training part.

    Test indices count on from the training pool's.
    """
    splits = []
    for client, (part, test) in enumerate(zip(*partition.pools(train_labels, test_labels, num_clients, seed), strict=True)):
        val, train = _hold_out(part, val_share, len(part), [seed, 3, client])
        splits.append(Split(train, val, test + len(train_labels)))
    return _checked(splits, val_share)


def rows_of(splits: list[Split], example: NDArray[np.int64]) -> list[Split]:
    """Splits of examples as splits of rows, where an example has several.

    Args:
        splits: indices of examples.
        example: which example each row belongs to, shape (rows,).
    """
    return [Split(*(np.flatnonzero(np.isin(example, part)) for part in split)) for split in splits]


def union(splits: list[Split]) -> Split:
    """Everybody's examples, each in one part: what anyone tests on is not trained on, also where clients overlap."""
    train, val, test = (np.unique(np.concatenate(parts)) for parts in zip(*splits, strict=True))
    val = np.setdiff1d(val, test)
    return Split(np.setdiff1d(train, np.concatenate([val, test])), val, test)


def _hold_out(indices: Indices, share: float, total: int, stream: list[int]) -> tuple[Indices, Indices]:
    """A random ``share`` of ``total``, rounded, and the rest; both sorted."""
    order = np.random.default_rng(stream).permutation(indices)
    size = min(int(share * total + 0.5), len(order))
    return np.sort(order[:size]), np.sort(order[size:])


def _checked(splits: list[Split], val_share: float) -> list[Split]:
    for client, split in enumerate(splits):
        sizes = " + ".join(f"{len(part)} {name}" for name, part in split._asdict().items())
        require(
            bool(len(split.train) and len(split.test) and (len(split.val) or not val_share)),
            f"Client {client} has {sum(map(len, split))} examples ({sizes}), too few for at least one in each part: "
            "lower num_clients, choose a milder partition (or raise its minimum), or change val_share and "
            "test_share.",
        )
    return splits
