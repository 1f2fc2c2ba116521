"""A method under test, and the runs that its checks share."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lightning_fed.callbacks import FederationCallback, RunView
from lightning_fed.core.messages import ClientUpdate
from lightning_fed.core.module import FederatedModule
from lightning_fed.data import FederatedDataModule
from lightning_fed.federation.federation import Federation
from lightning_fed.tensors import State
from lightning_fed.testing.compare import states_of
from lightning_fed.testing.toys import new_federation
from lightning_fed.testing.watch import Recording, Shuffled


class RoundStates(FederationCallback):
    """Stores the participants of each round, and the private states of all clients after it."""

    def __init__(self) -> None:
        self.cohorts: list[set[int]] = []
        self.states: list[dict[int, State]] = []
        self._arrived: set[int] = set()

    def on_turn_end(self, run: RunView, update: ClientUpdate) -> None:
        self._arrived.add(update.client)

    def on_round_end(self, run: RunView) -> None:
        self.cohorts.append(self._arrived)
        self._arrived = set()
        kept = states_of(run).items()
        self.states.append({client: {name: tensor.clone() for name, tensor in state.items()} for client, state in kept})


VARIATIONS: dict[str, dict[str, Callable[[], Any]]] = {
    "played again": {},
    "in another order of turns": {"engine": Shuffled},
    "with private states on disk": {"store_limit_mb": lambda: 1e-6},
    "measured after every round": {"evaluate_every": lambda: 1},
}
"""Variations that must not change results: options of the federation, and functions that create them."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A method under test.

    Args:
        make: creates it, given options that replace its own.
        data: creates data that it can train on, given ``num_clients`` and ``size``, the number of examples.
        any_network: whether it can train a network with batch norm and dropout, for images.
    """

    make: Callable[..., FederatedModule]
    data: Callable[..., FederatedDataModule]
    any_network: bool = True

    def new_data(self) -> FederatedDataModule:
        """The data of three clients."""
        return self.data(num_clients=3, size=100)

    def fit(self, rounds: int = 2, **options: Any) -> Federation:
        """A run with two of three clients per round, evaluated at the end."""
        federation = new_federation(rounds, **{"participation": 0.7, "evaluate_every": 0} | options)
        federation.fit(self.make(), self.new_data())
        return federation

    @cached_property
    def recorded(self) -> tuple[Federation, Recording, RoundStates]:
        """The run that others are compared with; cached."""
        engine, watch = Recording(), RoundStates()
        return self.fit(engine=engine, callbacks=[watch]), engine, watch

    @cached_property
    def varied(self) -> tuple[Federation, RoundStates]:
        """The same run with all variations of :data:`VARIATIONS`; cached."""
        watch = RoundStates()
        options = {name: make() for options in VARIATIONS.values() for name, make in options.items()}
        return self.fit(**options, callbacks=[watch]), watch

    def modules(self, **options: Any) -> list[FederatedModule]:
        """The clients' modules, before they take part."""
        return [self.make(**options).for_client(client) for client in self.new_data().clients]
