"""pFedLoRA against its paper."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from often import mostly_slow
from tiny import CLASSES, Net, NoisyNet, WideNet, momentum, new_data, new_trainer, photos, same
from tiny_loops import batches, drawn, step
from tiny_rounds import assert_same_runs, fit
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_fed.data import InMemory
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.engines.turn_loop import QUIET
from lightning_fed.errors import FederationError
from lightning_fed.methods import PFedLoRA, Standalone
from lightning_fed.models import CNN1, CNN2, CNN3, CNN4, CNN5
from lightning_fed.tensors import State

HETEROGENEOUS = [Net, WideNet]
CLIENT = ClientInfo(0, 30, 5, 5, (10, 10, 5, 5))


# ------------------------------------------------------------------------------------- the algorithm, once more, bare


@pytest.mark.parametrize(
    ("mu", "epochs", "adapter_epochs"),
    mostly_slow([(0.5, 1, 1), (0.5, 2, 3), (0.9, 1, 1), (0.9, 2, 3)], often={(0.5, 1, 1), (0.9, 2, 3)}),
)
def test_rounds_are_those_of_a_bare_loop(mu: float, epochs: int, adapter_epochs: int) -> None:
    data, rounds = new_data(), 2
    method = PFedLoRA(HETEROGENEOUS, CLASSES, 3, mu, optimizer=momentum, epochs=epochs, adapter_epochs=adapter_epochs)
    federation = fit(method, data, rounds=rounds)

    template = drawn(PFedLoRA(HETEROGENEOUS, CLASSES, 3))
    theta = template.adapter  # type: nn.Module
    networks = [template.for_client(client).backbone for client in data.clients]
    for round in range(1, rounds + 1):
        trained: list[nn.Module] = []
        for k, network in enumerate(networks):
            adapter = copy.deepcopy(theta)  # 1. receive
            optimizer = momentum(network.parameters())
            for epoch in range(epochs):  # 2. train the network on both losses
                for x, y in batches(data, k, round, epoch):
                    R = network.encode(x)
                    step(optimizer, (1 - mu) * cross_entropy(adapter(R), y) + mu * cross_entropy(network.head(R), y))
            optimizer = momentum(adapter.parameters())
            for epoch in range(epochs, epochs + adapter_epochs):  # 3. train the adapter
                for x, y in batches(data, k, round, epoch):
                    with torch.no_grad():
                        R = network.encode(x)
                    step(optimizer, cross_entropy(adapter(R), y))
            trained.append(adapter)
        n = [client.num_train for client in data.clients]
        theta = copy.deepcopy(theta)
        with torch.no_grad():  # 4. average, weighted by training examples
            for mean, *own in zip(theta.parameters(), *(adapter.parameters() for adapter in trained), strict=True):
                mean.copy_(sum(n_k * p.double() for n_k, p in zip(n, own, strict=True)) / sum(n))

    assert same(federation.run.server.state_dict(), {f"adapter.{name}": tensor for name, tensor in theta.state_dict().items()})
    for k, network in enumerate(networks):
        assert same(federation.run.store.get(k), {f"backbone.{name}": tensor for name, tensor in network.state_dict().items()})


# ----------------------------------------------------------------------------------------------------- degenerate cases


@pytest.mark.often(1)
@pytest.mark.parametrize("adapter", ["reduction", "factorized"])
def test_mu_1_is_standalone_bit_for_bit(adapter: Any) -> None:
    ours = PFedLoRA(HETEROGENEOUS, CLASSES, mu=1, adapter=adapter, optimizer=momentum, epochs=2, adapter_epochs=1)
    alone = Standalone(HETEROGENEOUS, CLASSES, momentum, epochs=2)
    assert_same_runs(ours, alone, "clients", "results", data=new_data(), rounds=3, participation=0.5)


# --------------------------------------------------------------------------------------------------------------- phases


class Noting(PFedLoRA):
    """Keeps the state at the start of each phase and at the end."""

    def __init__(self, **options: Any) -> None:
        super().__init__(NoisyNet, CLASSES, optimizer=momentum, **options)
        self.states: list[State] = []

    def _note(self) -> None:
        self.states.append({name: tensor.clone() for name, tensor in self.state_dict().items()})

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        self._note()

    def on_train_end(self) -> None:
        self._note()


def test_each_step_leaves_the_other_part_bit_for_bit() -> None:
    """Batch-norm statistics and dropout included: the encoder is in eval mode while the adapter learns."""
    module = Noting()
    new_trainer(**QUIET, max_epochs=2).fit(module, new_data(1).client(0))
    start, middle, end = module.states
    changed = [{name for name in start if not torch.equal(one[name], two[name])} for one, two in [(start, middle), (middle, end)]]
    adapter = {name for name in start if name.startswith("adapter.")}
    assert changed == [start.keys() - adapter, adapter]


# ------------------------------------------------------------------------------------------------------- initial weights


def test_the_factorized_adapter_starts_without_an_opinion() -> None:
    module = PFedLoRA(Net, CLASSES, adapter="factorized").for_client(CLIENT)
    x, y = torch.randn(5, 3, 4, 4), torch.tensor([0, 1, 2, 3, 0])
    logits = module.adapter(module.backbone.encode(x))
    assert torch.equal(logits, torch.zeros(5, CLASSES))
    wide = PFedLoRA(partial(Net, hidden=400), CLASSES, hidden_dim=50, cut="fc1", adapter="factorized").for_client(CLIENT).adapter
    assert wide[0].weight.std().item() == pytest.approx(50**-0.5, rel=0.02)
    encoder = [p for name, p in module.backbone.named_parameters() if not name.startswith("head.")]
    assert not any(gradient.any() for gradient in torch.autograd.grad(cross_entropy(logits, y), encoder))


def test_the_factorized_adapter_is_one_matrix_of_rank_h() -> None:
    adapter = PFedLoRA(partial(Net, hidden=8), 10, 2, cut="fc1", adapter="factorized").for_client(CLIENT).adapter
    nn.init.normal_(adapter[1].weight)
    product = adapter[1].weight @ adapter[0].weight  # (C, h) @ (h, d)
    x = torch.randn(3, 8)
    assert torch.linalg.matrix_rank(product) == 2
    assert torch.allclose(adapter(x), x @ product.T + adapter[1].bias, atol=1e-5)


# -------------------------------------------------------------------------------------------------------------- traffic

FIVE = [CNN1, CNN2, CNN3, CNN4, CNN5]


def assert_traffic(model: PFedLoRA, data: InMemory, parameters: int) -> None:
    """Each participant receives and sends as many parameters."""
    row = fit(model, data, rounds=1).run.history[0]
    assert row["traffic/down_parameters"] == row["traffic/up_parameters"] == parameters * data.num_clients
    assert row["traffic/down_bytes"] == row["traffic/up_bytes"] == 4 * parameters * data.num_clients
    assert row["traffic/total_parameters"] == 2 * parameters * data.num_clients
    for client in data.clients:
        payload = model.for_client(client).shared_state()
        assert sum(tensor.numel() for tensor in payload.values()) == parameters


@pytest.mark.often(1)
@pytest.mark.parametrize(
    ("classes", "h", "parameters"),
    mostly_slow(
        [
            (10, 20, 10_230),  # 500·20 + 20 + 20·10 + 10
            (10, 40, 20_450),
            (10, 60, 30_670),
            (10, 80, 40_890),
            (100, 20, 12_120),  # 500·20 + 20 + 20·100 + 100
            (100, 40, 24_140),
            (100, 60, 36_160),
            (100, 80, 48_180),
        ],
        often={(10, 20, 10_230), (100, 80, 48_180)},
    ),
)
def test_traffic_of_different_networks(classes: int, h: int, parameters: int) -> None:
    assert_traffic(PFedLoRA(FIVE, classes, h, epochs=0), photos(classes, 5), parameters)


@pytest.mark.often(2)
@pytest.mark.parametrize(
    ("classes", "h", "parameters"),
    [
        (10, 100, 201_110),  # 2000·100 + 100 + 100·10 + 10
        (10, 200, 402_210),
        (10, 300, 603_310),
        (10, 400, 804_410),
        (10, 500, 1_005_510),
        (100, 100, 210_200),
        (100, 500, 1_050_600),
    ],
)
def test_traffic_of_one_network_cut_after_its_first_linear_layer(classes: int, h: int, parameters: int) -> None:
    assert_traffic(PFedLoRA(CNN1, classes, h, cut="fc1", epochs=0), photos(classes, 1), parameters)


def test_traffic_of_a_cut_behind_the_convolutions() -> None:
    """800·60 + 60 + 60·10 + 10, for a representation of 32 filters with 25 pixels each."""
    assert_traffic(PFedLoRA([CNN1, CNN3, CNN5], 10, 60, cut="conv", epochs=0), photos(10, 3), 48_670)


@pytest.mark.parametrize(
    ("options", "parameters"),
    [
        ({"adapter": "factorized"}, 30_670 - 60),
        ({"adapter_bias": False}, 30_670 - 60 - 10),
        ({"adapter": "factorized", "adapter_bias": False}, 30_670 - 60 - 10),
    ],
)
def test_traffic_without_biases(options: dict[str, Any], parameters: int) -> None:
    assert_traffic(PFedLoRA(CNN5, 10, 60, epochs=0, **options), photos(10, 1), parameters)


def test_traffic_of_training_is_that_of_no_training() -> None:
    one, other = (fit(PFedLoRA(HETEROGENEOUS, CLASSES, epochs=epochs), rounds=1).run.history[0] for epochs in (0, 1))
    assert {k: v for k, v in one.items() if "traffic" in k} == {k: v for k, v in other.items() if "traffic" in k}


# --------------------------------------------------------------------------------------------------------------- errors


def test_an_unknown_cut_is_refused() -> None:
    with pytest.raises(FederationError, match=r"Net cannot be cut at 'fc7': set cut to one of \['fc1', 'features'\]"):
        PFedLoRA(Net, CLASSES, cut="fc7").configure_model()


def test_a_cut_of_different_widths_is_refused() -> None:
    with pytest.raises(FederationError, match=r"Client 1's network, WideNet, is 7 wide at 'fc1', but that of client 0, Net, is 5"):
        fit(PFedLoRA(HETEROGENEOUS, CLASSES, cut="fc1"))


def test_the_adapter_trains_as_long_as_the_network_and_keeps_its_moments_too() -> None:
    module = PFedLoRA(Net, CLASSES, steps=3, persistent=True)
    module.configure_model()
    assert [(phase.steps, phase.epochs, phase.persistent) for phase in module.phases()] == [(3, None, True)] * 2
