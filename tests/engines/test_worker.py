"""A turn: what it says of its mistakes, and that it is a function of its inputs."""

import copy
import math
import pickle
import random
import traceback
from collections.abc import Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from often import FEW, mostly_slow
from tiny import (
    CLASSES,
    METHODS,
    Net,
    NoisyNet,
    Recording,
    Shuffled,
    assert_same,
    data_for,
    momentum,
    new_data,
    new_federation,
    new_method,
    new_trainer,
    same,
    sgd,
)
from tiny_rounds import AfterRounds, fit
from torch import Tensor
from torchmetrics import MetricCollection

from lightning_fed.core import FineTuning
from lightning_fed.core.messages import Broadcast, ClientUpdate, Turn, TurnFailure, TurnResult
from lightning_fed.core.phase import Phase
from lightning_fed.engines import InProcess
from lightning_fed.engines.worker import Worker
from lightning_fed.engines.worker_spec import WorkerSpec
from lightning_fed.errors import FederationError
from lightning_fed.methods import FedAvg, FedHM, FedPer, FedProx, FedRep
from lightning_fed.storage.client_store import ClientStore
from lightning_fed.tensors import State

# ---------------------------------------------------------------------------------------------------------------- mistakes


class Mistaken(FedAvg):
    """Makes a mistake of some kind in client 2's second turn."""

    error: Exception = ValueError()
    turns = 0

    def on_fit_start(self) -> None:
        super().on_fit_start()
        if self.client is not None and self.client.id == 2:
            type(self).turns += 1

    def client_loss(self, batch: Any) -> Tensor:
        if self.turns == 2 and self.client is not None and self.client.id == 2:
            raise type(self).error
        return super().client_loss(batch)


@pytest.fixture
def mistaken(monkeypatch: pytest.MonkeyPatch) -> type[Mistaken]:
    monkeypatch.setattr(Mistaken, "turns", 0)
    return Mistaken


def test_a_mistake_of_the_user_is_named(mistaken: type[Mistaken], monkeypatch: pytest.MonkeyPatch) -> None:
    error = FederationError("the labels are not what they should be: look at the data.")
    monkeypatch.setattr(mistaken, "error", error)
    with pytest.raises(FederationError) as found:
        fit(mistaken(Net, CLASSES, optimizer=momentum), rounds=2)
    assert str(found.value) == f"Client 2 in round 2, phase local: {error}"
    assert found.value.__cause__ is error


def test_any_other_mistake_keeps_its_type_and_traceback(mistaken: type[Mistaken], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mistaken, "error", ZeroDivisionError("division by zero"))
    with pytest.raises(ZeroDivisionError) as found:
        fit(mistaken(Net, CLASSES, optimizer=momentum), rounds=2)
    assert found.value is mistaken.error
    assert found.value.__notes__ == ["In this turn: Client 2 in round 2, phase local."]
    last = traceback.extract_tb(found.value.__traceback__)[-1]
    assert (last.name, last.filename) == ("client_loss", __file__)
    assert last.line == "raise type(self).error"


class HeadLast(FedPer):
    """The body, then the head, whose loss fails."""

    def phases(self) -> list[Phase]:
        body = [p for name, p in self.backbone.named_parameters() if not name.startswith("head.")]
        head = list(self.backbone.head.parameters())
        return [Phase("body", body, self.client_loss, sgd, epochs=1), Phase("head", head, self.head_loss, sgd, epochs=1)]

    def head_loss(self, batch: Any) -> Tensor:
        return self.client_loss(batch) * (1 / 0)


def test_the_phase_is_the_one_that_runs() -> None:
    with pytest.raises(ZeroDivisionError) as found:
        fit(HeadLast(Net, CLASSES))
    assert found.value.__notes__ == ["In this turn: Client 0 in round 1, phase head."]


class Unmeasurable(FedAvg):
    """Cannot be measured as some clients."""

    def __init__(self, *clients: int) -> None:
        super().__init__(Net, CLASSES, momentum)
        self.clients = clients

    def update_metrics(self, metrics: MetricCollection, batch: Any) -> None:
        if self.client is not None and self.client.id in self.clients:
            raise IndexError("no such label")
        super().update_metrics(metrics, batch)


