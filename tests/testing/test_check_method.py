"""Methods from elsewhere, written with the hooks alone, keep what the package's own keep; and methods that do not are found out."""

import ast
import inspect
import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from often import OF_THE_CORE, mostly_slow
from tiny import CLASSES, Net, Recording, WideNet, assert_same, momentum, new_data, new_federation, private_states, sgd
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax

import lightning_fed.testing
from lightning_fed.core.messages import ClientUpdate
from lightning_fed.core.module import FederatedModule
from lightning_fed.core.phase import Phase
from lightning_fed.core.server import Server
from lightning_fed.data import InMemory
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.engines import InProcess, Processes
from lightning_fed.methods import Ditto, FedAvg
from lightning_fed.nn import BufferDict, jointly
from lightning_fed.tensors import State
from lightning_fed.testing import Check, check_method, checks, checks_of, compare
from lightning_fed.testing.checks import CHECKS
from lightning_fed.testing.toys import Growing


class Prototypes(FederatedModule):
    """Nothing but the mean feature of each class travels (Tan et al., AAAI 2022): a payload, found by a review."""

    heterogeneous = True
    monitor = "accuracy"

    def build(self) -> None:
        super().build()
        width = self.backbone.cuts["features"]
        self.prototypes = BufferDict({"mean": torch.zeros(CLASSES, width), "count": torch.zeros(CLASSES)}, persistent=False)

    def shared_names(self) -> set[str]:
        return set()

    def payload(self) -> State:
        return {f"prototypes/{name}": tensor for name, tensor in self.prototypes.items()}

    def load_payload(self, payload: State) -> None:
        self.prototypes.update({name.removeprefix("prototypes/"): tensor for name, tensor in payload.items()})

    def client_loss(self, batch: Any) -> Tensor:
        x, y = batch
        features = self.backbone.encode(x)
        far = (features - self.prototypes["mean"][y]).square().mean(dim=1) * (self.prototypes["count"][y] > 0)
        return cross_entropy(self.backbone.classify(features), y) + far.mean()

    def post_training_step(self, batch: Any) -> State:
        x, y = batch
        features = self.backbone.encode(x)
        assert not self.backbone.training
        assert not torch.is_grad_enabled()
        one_hot = torch.nn.functional.one_hot(y, CLASSES).to(features.dtype)
        return {"sum": one_hot.T @ features, "count": one_hot.sum(dim=0)}

    def after_training(self, sums: State) -> None:
        mean = sums["sum"] / sums["count"].clamp(min=1)[:, None]
        self.prototypes.update({"mean": mean, "count": sums["count"]})

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        return ProtoServer(self.update_state())


class ProtoServer(Server):
    """Class by class, weighted by examples; a class that nobody sent stays."""

    def aggregate(self, updates: Iterable[ClientUpdate]) -> dict[str, float]:
        total, count = (torch.zeros_like(self.state[f"prototypes/{name}"]) for name in ("mean", "count"))
        for update in updates:
            mine = update.state["prototypes/count"]
            total, count = total + mine[:, None] * update.state["prototypes/mean"], count + mine
        known = count[:, None] > 0
        mean = torch.where(known, total / count.clamp(min=1)[:, None], self.state["prototypes/mean"])
        self.state = {"prototypes/mean": mean, "prototypes/count": torch.maximum(count, self.state["prototypes/count"])}
        return {}


class MutualLearning(FederatedModule):
    """A private network and a shared one teach each other (FML, Shen et al. 2020): two networks, two optimizers, one phase."""

    def build(self) -> None:
        super().build()
        self.meme = self.new_backbone()

    def shared_names(self) -> set[str]:
        return {name for name in self.state_dict() if name.startswith("meme.")}

    def phases(self) -> list[Phase]:
        mine, shared = list(self.backbone.parameters()), list(self.meme.parameters())
        both = jointly((self.optimizer, mine), (partial(torch.optim.AdamW, lr=0.01), shared))
        return [Phase("mutual", [*mine, *shared], self.mutual_loss, both, self.epochs)]

    def mutual_loss(self, batch: Any) -> Tensor:
        x, y = batch
        mine, shared = (log_softmax(network(x), dim=1) for network in (self.backbone, self.meme))
        divergence = partial(kl_div, log_target=True, reduction="batchmean")
        apart = divergence(shared, mine.detach()) + divergence(mine, shared.detach())
        return cross_entropy(mine, y) + cross_entropy(shared, y) + apart


