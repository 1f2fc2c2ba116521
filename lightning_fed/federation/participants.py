"""Which clients take part in a run and in each of its rounds."""

from collections.abc import Sequence
from dataclasses import replace

from lightning_fed.core.module import FederatedModule
from lightning_fed.data import FederatedDataModule
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.errors import require
from lightning_fed.federation.cohorts import cohort_size, draw_cohort, draw_unseen, eligible, says_itself_who
from lightning_fed.federation.settings import RunSettings
from lightning_fed.privacy import ExampleDP


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
        self.clients = [replace(self._known(client), takes_part=client.id in among) for client in clients]
        self.eligible = [client for client in self.clients if client.takes_part]
        self.attackers = settings.attack.attackers(self.eligible, settings.seed) if settings.attack else frozenset[int]()
        data.flip_labels(())
        if settings.attack is not None:
            settings.attack.poison(data, self.attackers)
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
        require(len(chosen) > 0, f"cohort() of {name} returned no clients in round {round}.")
        ids = [client.id for client in chosen]
        require(len(set(ids)) == len(ids), f"cohort() of {name} returned a client twice in round {round}: {ids}.")
        strange = [client.id for client in chosen if client.id not in among]
        require(not strange, f"cohort() of {name} returned clients {strange} in round {round}, which may not take part.")
        return sorted(chosen, key=lambda client: client.id)