@pytest.mark.parametrize(("client", "who"), [(1, "Client 1"), (-1, "The server")])
def test_what_goes_wrong_in_measuring_says_so(client: int, who: str) -> None:
    with pytest.raises(IndexError, match="no such label") as found:
        fit(Unmeasurable(client), rounds=2, participation=0.3)  # client 1 trains in no round
    assert found.value.__notes__ == [f"In this turn: {who} in round 2, during evaluation."]


class Ungatherable(FedHM):
    """Has no statistics as client 1."""

    def statistics(self) -> State:
        if self.client is not None and self.client.id == 1:
            raise KeyError("running_mean")
        return super().statistics()


def test_what_goes_wrong_in_gathering_says_so() -> None:
    with pytest.raises(KeyError) as found:
        fit(Ungatherable(NoisyNet, CLASSES, ratios=[0.5]), rounds=1, participation=0.3)  # in which client 1 does not train
    assert found.value.__notes__ == ["In this turn: Client 1 in round 1, gathering statistics."]


def test_before_the_first_phase_there_is_none_to_name() -> None:
    """A payload that does not fit is refused when it is loaded."""
    worker = worker_of("PFedLoRA")
    turn = Turn("fit", worker.data.clients[1], 4, Broadcast({}))
    with pytest.raises(FederationError, match=r"^Client 1 in round 4: The shared state for PFedLoRA lacks "):
        worker.run_turn(turn, None)


class Exploding(FedPer):
    """Its private head explodes in its last step, when asked to; the loss of that step, and all that is shared, are finite."""

    rate = 0.1

    def phases(self) -> list[Phase]:
        body = [p for name, p in self.backbone.named_parameters() if not name.startswith("head.")]
        head = list(self.backbone.head.parameters())
        explode = partial(torch.optim.SGD, lr=type(self).rate)
        return [Phase("body", body, self.client_loss, sgd, epochs=1), Phase("head", head, self.client_loss, explode, steps=1)]


def test_a_private_state_that_is_not_finite_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent is finite, so that the server would not notice. The round before can be continued from."""
    explode = AfterRounds(lambda run: monkeypatch.setattr(Exploding, "rate", math.inf))
    federation = new_federation(3, run_dir="runs", callbacks=[explode])
    message = r"^Client 0 in round 2: The private state holds NaN or infinity in 'backbone\.head\.\w+': its training diverged"
    with pytest.raises(FederationError, match=message):
        federation.fit(Exploding(Net, CLASSES), new_data(3, 120))
    assert [path.name for path in Path("runs/version_0/checkpoints").iterdir()] == ["round_000001"]
    assert all(torch.isfinite(tensor).all() for client in range(3) for tensor in federation.run.store.get(client).values())
    monkeypatch.setattr(Exploding, "rate", 0.1)
    federation = new_federation(2, run_dir="runs")
    federation.fit(Exploding(Net, CLASSES), new_data(3, 120), ckpt_path="last")
    assert [row["round"] for row in federation.run.history] == [1, 2]


# --------------------------------------------------------------------------------------------------------------- a function


def recipe_of(name: str) -> WorkerSpec:
    data = data_for(name, num_clients=3, size=100)
    data.setup()
    return WorkerSpec(new_method(name), data, new_trainer, 0)


def worker_of(name: str) -> Worker:
    return recipe_of(name).worker()


class Noting(InProcess):
    """Keeps what went into every turn and what came of it."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[tuple[Turn, State | None, TurnResult]] = []

    def open(self, spec: WorkerSpec, states: ClientStore) -> None:
        super().open(spec, states)
        self.spec = spec

    def run(self, turns: Iterable[Turn]) -> Iterator[ClientUpdate | TurnFailure]:
        assert self._opened is not None
        worker, states = self._opened
        for turn in turns:
            private = copy.deepcopy(states.find(turn.client.id))
            result = worker.run_turn(turn, private)
            self.taken.append((copy.deepcopy(turn), private, result))
            if result.private is not None:
                states.put(turn.client.id, result.private, turn.round)
            yield result.update


