"""FLOPs against formulas: two per multiplication and addition, biases and activations not counted."""

import threading
from typing import Any

import pytest
import torch
from tiny import CLASSES, PIXELS, Net, momentum, new_data, new_federation
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from lightning_fed.core.flops import FlopMeter
from lightning_fed.core.module import FederatedModule
from lightning_fed.data import IID, InMemory
from lightning_fed.methods import FedAvg, PerFedAvg, PFedLoRA, PFedMe
from lightning_fed.models import CNN1, Backbone, TextTransformer


@pytest.fixture(autouse=True, params=["without values", "on a copy"])
def counted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All as if networks were large, and as they are."""
    if request.param == "without values":
        monkeypatch.setattr("lightning_fed.core.flops.SMALL", 0)


class Linear(Backbone):
    """A head on the pixels."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(PIXELS, num_classes)

    def encode(self, x: Tensor, cut: str = "features") -> Tensor:
        return x.flatten(1)


def flops(model: FederatedModule, data: InMemory) -> float:
    federation = new_federation(rounds=1)
    return federation.fit(model, data)[0]["compute/flops"]


def one_client(batch_size: int = 1000) -> InMemory:
    """A client with 80 training examples."""
    data = new_data(1, 100, batch_size=batch_size)
    assert data.clients[0].num_train == 80
    return data


def test_a_linear_layer() -> None:
    """Forward x W, backward the gradient of W; that of the input is not needed."""
    assert flops(FedAvg(Linear, CLASSES), one_client()) == 2 * (2 * 80 * PIXELS * CLASSES)


@pytest.mark.parametrize("batch_size", [16, 30])
def test_flops_are_those_of_all_examples_however_they_are_batched(batch_size: int) -> None:
    assert flops(FedAvg(Linear, CLASSES, epochs=3), one_client(batch_size)) == 3 * 2 * (2 * 80 * PIXELS * CLASSES)


def test_each_phase_of_pfedlora() -> None:
    h, n = 3, 80
    fc1, fc2, head = 2 * n * PIXELS * 5, 2 * n * 5 * 6, 2 * n * 6 * CLASSES
    adapter_1, adapter_2 = 2 * n * 6 * h, 2 * n * h * CLASSES
    # Everything forward; backward, the gradients of what learns and of what lies between it and the loss.
    local = (fc1 + fc2 + head + adapter_1 + adapter_2) + (fc1 + 2 * fc2 + 2 * head) + (adapter_1 + adapter_2)
    adapter = (fc1 + fc2 + adapter_1 + adapter_2) + (adapter_1 + 2 * adapter_2)
    assert flops(PFedLoRA(Net, CLASSES, h), one_client()) == local + adapter
    assert flops(PFedLoRA(Net, CLASSES, h, epochs=0, adapter_epochs=1), one_client()) == adapter
    assert flops(PFedLoRA(Net, CLASSES, h, epochs=2, adapter_epochs=0), one_client()) == 2 * local


def test_cnn1() -> None:
    n = 8
    labels = torch.zeros(10, dtype=torch.long)
    data = InMemory(torch.zeros(10, 3, 32, 32), labels, 10, num_clients=1, partition=IID())
    assert data.clients[0].num_train == n
    layers = [3 * 16 * 25 * 28 * 28, 16 * 32 * 25 * 10 * 10, 800 * 2000, 2000 * 500, 500 * 10]
    forward = 2 * n * sum(layers)
    # Backward, a layer costs twice its forward, but the gradient of the images is not needed.
    assert flops(FedAvg(CNN1, 10), data) == 3 * forward - 2 * n * layers[0]


def test_participants_add_up() -> None:
    data = new_data()
    n = sum(client.num_train for client in data.clients)
    assert flops(FedAvg(Linear, CLASSES), data) == 2 * (2 * n * PIXELS * CLASSES)


@pytest.mark.filterwarnings("ignore:Attribute 'body' is an instance of `nn.Module`")  # here, sharing it is meant
def test_counting_leaves_a_given_network_alone() -> None:
    """A network that __init__ was given is shared by all clients; counting must not take it."""

    class Pretrained(FederatedModule):
        def __init__(self, body: nn.Module) -> None:
            super().__init__(Linear, CLASSES, momentum)
            self.body = body

        def forward(self, x: Tensor) -> Tensor:
            return self.backbone(self.body(x.flatten(1)))

    body = nn.Linear(PIXELS, PIXELS).requires_grad_(False)
    before = body.weight.clone()
    n = 80
    # The frozen body forward; the head forward and backward.
    assert flops(Pretrained(body), one_client()) == 2 * n * PIXELS**2 + 2 * (2 * n * PIXELS * CLASSES)
    assert torch.equal(body.weight, before)


