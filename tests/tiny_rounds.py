"""Short federations of methods for clients of different model_size, and updates that are checked as in a round."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tiny import new_data, new_federation, private_states, same, same_states
from torch import Tensor

from lightning_fed.callbacks import FederationCallback, RunView
from lightning_fed.core.aggregation import check_form, check_payload
from lightning_fed.core.messages import ClientUpdate, Turn, TurnFailure
from lightning_fed.core.module import FederatedModule
from lightning_fed.core.server import Server
from lightning_fed.data import ClassesPerClient, InMemory
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.engines import InProcess
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import FedAvg
from lightning_fed.storage.client_store import ClientStore, RoundStore
from lightning_fed.tensors import State


class UniformFedAvg(FedAvg):
    """FedAvg that counts every client the same."""

    weighting = "uniform"


def fit(model: FederatedModule, data: InMemory | None = None, rounds: int = 1, **options: Any) -> Federation:
    federation = new_federation(rounds, **{"evaluate_every": 0} | options)
    federation.fit(model, data or new_data(3, 120), options.get("run_dir") and "last")
    return federation


def assert_same_runs(
    ours: FederatedModule, theirs: FederatedModule, *parts: str, data: InMemory | None = None, **options: Any
) -> None:
    """Two methods end alike, bit for bit.

    Args:
        ours: one method.
        theirs: the other one.
        *parts: what is compared: the ``server``'s state, the ``clients``' private states, their ``results``, the ``losses``.
        data: what both learn from.
        **options: of their federations.
    """
    one, other = (fit(model, data, **options) for model in (ours, theirs))
    if "server" in parts:
        assert same(one.run.server.state_dict(), other.run.server.state_dict())
    if "clients" in parts:
        assert same_states(private_states(one), private_states(other))
    if "results" in parts:
        assert one.run.results == other.run.results
    if "losses" in parts:
        assert len({tuple(row["train/local_loss"] for row in each.run.history) for each in (one, other)}) == 1


def with_storage(server: Server, folder: Path) -> Any:
    """A server with room for what it keeps of clients, nearly all of it on disk."""
    server.attach_storage(ClientStore(folder / "kept", 1), RoundStore(folder / "scratch", 1))
    return server


class Bowls:
    """Clients whose losses are h_k (w - w_k)² / 2 of one number, with two optima."""

    curvatures, optima = (1.0, 4.0), (-1.0, 3.0)
    client: Any
    backbone: Any

    @property
    def which(self) -> int:
        return max(self.client.id, 0) if self.client is not None else 0

    def client_loss(self, batch: Any) -> Tensor:
        return self.curvatures[self.which] * (self.backbone.head.bias[0] - self.optima[self.which]).square() / 2

    @classmethod
    def optimum(cls) -> float:
        """Of the mean of both."""
        return sum(h * w for h, w in zip(cls.curvatures, cls.optima, strict=True)) / sum(cls.curvatures)


def at_start(method: FederatedModule, clients: Sequence[ClientInfo], round: int = 1) -> Any:
    """The method's server as a round begins."""
    method.configure_model()
    server = method.configure_server(clients)
    server.on_round_start(round, clients)
    return server


class AfterRounds(FederationCallback):
    """Does something with a run after each round."""

    def __init__(self, do: Callable[[Any], Any]) -> None:
        self.do = do

    def on_round_end(self, run: RunView) -> None:
        self.do(run)


class Losing(InProcess):
    """Loses some turns."""

    def __init__(self, lost: Callable[[Turn], bool]) -> None:
        super().__init__(threads=1)
        self.lost = lost

    def run(self, turns: Iterable[Turn]) -> Iterator[ClientUpdate | TurnFailure]:
        for turn in turns:
            yield from [TurnFailure(turn.client.id, "its battery was empty")] if self.lost(turn) else super().run([turn])


class Changing(InProcess):
    """Updates are changed on their way."""

    def __init__(self, change: Callable[[Turn, ClientUpdate], ClientUpdate]) -> None:
        super().__init__()
        self.change = change

    def run(self, turns: Iterable[Turn]) -> Iterator[ClientUpdate | TurnFailure]:
        for turn in turns:
            [update] = super().run([turn])
            assert isinstance(update, ClientUpdate)
            yield self.change(turn, update)


def changing_state(change: Callable[[State], State]) -> Changing:
    """An engine that changes what updates hold."""
    return Changing(lambda turn, update: replace(update, state=change(update.state)))


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
    """Three clients, with unequal numbers of batches."""
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