class Interpolating(FederatedModule):
    """A frozen copy that stays, and one that travels, with numbers that the method itself changes."""

    def build(self) -> None:
        super().build()
        self.turns = torch.nn.Parameter(torch.zeros(()), requires_grad=False)
        self.counted = torch.nn.Parameter(torch.zeros(()), requires_grad=False)

    def shared_names(self) -> set[str]:
        return super().shared_names() | {"counted"}

    def private_names(self) -> set[str]:
        return super().private_names() | {"turns"}

    @torch.no_grad()
    def after_training(self, sums: State) -> None:
        assert self.client is not None
        self.turns += 1
        self.counted += self.client.num_clients


METHODS = Prototypes, MutualLearning, Interpolating


EACH = [(method.__name__, check) for method in METHODS for check in checks_of(method)]
TRIED = [(name, check) for name, check in EACH if name == "Prototypes" or str(check) not in OF_THE_CORE]


@pytest.mark.parametrize(("name", "check"), mostly_slow(EACH, TRIED), ids=str)
def test_methods_from_elsewhere(name: str, check: Check) -> None:
    check()


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_worker_processes_give_the_same_numbers(method: type[FederatedModule], two_workers: Processes) -> None:
    runs = [new_federation(2, participation=0.7, evaluate_every=1, engine=chosen) for chosen in (two_workers, InProcess(threads=1))]
    for federation in runs:
        federation.fit(method(Net, CLASSES, momentum), new_data(3, 100))
    assert_same(*runs)


@pytest.mark.slow
def test_personal_networks_begin_as_a_pretrained_model_on_any_engine(two_workers: Processes) -> None:
    """Worker processes build the networks anew, and would begin with those."""
    runs = []
    for chosen in (two_workers, InProcess(threads=1)):
        model = Ditto(Net, CLASSES, optimizer=sgd)
        model.configure_model()
        with torch.no_grad():
            for parameter in model.backbone.parameters():
                parameter.fill_(0.25)  # as learned elsewhere
        federation = new_federation(1, participation=0.3, evaluate_every=1, engine=chosen)
        federation.fit(model, new_data(3, 100))
        [absent, *_] = {0, 1, 2} - private_states(federation).keys()
        assert all((tensor == 0.25).all() for tensor in federation.client_module(absent).personal.state_dict().values())
        runs.append(federation)
    assert_same(*runs)


def test_payloads_are_counted_and_reviews_cost() -> None:
    """What travels is 4 means of 6 features and 4 counts; the pass costs a forward through the encoder and the sums."""
    engine = Recording()
    federation = new_federation(1, engine=engine, evaluate_every=0)
    federation.fit(Prototypes([Net, WideNet], CLASSES, sgd), new_data(2, 100))
    row = federation.run.history[0]
    assert row["traffic/down_parameters"] == row["traffic/up_parameters"] == 2 * (4 * 6 + 4)
    federation = new_federation(1, evaluate_every=0)
    federation.fit(Prototypes([Net, WideNet], CLASSES, sgd, epochs=0), new_data(2, 100))
    forward = sum(
        client.num_train * 2 * (48 * hidden + hidden * 6 + 4 * 6)
        for client, hidden in zip(new_data(2, 100).clients, (5, 7), strict=True)
    )
    assert federation.run.history[0]["compute/flops"] == forward


def test_a_review_sees_each_example_once_and_as_it_is() -> None:
    """The prototypes are the class means of the trained encoder's features over all training examples."""
    engine, data = Recording(), new_data(2, 100)
    federation = new_federation(1, engine=engine, evaluate_every=0)
    federation.fit(Prototypes(Net, CLASSES, sgd), data)
    for update in engine.trained:
        of_client = data.client(update.client)
        inputs, labels = of_client.data[of_client.splits[0]]
        features = federation.client_module(update.client).backbone.encode(inputs)
        for label in range(CLASSES):
            expected = features[labels == label].mean(dim=0)
            torch.testing.assert_close(update.state["prototypes/mean"][label], expected, rtol=1e-4, atol=1e-5)


def test_what_is_frozen_travels_or_stays_as_the_method_says() -> None:
    federation = new_federation(3, evaluate_every=0)
    federation.fit(Interpolating(Net, CLASSES, sgd), new_data(3, 100))
    assert {client: state["turns"].item() for client, state in private_states(federation).items()} == {0: 3, 1: 3, 2: 3}
    assert federation.run.server.state_dict()["counted"].item() == 9  # three rounds, three clients known to each


def test_a_client_knows_how_many_there_are_and_its_labels_when_it_is_built() -> None:
    known = []

    class Curious(FedAvg):
        def build(self) -> None:
            super().build()
            if self.client is not None and self.client.id >= 0:
                known.append((self.client.id, self.client.num_clients, self.client.label_counts))

    data = new_data(3, 100)
    new_federation(1).fit(Curious(Net, CLASSES), data)
    assert known
    assert {client: (number, counts) for client, number, counts in known} == {
        client: (3, data.clients[client].label_counts) for client, *_ in known
    }


