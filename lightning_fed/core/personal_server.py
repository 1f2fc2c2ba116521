"""A server that keeps a state for each client."""

from collections.abc import Iterable, Sequence
from typing import Literal

from lightning_fed.core.aggregation import noted
from lightning_fed.core.messages import ClientUpdate
from lightning_fed.core.server import Combine, Server
from lightning_fed.tensors import State


def combine_nothing(updates: Iterable[tuple[State, float]], state: State) -> State:
    """Consumes the updates without combining them: each client's state stays its own."""
    for _ in updates:
        pass
    return {}


class PersonalServer(Server):
    """Keeps a state for each client in :attr:`client_state`, on disk if memory is short.

    The updates of a round wait in :attr:`round_state` until all have arrived; until then clients are sent what follows from the
    earlier states.

    Args:
        state: the initial shared state.
        weighting: how updates are weighted if they are combined.
        combine: makes the shared state from the updates. Default: nothing is combined.
    """

    def __init__(
        self, state: State, weighting: Literal["examples", "uniform"] = "examples", combine: Combine = combine_nothing
    ) -> None:
        super().__init__(state, weighting, combine=combine)

    @property
    def size(self) -> int:
        """Number of values of the shared state."""
        return sum(tensor.numel() for tensor in self.state.values())

    def state_of(self, update: ClientUpdate) -> State:
        """What is stored of an update in :attr:`round_state`. Default: all of it."""
        return update.state

    def update_clients(self, clients: Sequence[int]) -> dict[str, float]:
        """Replace the clients' states; called when all updates have arrived and the shared state has been updated.

        Args:
            clients: ids of the clients whose updates arrived, in order; at least one.

        Returns:
            Metrics of the round. By default there are none, and the updates become the clients' states.
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
