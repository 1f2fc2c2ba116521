"""A server that has a state for each client."""

from collections.abc import Iterable, Sequence
from typing import Literal

from lightning_fed.core.aggregation import noted
from lightning_fed.core.messages import ClientUpdate
from lightning_fed.core.server import Combine, Server
from lightning_fed.tensors import State


def combine_nothing(updates: Iterable[tuple[State, float]], state: State) -> State:
    """No state is made of the updates: each client's stays its own."""
    for _ in updates:
        pass
    return {}


class PersonalServer(Server):
    """Keeps a state for each client in :attr:`client_state`, on disk where memory is short.

    What arrives in a round waits in :attr:`round_state` until all of it is there: until then clients are sent what follows from the
    states before.

    Args:
        state: the initial shared state.
        weighting: how updates are weighted where they are combined.
        combine: makes the shared state of the updates. Default: nothing is combined.
    """

    def __init__(
        self, state: State, weighting: Literal["examples", "uniform"] = "examples", combine: Combine = combine_nothing
    ) -> None:
        super().__init__(state, weighting, combine=combine)

    @property
    def size(self) -> int:
        """How many values the shared state has."""
        return sum(tensor.numel() for tensor in self.state.values())

    def state_of(self, update: ClientUpdate) -> State:
        """What is put into :attr:`round_state` of an update. Default: all of it."""
        return update.state

    def update_clients(self, clients: Sequence[int]) -> dict[str, float]:
        """Replace the states of clients, when all updates have arrived and the shared state is the new one.

        Args:
            clients: whose updates arrived, in order; at least one.

        Returns:
            Metrics of the round; by default none, and what arrived is kept as it is.
        """
        for client in clients:
            self.client_state.put(client, self.round_state.get(client), self.round)
        return {}

    def aggregate(self, updates: Iterable[ClientUpdate]) -> dict[str, float]:
        """Merge a round's updates; see :meth:`.Server.aggregate`."""
        super().aggregate(noted(updates, lambda update: self.round_state.put(update.client, self.state_of(update), self.round)))
        clients = list(self.round_state)
        metrics = self.update_clients(clients) if clients else {}
        self.round_state.clear()
        return metrics
