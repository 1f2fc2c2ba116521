"""Who takes part: which clients are never trained with."""

from collections.abc import Collection, Sequence

import numpy as np

from lightning_fed.data.client_info import ClientInfo
from lightning_fed.errors import FederationError, require
from lightning_fed.seeding import UNSEEN

Unseen = float | Collection[int] | None
"""A share of the clients, or their ids; None: nobody."""


def draw_unseen(unseen: Unseen, clients: Sequence[ClientInfo], seed: int) -> frozenset[int]:
    """Ids of the clients that are never trained with: a function of the seed.

    Args:
        unseen: how many, as a share, at least one; or who.
        clients: of whom they are drawn.
        seed: the run's.

    Raises:
        FederationError: if these are no clients, or all of them.
    """
    if unseen is None or unseen == 0:
        return frozenset()
    last = len(clients) - 1
    if isinstance(unseen, Collection):
        require(
            0 < len(set(unseen)) <= last and set(unseen) <= set(range(len(clients))),
            f"unseen is {list(unseen)}: give ids of some clients, from 0 to {last}, and not all of them.",
        )
        return frozenset(unseen)
    size = max(1, round(unseen * len(clients)))
    require(
        unseen > 0 and size <= last,
        f"unseen is {unseen}, which is {size} of {len(clients)} clients: leave some to train with.",
    )
    return frozenset(np.random.default_rng([seed, UNSEEN]).choice(len(clients), size, replace=False).tolist())


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
