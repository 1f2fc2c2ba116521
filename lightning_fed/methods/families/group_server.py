"""Clients in groups that are averaged separately."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Literal

from lightning_fed.core import Broadcast, ClientInfo, ClientUpdate, Server, State, WeightedMean


class GroupServer(Server):
    """Keeps a state for each group of clients, and averages their updates. A group without a participant in a round keeps its
    state.

    Args:
        states: the initial states by group: a number, which is sent as the :attr:`~.Broadcast.model_size`.
        groups: each client's group, by id.
        weighting: how updates are weighted within a group; see :class:`lightning_fed.core.server.Server`.
        names: of the groups' models in metrics.
        exported: the group whose model is exported if no client is named.
    """

    def __init__(
        self,
        states: Mapping[int, State],
        groups: Mapping[int, int],
        weighting: Literal["examples", "uniform"],
        names: Mapping[int, str],
        exported: int,
    ) -> None:
        super().__init__({}, weighting)
        self.groups = groups
        self.names = names
        self.exported = exported
        self.states = dict(sorted(states.items()))
        self._hold(self.states)

    def _hold(self, states: dict[int, State]) -> None:
        self.states = states
        self.state = states[self.exported]

    def broadcast(self, client: ClientInfo) -> Broadcast:
        group = self.groups[client.id]
        return Broadcast(self.states[group], group)

    def global_models(self) -> dict[str, Broadcast]:
        return {self.names[group]: Broadcast(state, group) for group, state in self.states.items()}

    def aggregate(self, updates: Iterable[ClientUpdate]) -> dict[str, float]:
        """Merge a round's updates, each with those of its group; see :meth:`lightning_fed.core.server.Server.aggregate`."""
        means: dict[int, WeightedMean] = defaultdict(WeightedMean)
        for update in updates:
            means[self.groups[update.client]].add(update.state, self.weight(update))
        self._hold(self.states | {group: mean.result() for group, mean in means.items()})
        return {}

    def state_dict(self) -> State:
        """All states, under ``<group>/<name>``."""
        return {f"{group}/{name}": tensor for group, state in self.states.items() for name, tensor in state.items()}

    def load_state_dict(self, state: State) -> None:
        self._hold({group: {name: state[f"{group}/{name}"] for name in own} for group, own in self.states.items()})