def counted_step(model: FederatedModule, batch: Any, train: bool = True) -> int:
    """FLOPs of a step of training, or of an answer."""
    model.configure_model()
    model.train(train)
    meter = FlopMeter()

    def step(copied: FederatedModule, batch: Any) -> None:
        with torch.set_grad_enabled(train):
            loss = copied.client_loss(batch)
        if train:
            loss.backward()

    meter.note(model, "step", batch, step)
    return meter.collect()


class Ledger:
    """Takes notes; with a lock, it cannot be copied."""

    def __init__(self, locked: bool) -> None:
        self.entries: list[int] = []
        self.lock = threading.Lock() if locked else None


class Noting(FedAvg):
    """Its loss notes the batches that it sees, and scales what it was given in place."""

    def __init__(self, ledger: Ledger, **options: Any) -> None:
        super().__init__(Linear, CLASSES, **options)
        self.ledger = ledger
        self.sizes: list[int] = []

    def client_loss(self, batch: Any) -> Tensor:
        x = batch[0].mul_(2)
        self.sizes.append(len(x))
        self.ledger.entries.append(len(x))
        return super().client_loss(batch)


@pytest.mark.parametrize("locked", [False, True])
def test_counting_leaves_alone_what_a_loss_changes(locked: bool) -> None:
    model, batch = Noting(Ledger(locked)), (torch.ones(4, 3, 4, 4), torch.zeros(4).long())
    assert counted_step(model, batch) == 2 * (2 * 4 * PIXELS * CLASSES)
    assert model.sizes == []
    assert batch[0].unique() == 1
    assert locked or model.ledger.entries == []  # what cannot be copied is shared


@pytest.mark.parametrize("method", [PFedMe, PerFedAvg])
def test_a_layer_may_get_a_parameter_as_input_where_a_method_asks_for_gradients(method: type[FederatedModule]) -> None:
    def body(outputs: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), weight_norm(nn.Linear(PIXELS, outputs)))

    assert flops(method(body, CLASSES), one_client(16)) > 0


def test_a_part_of_the_network_may_refuse_to_be_copied() -> None:
    class Locked(Linear):
        def __init__(self, num_classes: int) -> None:
            super().__init__(num_classes)
            self.lock = threading.Lock()

    assert flops(FedAvg(Locked, CLASSES), one_client()) == 2 * (2 * 80 * PIXELS * CLASSES)


@pytest.mark.often(3)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_counts_whatever_kernel_computes_it(dropout: float) -> None:
    """On a CPU, torch computes attention without dropout, and a layer of a Transformer that only answers, each in one kernel."""
    n, length, width, layers = 2, 8, 16, 2
    model = FedAvg(lambda outputs: TextTransformer(outputs, 30, length, width, 2, layers, dropout), CLASSES)
    batch = torch.arange(n * length).view(n, length) + 1, torch.zeros(n).long()
    weights, attention, head = 12 * width**2, 2 * length * width, width * CLASSES  # per token and layer, and per text
    forward = 2 * n * (layers * length * (weights + attention) + head)
    assert counted_step(model, batch) == 3 * forward
    assert counted_step(model, batch, train=False) == forward


def test_an_lstm_counts_as_much_as_its_products() -> None:
    n, length, width = 2, 5, 6

    class Recurrent(Backbone):
        def __init__(self, num_classes: int) -> None:
            super().__init__()
            self.lstm = nn.LSTM(width, width, batch_first=True)
            self.head = nn.Linear(width, num_classes)

        def encode(self, x: Tensor, cut: str = "features") -> Tensor:
            outputs, _ = self.lstm(x)
            return outputs[:, -1]

    batch = torch.zeros(n, length, width), torch.zeros(n).long()
    forward = 2 * n * (length * 8 * width**2 + width * CLASSES)
    assert counted_step(FedAvg(Recurrent, CLASSES), batch, train=False) == forward
    # Backward, a product costs twice its forward, but the gradients of the inputs and of the first hidden state are not needed.
    assert counted_step(FedAvg(Recurrent, CLASSES), batch) == 3 * forward - 2 * n * (length + 1) * 4 * width**2
