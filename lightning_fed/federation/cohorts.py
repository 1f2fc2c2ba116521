"""Who takes part in a round, who drops out of it, and who is never trained with: functions of the seed and the round."""

import math
from collections.abc import Collection, Sequence
from typing import Literal

import numpy as np

from lightning_fed.core.module import FederatedModule
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.errors import FederationError, require
from lightning_fed.seeding import DROPOUT, UNSEEN

Sampling = Literal["fixed", "poisson"]
"""Whether a cohort has always as many clients, or each client is in it with the same probability, independently of the others."""

Unseen = float | Collection[int] | None
"""A share of the clients, or their ids; None: nobody."""


def draw_unseen(unseen: Unseen, clients: Sequence[ClientInfo], seed: int) -> frozenset[int]:
    """Ids of the clients that are never trained with: a function of the seed.

    Args:
        unseen: how many, as a share, at least one, those without training examples before all others; or who.
        clients: of whom they are drawn.
        seed: the run's.

    Raises:
        FederationError: if these are no clients, or all of them, or if somebody else has nothing to train on.
    """
    drawn = _drawn(unseen, clients, seed)
    idle = [client.id for client in clients if not client.num_train and client.id not in drawn]
    require(
        not idle,
        f"{len(idle)} of {len(clients)} clients have no training examples, and are not unseen ({idle[:3]}, …): set "
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
        ids: who may; None: everybody.
        unseen: who never does.
        count: how many clients there are.
        centralized: name of the method, if it trains on everybody's data; else empty.

    Raises:
        FederationError: if these are no clients, or there are none left.
    """
    if ids is None:
        return frozenset(range(count)) - frozenset(unseen)
    if centralized:
        raise FederationError(f"eligible_clients is given, but {centralized} trains on everybody's data.")
    if not ids or not set(ids) <= set(range(count)):
        raise FederationError(f"eligible_clients is {list(ids)}: give some of the clients' ids, 0 to {count - 1}.")
    if not (left := frozenset(ids) - frozenset(unseen)):
        raise FederationError(f"eligible_clients is {list(ids)}, who are all unseen: leave some to train with.")
    return left


def says_itself_who(model: FederatedModule) -> bool:
    """Whether a method decides who takes part in a round, at least in some of them."""
    return model.centralized or type(model).cohort is not FederatedModule.cohort


def draw_cohort(clients: Sequence[ClientInfo], sampling: Sampling, participation: float, keys: Sequence[int]) -> list[ClientInfo]:
    """Who takes part in a round, in order of their ids.

    Args:
        clients: of whom they are drawn.
        sampling: ``fixed``: ``participation`` of them, without replacement, at least one; ``poisson``: each with that probability,
            which may be nobody.
        participation: in (0, 1].
        keys: of the random stream: the run's seed, ``COHORT``, and the round, from 1.
    """
    stream = np.random.default_rng(keys)
    if sampling == "poisson":
        return [client for client, draw in zip(clients, stream.random(len(clients)), strict=True) if draw < participation]
    drawn = stream.choice(len(clients), cohort_size(clients, participation), replace=False)
    return [clients[place] for place in sorted(drawn)]


def cohort_size(clients: Sequence[ClientInfo], participation: float) -> int:
    """How many take part in a round; where that is random, about how many."""
    return max(1, round(participation * len(clients)))


def dropouts(cohort: Sequence[ClientInfo], dropout: float, quorum: float, seed: int, round: int) -> frozenset[int]:
    """Ids of those who receive the model in a round, and of whom nothing is heard any more.

    Args:
        cohort: who takes part.
        dropout: with which probability each drops out.
        quorum: the share of the cohort that has to stay; if fewer do, the round is given up, as if all dropped out.
        seed: the run's.
        round: from 1.
    """
    if not dropout or not cohort:
        return frozenset()
    draws = np.random.default_rng([seed, DROPOUT, round]).random(max(client.id for client in cohort) + 1)
    away = frozenset(client.id for client in cohort if draws[client.id] < dropout)
    needed = math.ceil(quorum * len(cohort) - 1e-9)  # 0.07 of 100 is 7.000000000000001
    return away if len(cohort) - len(away) >= needed else frozenset(client.id for client in cohort)