@cache
def noted(name: str) -> tuple[Noting, bytes]:
    """Two rounds of two of three clients, measured at the end; and the spec as it travels to another process."""
    engine = Noting()
    federation = new_federation(2, participation=0.7, evaluate_every=0, engine=engine)
    federation.fit(new_method(name), data_for(name, num_clients=3, size=100))
    return engine, pickle.dumps(engine.spec.unbuilt())


def equal(one: TurnResult, other: TurnResult) -> bool:
    privates = [{} if result.private is None else result.private for result in (one, other)]
    return (
        (one.update.client, one.update.num_examples, one.update.metrics)
        == (other.update.client, other.update.num_examples, other.update.metrics)
        and same(one.update.state, other.update.state)
        and (one.private is None) == (other.private is None)
        and same(*privates)
    )


def assert_a_function(worker: Worker, taken: Iterable[tuple[Turn, State | None, TurnResult]]) -> None:
    for turn, private, result in taken:
        sent, before = copy.deepcopy(turn.broadcast), copy.deepcopy(private)
        again = worker.run_turn(turn, private)
        assert equal(again, result), f"{turn.verb} of client {turn.client.id} in round {turn.round}"
        assert same(turn.broadcast.state, sent.state)
        assert same(turn.broadcast.statistics, sent.statistics)
        assert private is before is None or same(private or {}, before or {})


@pytest.mark.parametrize("name", mostly_slow(METHODS, FEW))
def test_a_turn_is_a_function_of_its_inputs(name: str) -> None:
    """On another worker, that was made from what can travel, in another order."""
    engine, travelled = noted(name)
    assert {turn.verb for turn, _, _ in engine.taken} >= {"fit", "evaluate"}
    taken = list(engine.taken)
    random.Random(3).shuffle(taken)
    spec = pickle.loads(travelled)
    assert_a_function(spec.worker(), taken)


@pytest.mark.parametrize("name", mostly_slow(METHODS, FEW))
def test_a_recipe_travels_without_networks(name: str) -> None:
    """And what was built from it stays as it is."""
    engine, travelled = noted(name)
    template = engine.spec.template
    before = {key: tensor.clone() for key, tensor in template.state_dict().items()}
    spec = pickle.loads(travelled)
    assert not hasattr(spec.template, "val_metrics")
    worker = spec.worker()
    worker.template.load_shared_state({key: tensor + 1 for key, tensor in worker.template.shared_state().items()})
    assert same(template.state_dict(), before)


def test_a_module_of_ones_own_does_not_notice_later_turns() -> None:
    engine, _ = noted("PFedLoRA")
    worker = engine.spec.worker()
    turn, private, _ = next(entry for entry in engine.taken if entry[0].verb == "evaluate" and entry[1] is not None)
    module = worker.module_of(turn.client, turn.broadcast, private)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert same(worker.load(turn.client, turn.broadcast, private).state_dict(), before)
    assert_a_function(worker, engine.taken)
    assert same(module.state_dict(), before)


class Counting(Net):
    """Its outputs depend on how often it has been trained, which no state dict has."""

    def __init__(self, num_classes: int = CLASSES) -> None:
        super().__init__(num_classes)
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.register_buffer("first", None, persistent=False)

    def encode(self, x: Tensor, cut: str = "features") -> Tensor:
        self.calls += self.training
        self.first = x.mean() if self.first is None else self.first
        return super().encode(x, cut) * (1 + self.calls + self.first)


def test_what_a_network_does_not_save_begins_each_turn_anew() -> None:
    plain, other = (
        fit(FedAvg(Counting, CLASSES, optimizer=momentum), rounds=2, engine=engine) for engine in (InProcess(), Shuffled())
    )
    assert_same(other, plain)


# ------------------------------------------------------------------------------------------------------------------ phases


class Asked(FedPer):
    """Counts how often it is asked for its phases."""

    times = 0

    def phases(self) -> list[Phase]:
        type(self).times += 1
        return super().phases()


