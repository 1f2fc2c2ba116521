"""Which clients take part in a run and in each of its rounds: sampling, dropout and unseen clients, from the seed and the round."""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from lightning_fed.core.module import FederatedModule
from lightning_fed.data import FederatedDataModule
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.errors import FederationError, require
from lightning_fed.federation.settings import RunSettings, Sampling, Unseen
from lightning_fed.privacy import ExampleDP
from lightning_fed.seeding import DROPOUT, UNSEEN


class Participants:
    """Which clients train in a run, which are only evaluated, and which are attackers.

    Args:
        model: the method, which may choose the participants itself.
        data: the clients' data. Data of unseen clients are set aside; data of attackers are changed if the attack does so.
        clients: all clients, as the engine knows them.
        settings: the run's settings.

    Raises:
        FederationError: if no client is left to train, or method and settings both choose the participants.
    """

    def __init__(
        self, model: FederatedModule, data: FederatedDataModule, clients: Sequence[ClientInfo], settings: RunSettings
    ) -> None:
        self._model, self._settings = model, settings
        self.unseen = draw_unseen(settings.unseen, clients, settings.seed)
        data.set_aside(self.unseen)
        pooling = type(model).__name__ if model.centralized else ""
        among = eligible(settings.eligible_clients, self.unseen, len(clients), pooling)
        self.attackers = frozenset[int]()
        if settings.attack is not None:
            self.attackers = settings.attack.attackers([client for client in clients if client.id in among], settings.seed)
            settings.attack.poison(data, self.attackers)
            clients = data.clients  # with the counts of the attackers' labels
        self.clients = [replace(self._known(client), takes_part=client.id in among) for client in clients]
        self.eligible = [client for client in self.clients if client.takes_part]
        self.trained_on = [self._known(data.pooled().info)] if model.centralized else self.clients
        chosen = self._chosen(1)
        require(
            (settings.sampling == "fixed" and not settings.dropout) or not says_itself_who(model),
            f"Got sampling={settings.sampling} and dropout={settings.dropout:g}, but {type(model).__name__} chooses "
            "the participants itself: leave them out.",
        )
        drawn = cohort_size(self.eligible, settings.participation)
        self.cohort_size = 1 if model.centralized else drawn if chosen is None else len(chosen)
        """Number of participants of a round; the expected number if it is random."""

    def _known(self, client: ClientInfo) -> ClientInfo:
        """What a method may know of a client: where examples are private, not how many of its examples have which label."""
        return replace(client, label_counts=()) if isinstance(self._settings.privacy, ExampleDP) else client

    @property
    def rounds_for_everybody(self) -> int:
        """Number of cohorts that add up to all eligible clients."""
        return 1 if self._model.centralized else -(-len(self.eligible) // self.cohort_size)

    def draw(self, round: int, keys: Sequence[int]) -> list[ClientInfo]:
        """The participants of a round, in client order.

        Args:
            round: from 1.
            keys: keys of the random stream to draw from, unless the method chooses the participants.
        """
        if self._model.centralized:
            return self.trained_on
        if (chosen := self._chosen(round)) is not None:
            return chosen
        return draw_cohort(self.eligible, self._settings.sampling, self._settings.participation, keys)

    def _chosen(self, round: int) -> list[ClientInfo] | None:
        """The clients that the method chooses, in client order; None if it leaves the choice to the settings."""
        if (chosen := self._model.cohort(self.eligible, round, self._settings.seed)) is None:
            return None
        name, among = type(self._model).__name__, {client.id for client in self.eligible}
        if not (isinstance(chosen, Collection) and all(isinstance(client, ClientInfo) for client in chosen)):
            raise FederationError(
                f"cohort() of {name} returned {chosen!r:.80} in round {round}: return a list of some of the clients that it "
                "got, which are ClientInfo."
            )
        require(len(chosen) > 0, f"cohort() of {name} returned no clients in round {round}.")
        ids = [client.id for client in chosen]
        require(len(set(ids)) == len(ids), f"cohort() of {name} returned a client twice in round {round}: {ids}.")
        strange = [client.id for client in chosen if client.id not in among]
        require(not strange, f"cohort() of {name} returned clients {strange} in round {round}, which may not take part.")
        return sorted(chosen, key=lambda client: client.id)


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
        "unseen to their ids or to a larger share, or leave them out with min_examples=1 of the partition ByColumn.",
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
