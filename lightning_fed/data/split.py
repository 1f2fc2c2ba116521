"""Division of each client's examples into training, validation and test."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_fed.data.partition.base import Partitioner
from lightning_fed.data.partition.natural import by_name
from lightning_fed.data.partition.pools import Indices
from lightning_fed.errors import require

TRAIN, VAL, TEST = range(3)
"""The set that an example belongs to, if the data have their own division."""


class Split(NamedTuple):
    """Indices of one client's examples."""

    train: Indices
    val: Indices
    test: Indices

    @property
    def sizes(self) -> str:
        """The sizes as text, for messages."""
        return " + ".join(f"{len(part)} {name}" for name, part in self._asdict().items())


class Shares(NamedTuple):
    """Sizes of the parts of a client's examples.

    Args:
        val: validation share of its examples; with an official test set, of its training examples (of those of all clients, if
            clients share examples).
        test: test share of its examples; unused with an official test set.
        at_least: minimum number of examples of a part, however small its share; training comes first, then test.
    """

    val: float
    test: float
    at_least: int = 0


def deal(
    labels: NDArray[np.int64], roles: NDArray[np.int64] | None, shares: Shares, partition: Partitioner, num_clients: int, seed: int
) -> list[Split]:
    """Deal examples to clients, and divide each client's examples.

    Args:
        labels: labels of the examples, those of a training set before those of a test set.
        roles: the set of each example, if both sets are partitioned in the same way. None: the examples are one pool.
        shares: sizes of the parts.
        partition: how examples are divided among clients.
        num_clients: number of clients.
        seed: seed of the partition and the division.
    """
    if roles is None:
        parts = partition(labels, num_clients, seed)
        require(
            not _overlap(parts),
            f"Clients of {type(partition).__name__} share examples: with split=pooled a client would train on another's "
            "test examples. Set split to official or choose a disjoint partition.",
        )
    else:
        num_train = int((roles != TEST).sum())
        pools = partition.pools(labels[:num_train], labels[num_train:], num_clients, seed)
        parts = [np.concatenate([train, test + num_train]) for train, test in zip(*pools, strict=True)]
        if VAL not in roles and _overlap(parts):  # no client may train on another's validation examples
            pool = np.flatnonzero(roles == TRAIN)
            val, _ = _hold_out(pool, shares.val, len(pool), 0, [seed, 3])
            roles = np.where(np.isin(np.arange(len(roles)), val), VAL, roles)
    splits = divide(parts, roles, shares, seed)
    needs_val = shares.val > 0 and (roles is None or VAL not in roles)
    for client, split in enumerate(splits):
        require(
            bool(len(split.train) and len(split.test) and (len(split.val) or not needs_val)),
            f"Client {client} has {sum(map(len, split))} examples ({split.sizes}), too few for at least one in each part: "
            "lower num_clients, choose a milder partition (or raise its minimum), or change val_share and "
            "test_share.",
        )
    return splits


def divide(parts: list[Indices], roles: NDArray[np.int64] | None, shares: Shares, seed: int) -> list[Split]:
    """Divide each client's examples.

    Args:
        parts: the examples of each client, sorted.
        roles: the set of each example, shape (N,). If none is for validation, validation examples are held out of the training
            examples. None: each part is drawn.
        shares: sizes of the parts.
        seed: seed of the draws.
    """
    official_val = roles is not None and bool((roles == VAL).any())
    splits = []
    for client, part in enumerate(parts):
        if roles is None:
            test, rest = _hold_out(part, shares.test, len(part), shares.at_least, [seed, 2, client])
            total = len(part)
        else:
            test, rest = part[roles[part] == TEST], part[roles[part] != TEST]
            total = len(rest)
        if roles is not None and official_val:
            val, train = rest[roles[rest] == VAL], rest[roles[rest] == TRAIN]
        else:
            val, train = _hold_out(rest, shares.val, total, shares.at_least, [seed, 3, client])
        splits.append(Split(train, val, test))
    return splits


def limited(splits: list[Split], most: int, seed: int) -> list[Split]:
    """Draw at most ``most`` examples of each part of each client."""
    return [
        Split(*(_hold_out(part, 1.0, min(most, len(part)), 0, [seed, 5, client, use])[0] for use, part in enumerate(split)))
        for client, split in enumerate(splits)
    ]


def union(splits: list[Split]) -> Split:
    """The examples of all clients, each in one part: test examples are not trained on, even if clients overlap."""
    train, val, test = (np.unique(np.concatenate(parts)) for parts in zip(*splits, strict=True))
    val = np.setdiff1d(val, test)
    return Split(np.setdiff1d(train, np.concatenate([val, test])), val, test)


def divide_by_name(
    holders: NDArray[Any],
    roles: NDArray[np.int64] | None,
    shares: Shares,
    partition: Partitioner,
    num_clients: int | None,
    seed: int,
) -> tuple[list[str], list[Split]]:
    """The clients that the data name and that take part, in order of their names, and their examples, divided.

    Args:
        holders: name of each example's client, shape (N,).
        roles: the set of each example; see :func:`divide`.
        shares: sizes of the parts.
        partition: says with ``min_examples`` whom to leave out. A client without validation examples can take part. A client
            without training examples can be unseen if ``min_examples`` is None.
        num_clients: number of clients to draw. None: all.
        seed: seed of the division and the draw.
    """
    names, parts = by_name(holders)
    splits = divide(parts, roles, shares._replace(at_least=1), seed)
    needs_both = partition.min_examples is not None
    incomplete = [k for k, split in enumerate(splits) if not len(split.test) or (needs_both and not len(split.train))]
    require(
        not incomplete or needs_both,
        f"{len(incomplete)} of {len(names)} clients lack an example to test on"
        + "".join(f" (the first is {names[k]!r}: {splits[k].sizes})" for k in incomplete[:1])
        + f": {partition.leave_out(1)} to leave them out"
        + ("." if roles is None else "; or set split to pooled, which divides all of its examples."),
    )
    least, lacking = partition.min_examples or 1, set(incomplete)
    kept = [k for k, split in enumerate(splits) if k not in lacking and sum(map(len, split)) >= least]
    require(
        len(kept) > 0,
        f"None of the {len(names)} clients has {least} examples and at least one each to train and to test on: lower the "
        "partition's min_examples, or choose another column.",
    )
    if num_clients is not None:
        require(
            num_clients <= len(kept),
            f"Got num_clients={num_clients}, but the data have {len(kept)} clients: set it to at most that, or leave it out.",
        )
        drawn = np.random.default_rng([seed, 4]).choice(len(kept), num_clients, replace=False)
        kept = [kept[place] for place in sorted(drawn.tolist())]
    return [names[k] for k in kept], [splits[k] for k in kept]


def _overlap(parts: list[Indices]) -> bool:
    """Whether an example is in several parts."""
    held = np.concatenate(parts)
    return len(np.unique(held)) < len(held)


def _hold_out(indices: Indices, share: float, total: int, at_least: int, stream: list[int]) -> tuple[Indices, Indices]:
    """A random ``share`` of ``total``, rounded, and the rest; both sorted. ``at_least`` precedes the share, but never takes all."""
    order = np.random.default_rng(stream).permutation(indices)
    size = min(int(share * total + 0.5), len(order))
    if share and at_least:
        size = max(min(size, len(order) - 1), min(at_least, len(order) - 1), 0)
    return np.sort(order[:size]), np.sort(order[size:])
