"""Client sampling, dropout and unseen clients, as functions of the seed and the round."""

import math
from collections.abc import Collection, Sequence
from typing import Literal

import numpy as np

from lightning_fed.core.module import FederatedModule
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.errors import FederationError, require
from lightning_fed.seeding import DROPOUT, UNSEEN

Sampling = Literal["fixed", "poisson"]
"""``fixed``: all cohorts have the same size; ``poisson``: each client is in a cohort with the same probability, independently."""

Unseen = float | Collection[int] | None
"""A share of the clients, or their ids; None: no client."""


def draw_unseen(unseen: Unseen, clients: Sequence[ClientInfo], seed: int) -> frozenset[int]:
    """Ids of the clients that never take part in training: a function of the seed.

    Args:
        unseen: a share (at least one client; clients without training examples first), or ids.
        clients: the clients to draw from.
        seed: the run's seed.

    Raises:
        FederationError: if the ids are invalid or are all clients, or if another client has no training examples.
    """
    drawn = _drawn(unseen, clients, seed)
    idle = [client.id for client in clients if not client.num_train and client.id not in drawn]
    require(
        not idle,
        f"{len(idle)} of {len(clients)} clients have no training examples and are not among the unseen ({idle[:3]}, …): set "
        "unseen to their ids or to a larger share, or the partition's min_examples to 1, which leaves them out.",
    )
    return drawn


def _drawn(unseen: Unseen, clients: Sequence[ClientInfo], seed: int) -> frozenset[int]:
    if unseen is None or unseen == 0:
        return frozenset()
    last = len(clients) - 1
    if isinstance(unseen, Collection):
        require(
            not any(isinstance(client, bool) for client in unseen)
            and 0 < len(set(unseen)) <= last
            and set(unseen) <= set(range(len(clients))),
            f"unseen is {list(unseen)}: give ids of some clients, from 0 to {last}, and not all of them.",
        )
        return frozenset(unseen)
    require(0 < unseen < 1, f"unseen is {unseen}: give a share above 0 and below 1, or ids.")
    size = max(1, round(unseen * len(clients)))
    require(size <= last, f"unseen is {unseen}, which is {size} of {len(clients)} clients: leave some to train with.")
    idle = [client.id for client in clients if not client.num_train]
    able = [client.id for client in clients if client.num_train]
    more = np.random.default_rng([seed, UNSEEN]).choice(able, max(0, size - len(idle)), replace=False).tolist()
    return frozenset(idle[:size] + more)


def eligible(ids: Collection[int] | None, unseen: Collection[int], count: int, centralized: str) -> frozenset[int]:
    """Ids of the clients that may take part.

    Args:
        ids: clients that may take part. None: all.
        unseen: clients that never take part.
        count: number of clients.
        centralized: name of the method if it trains on pooled data, else empty.

    Raises:
        FederationError: if the ids are invalid, or no client is left.
    """
    if ids is None:
        return frozenset(range(count)) - frozenset(unseen)
    if centralized:
        raise FederationError(f"eligible_clients is set, but {centralized} trains on the pooled data of all clients: leave it out.")
    if not ids or not set(ids) <= set(range(count)):
        raise FederationError(f"eligible_clients is {list(ids)}: give some of the clients' ids, 0 to {count - 1}.")
    if not (left := frozenset(ids) - frozenset(unseen)):
        raise FederationError(f"eligible_clients is {list(ids)}, which are all unseen: leave some to train with.")
    return left


def says_itself_who(model: FederatedModule) -> bool:
    """Whether a method chooses the participants itself, at least in some rounds."""
    return model.centralized or type(model).cohort is not FederatedModule.cohort


def draw_cohort(clients: Sequence[ClientInfo], sampling: Sampling, participation: float, keys: Sequence[int]) -> list[ClientInfo]:
    """The participants of a round, in order of their ids.

    Args:
        clients: the clients to draw from.
        sampling: ``fixed``: a share ``participation``, without replacement, at least one; ``poisson``: each with that probability,
            possibly none.
        participation: in (0, 1].
        keys: keys of the random stream: the run's seed, ``COHORT``, and the round, from 1.
    """
    stream = np.random.default_rng(keys)
    if sampling == "poisson":
        return [client for client, draw in zip(clients, stream.random(len(clients)), strict=True) if draw < participation]
    drawn = stream.choice(len(clients), cohort_size(clients, participation), replace=False)
    return [clients[place] for place in sorted(drawn)]


def cohort_size(clients: Sequence[ClientInfo], participation: float) -> int:
    """Number of participants of a round; the expected number if it is random."""
    return max(1, round(participation * len(clients)))


def dropouts(cohort: Sequence[ClientInfo], dropout: float, quorum: float, seed: int, round: int) -> frozenset[int]:
    """Ids of the clients that receive the model in a round but do not send an update.

    Args:
        cohort: the participants.
        dropout: probability that a participant drops out.
        quorum: share of the cohort that must stay. With fewer, the round counts as if all had dropped out.
        seed: the run's seed.
        round: from 1.
    """
    if not dropout or not cohort:
        return frozenset()
    draws = np.random.default_rng([seed, DROPOUT, round]).random(max(client.id for client in cohort) + 1)
    away = frozenset(client.id for client in cohort if draws[client.id] < dropout)
    enough = len(cohort) - len(away) >= least_of(quorum, len(cohort))
    return away if enough else frozenset(client.id for client in cohort)


def least_of(quorum: float, count: int) -> int:
    """Smallest number of turns that is a quorum; 0.07 of 100 is 7, in floating point slightly more.

    Args:
        quorum: share of the turns.
        count: number of turns.
    """
    return math.ceil(quorum * count - 1e-9)