# ------------------------------------------------------------------------------------------------------- what is found out


class Leaking(FedAvg):
    """Sends a private tensor."""

    def shared_names(self) -> set[str]:
        return super().shared_names() - {"backbone.head.bias"}

    def update_state(self) -> State:
        return super().update_state() | {"backbone.head.bias": self.backbone.head.bias.detach().clone()}

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        return LeakingServer(self.update_state())


class LeakingServer(Server):
    def broadcast(self, client: ClientInfo) -> Any:
        own = super().broadcast(client)
        return type(own)({name: tensor for name, tensor in own.state.items() if name != "backbone.head.bias"})


class Remembering(FedAvg):
    """Trains on what it did in other turns."""

    turns = 0.0

    def after_training(self, sums: State) -> None:
        type(self).turns += 1

    def client_loss(self, batch: Any) -> Tensor:
        return super().client_loss(batch) * (1 + self.turns / 100)


def failed(group: ExceptionGroup) -> set[str]:
    return {note.removeprefix("Check: ").removesuffix(".") for error in group.exceptions for note in error.__notes__}


class Torn(FedAvg):
    """Says of one tensor neither that it travels nor that it stays, and of another one both."""

    def shared_names(self) -> set[str]:
        return super().shared_names() - {"backbone.fc1.bias"}

    def private_names(self) -> set[str]:
        return {"backbone.fc2.weight"}


@pytest.fixture
def some_checks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A few of all checks, in their order."""
    some = [check for check in CHECKS if check.__name__.startswith(("states_fit", "no_private_name", "another_order"))]
    assert len(some) == 3
    monkeypatch.setattr(lightning_fed.testing, "CHECKS", some)
    return some


def test_a_good_method_passes_and_says_so_and_nothing_else(some_checks: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    check_method(FedAvg, optimizer=sgd)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"passed {check.__name__.replace('_', ' ')}" for check in some_checks]


class YesOrNo(InMemory):
    num_labels = 2
    problem = "binary"


@pytest.mark.parametrize(("kind", "classes"), [(InMemory, 4), (YesOrNo, 1)])
def test_a_clients_predictions_are_compared_for_bytes_and_for_yes_or_no_too(kind: type[InMemory], classes: int) -> None:
    def data(num_clients: int, size: int) -> InMemory:
        known = new_data(num_clients, size).load()
        images, labels = (known[0] * 40 + 128).clamp(0, 255).to(torch.uint8), known[1] % max(2, classes)
        return kind(images, labels, classes, num_clients=num_clients, partition=Growing(), batch_size=16)

    [check] = [check for check in checks_of(FedAvg, data, num_classes=classes) if "predicts what was measured" in str(check)]
    check()
    federation, *_ = check.subject.recorded
    federation.run.results[1]["test/accuracy"] -= 0.25
    with pytest.raises(AssertionError, match=r"client_module\(1\) is right on"):
        check()


def test_a_method_that_sends_what_is_private_is_found_out(some_checks: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ExceptionGroup, match="checks of Leaking failed") as found:
        check_method(Leaking)
    assert "no private name crosses the wire" in failed(found.value)
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("passed ")]
    assert len(lines) == len(found.value.exceptions)
    assert all(line.startswith("FAILED ") and "backbone.head.bias" in line for line in lines)


def test_a_tensor_that_is_in_no_part_or_in_two_is_named() -> None:
    said = {
        "shared private gathered and frozen are disjoint and cover the state": "frozen of client 0 lacks backbone.fc1.bias.",
        "no private name crosses the wire": "is in the broadcast to client 1 in round 1: backbone.fc2.weight.",
    }
    for check in checks_of(Torn):
        if str(check) in said:
            with pytest.raises(AssertionError, match=re.escape(said.pop(str(check)))):
                check()
    assert not said


def test_a_check_that_fails_says_what_and_where() -> None:
    """Also where nobody rewrites its assertions."""
    for module in (checks, compare):
        asserts = [node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Assert)]
        assert asserts
        assert not [ast.unparse(node) for node in asserts if node.msg is None]


def test_a_method_that_carries_something_from_turn_to_turn_is_found_out(
    some_checks: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ExceptionGroup) as found:
        check_method(Remembering)
    [name] = failed(found.value) & {"another order memory and measuring change nothing"}
    assert "states fit back in" not in failed(found.value)
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"FAILED {name}: ")]
    assert ": The run is another one when played again, or in another order of turns" in line
    assert ": backbone.fc1.bias of the server, " in line
