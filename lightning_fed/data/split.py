"""Each client's examples, divided into training, validation and test."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_fed.data.partition.base import Partitioner
from lightning_fed.data.partition.natural import by_name
from lightning_fed.data.partition.pools import Indices
from lightning_fed.errors import require

TRAIN, VAL, TEST = range(3)
"""What an example is for, where the data have a division of their own."""


class Split(NamedTuple):
    """Indices of one client's examples."""

    train: Indices
    val: Indices
    test: Indices

    @property
    def sizes(self) -> str:
        """How many there are, for people."""
        return " + ".join(f"{len(part)} {name}" for name, part in self._asdict().items())


class Shares(NamedTuple):
    """How large the parts of what a client holds are.

    Args:
        val: of its examples; where the test set is official, of its training examples.
        test: of its examples; where the test set is official, it does not matter.
        at_least: examples that a part has, however small its share; the training part comes first, then the test part.
    """

    val: float
    test: float
    at_least: int = 0


def deal(
    labels: NDArray[np.int64], roles: NDArray[np.int64] | None, shares: Shares, partition: Partitioner, num_clients: int, seed: int
) -> list[Split]:
    """Deal examples to clients, and divide what each of them holds.

    Args:
        labels: of the examples, those of a training set before those of a test set.
        roles: what each example is for, where both sets are partitioned alike; None: the examples are one pool.
        shares: how large the parts are.
        partition: who holds what.
        num_clients: how many clients there are.
        seed: of the partition and the division.
    """
    if roles is None:
        parts = partition(labels, num_clients, seed)
        held = np.concatenate(parts)
        require(
            len(np.unique(held)) == len(held),
            f"Clients of {type(partition).__name__} share examples: with split=pooled a client would train on another's "
            "test examples. Set split to official or choose a disjoint partition.",
        )
    else:
        num_train = int((roles != TEST).sum())
        pools = partition.pools(labels[:num_train], labels[num_train:], num_clients, seed)
        parts = [np.concatenate([train, test + num_train]) for train, test in zip(*pools, strict=True)]
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
    """Divide what each client holds.

    Args:
        parts: the examples of each client, sorted.
        roles: what each example is for, shape (N,). Where none is for validation, such examples are held out of the training
            examples. None: examples are drawn for each part.
        shares: how large the parts are.
        seed: of what is drawn.
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
    """At most so many examples of each part of each client, drawn."""
    return [
        Split(*(_hold_out(part, 1.0, min(most, len(part)), 0, [seed, 5, client, use])[0] for use, part in enumerate(split)))
        for client, split in enumerate(splits)
    ]


def union(splits: list[Split]) -> Split:
    """Everybody's examples, each in one part: what anyone tests on is not trained on, also where clients overlap."""
    train, val, test = (np.unique(np.concatenate(parts)) for parts in zip(*splits, strict=True))
    val = np.setdiff1d(val, test)
    return Split(np.setdiff1d(train, np.concatenate([val, test])), val, test)


def divide_by_name(
    holders: NDArray[Any],
    roles: NDArray[np.int64] | None,
    shares: Shares,
    min_examples: int | None,
    num_clients: int | None,
    seed: int,
) -> tuple[list[str], list[Split]]:
    """The clients that the data name, those that take part, in order of their names, and what each of them holds, divided.

    Args:
        holders: the name of each example's client, shape (N,).
        roles: what each example is for; see :func:`divide`.
        shares: how large the parts are.
        min_examples: see :attr:`Partitioner.min_examples`. Without validation examples a client can take part; without training
            examples, if nobody is left out, it can be unseen.
        num_clients: how many are drawn; None takes all.
        seed: of the division and the draw.
    """
    names, parts = by_name(holders)
    splits = divide(parts, roles, shares._replace(at_least=1), seed)
    needs_both = min_examples is not None
    incomplete = [k for k, split in enumerate(splits) if not len(split.test) or (needs_both and not len(split.train))]
    require(
        not incomplete or needs_both,
        f"{len(incomplete)} of {len(names)} clients lack an example to test on"
        + "".join(f" (the first is {names[k]!r}: {splits[k].sizes})" for k in incomplete[:1])
        + ": set the partition's min_examples to 1 to leave them out; or set split to pooled, which divides what each client has.",
    )
    least, lacking = min_examples or 1, set(incomplete)
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


def _hold_out(indices: Indices, share: float, total: int, at_least: int, stream: list[int]) -> tuple[Indices, Indices]:
    """A random ``share`` of ``total``, rounded, and the rest; both sorted. ``at_least`` precedes the share, but never takes all."""
    order = np.random.default_rng(stream).permutation(indices)
    size = min(int(share * total + 0.5), len(order))
    if share and at_least:
        size = max(min(size, len(order) - 1), min(at_least, len(order) - 1), 0)
    return np.sort(order[:size]), np.sort(order[size:])
