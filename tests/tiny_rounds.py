"""Short federations of methods for clients of different model_size, and updates that are checked as in a round."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from tiny import new_data, new_federation

from lightning_fed.core.aggregation import check_form, check_payload
from lightning_fed.core.messages import ClientUpdate, Turn, TurnFailure
from lightning_fed.core.module import FederatedModule
from lightning_fed.core.server import Server
from lightning_fed.data import ClassesPerClient, InMemory
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.engines import InProcess
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import FedAvg
from lightning_fed.tensors import State


class UniformFedAvg(FedAvg):
    """FedAvg that counts every client the same."""

    weighting = "uniform"


def fit(model: FederatedModule, data: InMemory | None = None, rounds: int = 1, **options: Any) -> Federation:
    federation = new_federation(rounds, **{"evaluate_every": 0} | options)
    federation.fit(model, data or new_data(3, 120), options.get("run_dir") and "last")
    return federation


def at_start(method: FederatedModule, clients: Sequence[ClientInfo], round: int = 1) -> Any:
    """The method's server as a round begins."""
    method.configure_model()
    server = method.configure_server(clients)
    server.on_round_start(round, clients)
    return server


class Losing(InProcess):
    """Loses some turns."""

    def __init__(self, lost: Callable[[Turn], bool]) -> None:
        super().__init__(threads=1)
        self.lost = lost

    def run(self, turns: Iterable[Turn]) -> Iterator[ClientUpdate | TurnFailure]:
        for turn in turns:
            yield from [TurnFailure(turn.client.id, "its battery was empty")] if self.lost(turn) else super().run([turn])


class Changing(InProcess):
    """Updates are changed on their way: what they hold, by ``change``."""

    def __init__(self, change: Callable[[State], State]) -> None:
        super().__init__()
        self.change = change

    def run(self, turns: Iterable[Turn]) -> Iterator[ClientUpdate | TurnFailure]:
        for update in super().run(turns):
            assert isinstance(update, ClientUpdate)
            yield replace(update, state=self.change(update.state))


def phases_of(model: FederatedModule) -> dict[str, set[str]]:
    """Names of what each phase changed in one client's turn."""
    changed: dict[str, set[str]] = {}

    class Watch(type(model)):  # type: ignore[misc]
        def on_train_epoch_start(self) -> None:
            super().on_train_epoch_start()
            self.before = copy.deepcopy(dict(self.named_parameters()))

        def on_train_epoch_end(self) -> None:
            super().on_train_epoch_end()
            moved = {name for name, p in self.named_parameters() if not torch.equal(p, self.before[name])}
            changed.setdefault(self.phase.name, set()).update(moved)

    model.__class__ = Watch
    fit(model, rounds=1)
    return changed


def two_classes_each() -> InMemory:
    return new_data(3, 120, partition=ClassesPerClient(2), test_share=0.4, batch_size=10)


def check_update(update: ClientUpdate, expected: State) -> None:
    """Check an update as a run does."""
    check_form(update)
    check_payload(update, expected)


def checked(server: Server, updates: Iterable[ClientUpdate]) -> Iterator[ClientUpdate]:
    """Updates, each checked before it is passed on, as a run does."""
    for update in updates:
        check_update(update, server.expected_payload(update, server.broadcast(ClientInfo(update.client, 1, 0, 0, ()))))
        yield update