def test_phases_are_asked_for_once_per_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not to measure. At first a worker finds out what a kind of step costs, on a copy that has phases of its own."""
    engine, model = Recording(), Asked(Net, CLASSES, optimizer=momentum)
    federation = new_federation(3, engine=engine, evaluate_every=1)
    federation.fit(model, new_data(3, 120))
    monkeypatch.setattr(Asked, "times", 0)
    turns = [turn for turn in engine.turns if turn.verb == "fit" and turn.round == 3]
    assert len(turns) == 3
    for turn in turns:
        engine.worker.run_turn(turn, federation.run.store.find(turn.client.id))
    assert Asked.times == 3
    for turn in engine.turns:
        if turn.verb == "evaluate":
            engine.worker.run_turn(turn, None)
    assert Asked.times == 3


@pytest.mark.parametrize("limit", [2, 1])
def test_steps_do_not_depend_on_the_length_of_epochs(limit: int) -> None:
    """Shorter epochs are more of them, also for a phase that comes after another."""
    trainer, engine = partial(new_trainer, limit_train_batches=limit), Recording()
    rep = FedRep(Net, CLASSES, head_epochs=1, optimizer=sgd, steps=7)
    for model, steps in ((FedAvg(Net, CLASSES, sgd, steps=7), 7), (rep, limit + 7)):
        new_federation(1, trainer=trainer, engine=engine).fit(model, new_data(2, 120))
        assert [update.metrics["steps"] for update in engine.trained[-2:]] == [steps, steps]


class TakesCopies(FedAvg):
    """Remembers in ``phases`` what it was sent, as a method may."""

    def phases(self) -> list[Phase]:
        start = [p.detach().clone() for p in self.parameters()]

        def loss(batch: Any) -> Tensor:
            drift = [(p - before).square().sum() for p, before in zip(self.parameters(), start, strict=True)]
            return self.client_loss(batch) + torch.stack(drift).sum() / 4

        return [Phase("local", list(self.parameters()), loss, self.optimizer, epochs=self.epochs)]


def test_phases_are_asked_for_when_the_broadcast_is_there() -> None:
    states = [
        fit(method, rounds=3).run.server.state_dict()
        for method in (TakesCopies(Net, CLASSES, sgd), FedProx(Net, CLASSES, 0.5, optimizer=sgd), FedAvg(Net, CLASSES, sgd))
    ]
    torch.testing.assert_close(states[0], states[1])
    assert not same(states[0], states[2])


def test_a_mistake_while_adapting_is_named() -> None:
    class Stumbling(FedAvg):
        def client_loss(self, batch: Any) -> Tensor:
            if self.progress.phase == "fine_tune":
                raise FederationError("stumbled.")
            return super().client_loss(batch)

    with pytest.raises(FederationError, match=r"^Client 0 in round 1, phase fine_tune: stumbled\.$"):
        fit(Stumbling(Net, CLASSES, sgd, fine_tuning=FineTuning(epochs=1)), rounds=1)


def test_a_mistake_while_reviewing_is_named() -> None:
    class Stumbling(FedAvg):
        def post_training_step(self, batch: Any) -> State:
            raise FederationError("stumbled.")

    with pytest.raises(FederationError, match=r"^Client 0 in round 1, in the pass over the data after training: stumbled\.$"):
        fit(Stumbling(Net, CLASSES, sgd), rounds=1)


def test_a_payload_that_is_in_the_state_dict_is_refused() -> None:
    class Clashing(FedAvg):
        def payload(self) -> State:
            return {"backbone.head.bias": torch.zeros(CLASSES)}

    with pytest.raises(FederationError, match=r"The payload of Clashing names 'backbone\.head\.bias', which is in the state dict"):
        fit(Clashing(Net, CLASSES, sgd), rounds=1)


def test_a_payload_that_is_not_finite_is_refused() -> None:
    class Exploded(FedAvg):
        def payload(self) -> State:
            return {"extra/value": torch.full((1,), float("nan") if self.client is not None else 0.0)}

    with pytest.raises(FederationError, match=r"The update of client 0 holds NaN or infinity in 'extra/value'"):
        fit(Exploded(Net, CLASSES, sgd), rounds=1)
