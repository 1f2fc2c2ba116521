"""FedHM: low-rank versions of a full-rank model; and what it shares with HeteroFL, FedRolex and Split-Mix."""

import copy
import math
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from often import mostly_slow
from tiny import CLASSES, Net, Recording, momentum, new_data, new_federation, new_method, new_trainer, sgd, still, without_seconds
from tiny_rounds import AfterRounds, UniformFedAvg, at_start, changing_state, fit, two_classes_each
from torch import Tensor
from torch.nn.functional import cross_entropy

import lightning_fed.methods
from lightning_fed.core.messages import ClientUpdate, Turn
from lightning_fed.core.module import FederatedModule
from lightning_fed.data import ClientDataModule, InMemory
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.engines.turn_loop import QUIET
from lightning_fed.errors import FederationError
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import FedAvg, FedHM
from lightning_fed.methods.fedhm import FedHMServer
from lightning_fed.models import CNN1, ResNet8, ResNet18, ResNet34
from lightning_fed.nn.factorize import Factorized, recover, unroll
from lightning_fed.tensors import State, check_fits, count_floats
from lightning_fed.testing.toys import PartlyFrozenNet

TinyResNet = partial(ResNet8, width=1 / 16)


CONFIGS = Path(__file__).parents[2] / "configs"


def train(module: FederatedModule, data: ClientDataModule, epochs: int = 1, **options: Any) -> None:
    new_trainer(**QUIET, max_epochs=epochs, limit_val_batches=0, **options).fit(module, datamodule=data)


def clients(number: int, *owned: tuple[int, ...]) -> list[ClientInfo]:
    """With all classes, or with the given ones."""
    classes = owned or [tuple(range(CLASSES))] * number
    return [ClientInfo(k, 10, 2, 2, tuple(int(c in classes[k]) for c in range(CLASSES))) for k in range(number)]


def constant(state: State, value: float) -> State:
    return {name: torch.full_like(tensor, value) for name, tensor in state.items()}


# -------------------------------------------------------------------------------------------------------------- averaging


@pytest.mark.often(2)
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("participation", [0.5, 1.0])
def test_with_full_rank_everywhere_it_is_unweighted_fedavg(masked: bool, participation: float) -> None:
    data = new_data(3, 240)
    assert all(min(client.label_counts) > 0 for client in data.clients)
    options: dict[str, Any] = {"participation": participation, "evaluate_every": 0}
    ours = fit(FedHM(Net, CLASSES, ratios=[1.0], masked=masked, optimizer=momentum), data, **options)
    theirs = fit(UniformFedAvg(Net, CLASSES, momentum), data, **options)
    weighted = fit(FedAvg(Net, CLASSES, momentum), data, **options)
    for name, tensor in theirs.run.server.state_dict().items():
        torch.testing.assert_close(ours.run.server.state_dict()[name], tensor, rtol=1e-6, atol=1e-6)
        assert not torch.allclose(weighted.run.server.state_dict()[name], tensor, rtol=1e-4)


def shares(backwards: bool = False, **options: Any) -> list[float]:
    """What clients of ratio 1, 1/2, 1/4 and 1/8 count in a round: client k alone says that the bias of class k is 1."""
    participants = clients(4)
    server = at_start(FedHM(Net, CLASSES, ratios=[1, 1 / 2, 1 / 4, 1 / 8], masked=False, **options), participants)
    updates = []
    for client in participants:
        state = dict(server.broadcast(client).state)
        state["backbone.head.bias"] = torch.eye(CLASSES)[client.id]
        updates.append(ClientUpdate(client.id, 1 + client.id, state))
    server.aggregate(updates[::-1] if backwards else updates)
    return server.state_dict()["backbone.head.bias"].tolist()


@pytest.mark.parametrize(
    ("weights", "temperature", "expected", "digits"),
    [
        ("paper", 1.0, (0.401, 0.243, 0.189, 0.167), 3),
        ("paper", 0.25, (0.82, 0.11, 0.04, 0.02), 2),
        ("paper", 1e6, (0.25, 0.25, 0.25, 0.25), 5),
        ("uniform", 1.0, (0.25, 0.25, 0.25, 0.25), 7),
        ("uniform", 0.1, (0.25, 0.25, 0.25, 0.25), 7),
        ("official", 1.0, (0.705, 0.259, 0.035, 0.0006), 3),
        ("paper", 0.001, (1, 0, 0, 0), 5),
        ("official", 0.001, (1, 0, 0, 0), 5),
    ],
)
def test_weights_of_the_ratios(weights: Any, temperature: float, expected: tuple[float, ...], digits: int) -> None:
    """In whatever order updates come."""
    for backwards in (False, True):
        found = shares(backwards, weights=weights, temperature=temperature)
        assert found == pytest.approx(expected, abs=0.5001 * 10**-digits)
        assert sum(found) == pytest.approx(1)


def test_at_a_temperature_near_0_participants_of_one_ratio_count_the_same() -> None:
    participants = clients(2)
    server = at_start(FedHM(Net, CLASSES, ratios=[1 / 8], weights="official", temperature=0.01, masked=False), participants)
    server.aggregate([ClientUpdate(k, 1, constant(server.version(1 / 8), 3.0 + k)) for k in range(2)])
    assert server.state_dict()["backbone.head.bias"].tolist() == [3.5] * CLASSES


def spectra(state: State, layers: list[str]) -> dict[str, Tensor]:
    return {layer: torch.linalg.svdvals(unroll(state[f"backbone.{layer}.weight"]).double()) for layer in layers}


@pytest.mark.often(3)
@pytest.mark.parametrize("network", [Net, TinyResNet], ids=["linear", "convolutions"])
@pytest.mark.parametrize(("ratios", "anchor"), [((0.5, 0.25), "always"), ((1.0, 0.5), "never"), ((0.5, 0.25), "never")])
def test_a_round_without_learning_erodes_the_tail(network: Any, ratios: tuple[float, float], anchor: str) -> None:
    """The j-th singular value is multiplied by the weights of those whose rank is at least j; the anchor's rank is full."""
    model = FedHM(network, CLASSES, ratios=ratios, anchor=anchor, optimizer=still)
    federation = fit(model, new_data(2, 80, batch_size=1000))
    model = federation.run.model
    layers, before, after = model.low_rank_layers(), model.shared_state(), federation.run.server.state_dict()
    takers = [*ratios, 1.0] if anchor == "always" else list(ratios)
    found = spectra(after, layers)
    for layer, values in spectra(before, layers).items():
        weight = before[f"backbone.{layer}.weight"]
        side = len(weight) if weight.dim() == 4 else min(weight.shape)
        ranks = [len(values) if ratio == 1 else max(1, round(ratio * side)) for ratio in takers]
        weights = [math.exp(ratio) / sum(map(math.exp, takers)) for ratio in takers]
        factors = [sum(w for w, rank in zip(weights, ranks, strict=True) if rank >= j) for j in range(1, len(values) + 1)]
        torch.testing.assert_close(found[layer], values * torch.tensor(factors), rtol=1e-5, atol=1e-6)
        assert (min(factors) == 0) == (1.0 not in takers)
    for name in before.keys() - {f"backbone.{layer}.weight" for layer in layers}:
        torch.testing.assert_close(after[name], before[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("ratios", "present", "anchor", "there"),
    [
        ([1.0, 0.5], [0, 1], "missing_largest", False),
        ([1.0, 0.5], [1], "missing_largest", True),
        ([0.5, 0.25], [0, 1], "missing_largest", False),  # the largest size that there is, though not the whole
        ([0.5, 0.25], [1], "missing_largest", True),
        ([1.0, 0.5], [0, 1], "always", True),
        ([0.5, 0.25], [0, 1], "always", True),
        ([1.0, 0.5], [], "always", False),
        ([0.5, 0.25], [1], "never", False),
    ],
)
def test_when_the_anchor_takes_part(ratios: list[float], present: list[int], anchor: str, there: bool) -> None:
    participants = clients(2)
    server = at_start(FedHM(Net, CLASSES, ratios=ratios, anchor=anchor, masked=False), participants)
    updates = [ClientUpdate(k, 1, constant(server.broadcast(participants[k]).state, 0.0)) for k in present]
    before = server.state_dict()["backbone.head.weight"]
    server.aggregate(updates)
    share = math.e / (math.e + sum(math.exp(ratios[k]) for k in present)) if there else 0.0 if present else 1.0
    torch.testing.assert_close(server.state_dict()["backbone.head.weight"], share * before)


def test_what_is_called_the_authors_is_theirs() -> None:
    """Their aggregation adds the previous model where nobody of the largest size takes part, and only there."""
    config = yaml.safe_load(Path(CONFIGS, "fedhm/cifar10_official.yaml").read_text())["model"]["init_args"]
    overrides = yaml.safe_load(Path(CONFIGS, "worth/capacity.sweep.yaml").read_text())["methods"]["FedHM, official"]
    assert (config["weights"], config["anchor"]) == ("official", "missing_largest")
    assert overrides == {"model.init_args.weights": "official", "model.init_args.anchor": "missing_largest"}


@pytest.mark.parametrize("masked", [True, False])
def test_rows_of_the_head_are_averaged_over_their_owners(masked: bool) -> None:
    """Classes: 0 of the first client, 1 of both, 2 of the second, 3 of nobody. The weights are e and e^0.5."""
    participants = clients(2, (0, 1), (1, 2))
    server = at_start(FedHM(Net, CLASSES, ratios=[1.0, 0.5], masked=masked), participants)
    before = {name: server.state_dict()[f"backbone.head.{name}"].clone() for name in ("weight", "bias")}
    updates = [ClientUpdate(k, 1, constant(server.broadcast(participants[k]).state, 10.0 * (k + 1))) for k in range(2)]
    server.aggregate(updates)
    both = (10 * math.e + 20 * math.exp(0.5)) / (math.e + math.exp(0.5))
    for name, old in before.items():
        head = server.state_dict()[f"backbone.head.{name}"]
        for row, value in enumerate([10, both, 20]):
            assert torch.allclose(head[row], torch.tensor(float(value) if masked else both))
        assert torch.equal(head[3], old[3]) if masked else torch.allclose(head[3], torch.tensor(both))
    assert torch.allclose(server.state_dict()["backbone.fc1.bias"], torch.tensor(both))


# --------------------------------------------------------------------------------------------------------------- versions


@pytest.mark.parametrize("network", [Net, TinyResNet], ids=["linear", "convolutions"])
def test_a_version_is_the_truncated_decomposition(network: Any) -> None:
    method = FedHM(network, CLASSES, ratios=[1.0, 0.5, 0.25])
    server, layers = at_start(method, clients(3)), method.low_rank_layers()
    values = spectra(server.state, layers)
    assert server.version(None) is server.state
    for ratio in (0.5, 0.25):
        version = server.version(ratio)
        for layer in layers:
            weight = server.state[f"backbone.{layer}.weight"]
            first, second = (version[f"backbone.{layer}.{which}.weight"] for which in (0, 1))
            side = len(weight) if weight.dim() == 4 else min(weight.shape)
            assert first.shape[0] == second.shape[1] == max(1, round(ratio * side))
            tail = values[layer][len(first) :].square().sum().sqrt().item()
            assert (recover(first, second) - weight).norm().item() == pytest.approx(tail, rel=1e-5)
        for name in version.keys() & server.state.keys():
            assert torch.equal(version[name], server.state[name])


@pytest.mark.parametrize("network", [Net, TinyResNet], ids=["linear", "convolutions"])
def test_a_version_that_comes_back_is_what_was_sent(network: Any) -> None:
    method = FedHM(network, CLASSES, ratios=[0.5])
    server = at_start(method, clients(1))
    sent = server.version(0.5)
    whole = server.embed(ClientUpdate(0, 1, sent))
    check_fits(whole, server.state, "What came back")
    for layer in method.low_rank_layers():
        product = recover(sent[f"backbone.{layer}.0.weight"], sent[f"backbone.{layer}.1.weight"])
        torch.testing.assert_close(whole[f"backbone.{layer}.weight"], product)
    server.load_state_dict(whole)
    again = server.embed(ClientUpdate(0, 1, server.version(0.5)))
    torch.testing.assert_close(again, whole, rtol=1e-4, atol=1e-6)


def test_versions_follow_the_state() -> None:
    server = at_start(FedHM(Net, CLASSES, ratios=[0.5]), clients(1))
    before = server.version(0.5)["backbone.fc1.0.weight"].clone()
    server.aggregate([ClientUpdate(0, 1, constant(server.version(0.5), 1.0))])
    assert not torch.allclose(server.version(0.5)["backbone.fc1.0.weight"], before)


@pytest.mark.parametrize(
    ("network", "classes", "sizes"),
    [
        (ResNet18, 10, [11_173_962, 4_157_514, 2_209_866, 1_236_042]),
        (ResNet34, 100, [21_328_292, 8_401_316, 4_985_252, 3_277_220]),
    ],
)
def test_payloads_have_the_sizes_of_table_2(network: Any, classes: int, sizes: list[int]) -> None:
    """Running statistics are not in them. Nothing is computed: the tensors have no storage."""
    ratios = (1.0, 1 / 2, 1 / 4, 1 / 8)
    with torch.device("meta"):
        method = FedHM(network, classes, ratios=ratios)
        method.configure_model()
        state = {name: tensor for name, tensor in method.state_dict().items() if name in method.shared_names()}
        layers = [f"backbone.{name}" for name in method.low_rank_layers()]
        server = FedHMServer(state, clients(4), method, layers=layers)
        assert [count_floats(server.broadcast(client).state) for client in clients(4)] == sizes


def huge(state: State) -> State:
    """Factors whose product is larger than any number of their precision."""
    return {name: torch.full_like(t, 1e30) if name.startswith("backbone.fc1.") else t for name, t in state.items()}


def test_what_overflows_when_it_is_merged_ends_the_run() -> None:
    with pytest.raises(FederationError, match=r"^The server's state after round 1 holds NaN or infinity in 'backbone.fc1.w"):
        fit(FedHM(Net, CLASSES, ratios=[0.5]), new_data(2, 60), engine=changing_state(huge))


# ---------------------------------------------------------------------------------------------------------------- clients


def low_rank_client(data: InMemory, **options: Any) -> FederatedModule:
    method = FedHM(Net, CLASSES, ratios=[0.5], **options)
    return method.for_client(replace(data.clients[0], model_size=0.5))


@pytest.mark.parametrize(
    ("decay", "weight_decay", "expected"), [(None, 0.3, 0.3), (None, 0.0, None), (0.2, 0.3, 0.2), (0.0, 0.3, None)]
)
def test_frobenius_decay_is_the_optimizer_s_weight_decay_unless_it_is_given(
    decay: float | None, weight_decay: float, expected: float | None
) -> None:
    module = low_rank_client(new_data(1, 60), decay=decay, optimizer=partial(sgd, weight_decay=weight_decay))
    [phase] = module.phases()
    products = sum(layer.recover().square().sum().item() for layer in module.modules() if isinstance(layer, Factorized))
    assert (phase.penalty is None) == (expected is None)
    if phase.penalty is not None and expected is not None:
        assert phase.penalty().item() == pytest.approx(expected / 2 * products, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "lr"), [("FedHM", 0.1), ("FedHMDelta", 0.1), ("HeteroFL", 0.1), ("FedRolex", 0.1), ("SplitMix", 0.01)]
)
def test_default_optimizers_are_the_authors(name: str, lr: float) -> None:
    method = getattr(lightning_fed.methods, name)(Net, CLASSES)
    optimizer = method.optimizer([torch.nn.Parameter(torch.zeros(1))])
    assert isinstance(optimizer, torch.optim.SGD)
    assert {key: optimizer.defaults[key] for key in ("lr", "momentum", "weight_decay")} == {
        "lr": lr,
        "momentum": 0.9,
        "weight_decay": 5e-4,
    }


def test_frobenius_decay_is_part_of_the_gradient_that_momentum_takes_in() -> None:
    """Three full-batch steps by hand, in double precision."""
    data = new_data(1, 60, dtype=torch.float64, batch_size=1000)
    module = low_rank_client(data, decay=0.3, optimizer=momentum, epochs=3)
    network = copy.deepcopy(module.backbone).double()
    train(module, data.client(0), epochs=3, precision="64-true")

    x, y = data.client(0).data[data.client(0).splits[0]]
    layers = [layer for layer in network.modules() if isinstance(layer, Factorized)]
    factors = {id(p) for layer in layers for p in layer.weights}
    assert len(layers) == 2
    parameters = list(network.parameters())
    velocities = [torch.zeros_like(p) for p in parameters]
    for _ in range(3):
        loss = cross_entropy(network(x), y) + 0.3 / 2 * sum(layer.recover().square().sum() for layer in layers)
        gradients = torch.autograd.grad(loss, parameters)
        for p, velocity, gradient in zip(parameters, velocities, gradients, strict=True):
            velocity.mul_(0.9).add_(gradient if id(p) in factors else gradient + 0.01 * p.detach())
            p.data.sub_(0.1 * velocity)
    torch.testing.assert_close(module.backbone.state_dict(), network.state_dict(), rtol=0, atol=1e-12)


def test_a_client_trains_without_the_classes_that_it_lacks() -> None:
    info = ClientInfo(0, 8, 0, 0, (5, 0, 3, 0))
    x, y = torch.randn(8, 3, 4, 4), torch.tensor([0, 2] * 4)
    module = FedHM(Net, CLASSES, decay=0.0).for_client(info)
    logits = module.backbone(x)
    masked = logits * torch.tensor([1, 0, 1, 0])
    assert torch.equal(module(x), masked)
    loss = module.client_loss((x, y))
    torch.testing.assert_close(loss, cross_entropy(masked, y))
    weight, bias = torch.autograd.grad(loss, list(module.backbone.head.parameters()))
    assert (weight[[1, 3]] == 0).all()
    assert (weight[[0, 2]] != 0).any(dim=1).all()
    assert bias[[1, 3]].tolist() == [0, 0]
    assert (bias[[0, 2]] != 0).all()


def test_without_mask_and_on_the_server_all_classes_are_there() -> None:
    x, info = torch.randn(8, 3, 4, 4), ClientInfo(0, 8, 0, 0, (5, 0, 3, 0))
    for module in (FedHM(Net, CLASSES, masked=False).for_client(info), FedHM(Net, CLASSES).for_client(replace(info, id=-1))):
        assert torch.equal(module(x), module.backbone(x))
        assert (module(x) != 0).all()
    assert FedHM(Net, CLASSES, masked=False).for_client(info).head_names() == set()
    assert FedHM(Net, CLASSES).for_client(info).head_names() == {"backbone.head.weight", "backbone.head.bias"}


@pytest.mark.parametrize("layers", [None, []])
def test_a_network_that_names_no_layers_needs_to_be_told(layers: list[str] | None) -> None:
    data = InMemory(torch.zeros(40, 3, 32, 32), torch.arange(40) % CLASSES, CLASSES, num_clients=2, batch_size=16)
    with pytest.raises(FederationError, match="CNN1 does not say which of its layers can be factorized: name them in layers"):
        fit(FedHM(CNN1, CLASSES, layers=layers), data)


def test_layers_may_be_named() -> None:
    method = FedHM(Net, CLASSES, ratios=[0.5], layers=["fc2"])
    version = at_start(method, clients(1)).version(0.5)
    assert {"backbone.fc1.weight", "backbone.fc2.0.weight", "backbone.fc2.1.weight", "backbone.fc2.1.bias"} <= version.keys()
    assert {name for name, layer in method.for_client(replace(clients(1)[0], model_size=0.5)).named_modules() if "fc2." in name}


def test_a_frozen_layer_is_not_factorized() -> None:
    method = FedHM(PartlyFrozenNet, CLASSES)
    method.configure_model()
    assert method.low_rank_layers() == ["fc2"]
    with pytest.raises(FederationError, match="layers names 'fc1', which is frozen"):
        FedHM(PartlyFrozenNet, CLASSES, layers=["fc1", "fc2"]).for_client(replace(clients(1)[0], model_size=0.5))


@pytest.mark.parametrize("norm", [torch.nn.utils.parametrizations.weight_norm, torch.nn.utils.spectral_norm])
def test_a_layer_whose_weight_is_computed_is_refused(norm: Any) -> None:
    class NormedNet(Net):
        def __init__(self, num_classes: int) -> None:
            super().__init__(num_classes)
            norm(self.fc1)

    with pytest.raises(FederationError, match=r"The weight of layer 'fc1' is computed .* expected a parameter to factorize"):
        fit(FedHM(NormedNet, CLASSES, layers=["fc1"]))
    fit(FedHM(NormedNet, CLASSES, layers=["fc2"]))


def test_a_network_may_look_at_the_weight_of_a_factorized_layer() -> None:
    """As patch embeddings of the transformers library do, to find out its dtype, and layers that are called by their weight."""

    class Looking(Net):
        def encode(self, x: Tensor, cut: str = "features") -> Tensor:
            hidden = torch.relu(self.fc1(x.flatten(1).to(self.fc1.weight.dtype)))
            return torch.relu(torch.nn.functional.linear(hidden, self.fc2.weight, self.fc2.bias))

    ours, theirs = (fit(FedHM(network, CLASSES, ratios=[1.0, 0.5], optimizer=sgd)) for network in (Looking, Net))
    for name, tensor in theirs.run.server.state_dict().items():
        assert torch.allclose(ours.run.server.state_dict()[name], tensor, atol=1e-5)


def test_a_layer_that_does_not_exist_is_refused() -> None:
    with pytest.raises(FederationError, match="nothing"):
        fit(FedHM(Net, CLASSES, ratios=[0.5], layers=["nothing"]))


# ------------------------------------------------------------------ what the methods with clients of several sizes share

SIZES: dict[str, dict[str, Any]] = {
    "FedHM": {"ratios": (1.0, 0.5, 0.25)},
    "HeteroFL": {"widths": (1.0, 0.5, 0.25)},
    "FedRolex": {"widths": (1.0, 0.5, 0.25)},
    "SplitMix": {"bases": 4, "budgets": (4, 2, 1)},
}
VERSIONS = {
    "FedHM": {"rank_0.5", "rank_0.25"},
    "HeteroFL": {"width_0.5", "width_0.25"},
    "FedRolex": {"width_0.5", "width_0.25"},
    "SplitMix": {"mix_1", "mix_2", "mix_3"},
}
TARGET = 0.24

each_method = pytest.mark.parametrize("name", SIZES)


@cache
def recorded(name: str) -> tuple[Federation, list[Turn], list[ClientUpdate]]:
    """Three rounds, played once."""
    engine = Recording()
    federation = fit(
        new_method(name, **SIZES[name]), two_classes_each(), rounds=3, engine=engine, target=TARGET, trainer=new_trainer
    )
    return federation, list(engine.turns), list(engine.updates)


@pytest.mark.often(2)
@each_method
def test_running_statistics_do_not_travel_to_train(name: str) -> None:
    federation, turns, updates = recorded(name)
    payloads: list[State] = [federation.run.server.state_dict()]
    for turn, update in zip(turns, updates, strict=True):
        if turn.verb == "fit":
            payloads += [turn.broadcast.state, update.state]
        assert bool(turn.broadcast.statistics) == (turn.verb == "evaluate")
        assert all("running_" in entry or "tracked" in entry for entry in turn.broadcast.statistics)
    assert len(payloads) == 1 + 3 * 3 * 2
    assert all(payload for payload in payloads)
    assert not any("running_" in entry or "tracked" in entry for payload in payloads for entry in payload)


@each_method
def test_the_global_model_is_what_is_measured(name: str) -> None:
    federation = recorded(name)[0]
    model, pooled = federation.run.server.global_models()["global"], federation.run.data.pooled()
    images, labels = pooled.data[pooled.splits[2]]
    module = federation.run.model.for_client(replace(pooled.info, model_size=model.model_size)).eval()
    module.load_shared_state(model.state)

    def accuracy() -> float:
        return (module(images).argmax(dim=1) == labels).float().mean().item()

    without = accuracy()
    module.load_statistics(model.statistics)
    assert accuracy() == pytest.approx(federation.run.history[-1]["global/test_accuracy"])
    assert accuracy() != without


@each_method
def test_every_version_is_measured_under_its_name(name: str) -> None:
    row = recorded(name)[0].run.history[-1]
    measured = {column.partition("/")[0] for column in row if column.endswith("/test_accuracy")}
    assert measured == VERSIONS[name] | {"global", "selected"}


@each_method
def test_statistics_are_the_mean_over_everybodys_batches(name: str) -> None:
    federation = recorded(name)[0]
    model, data = federation.run.server.global_models()["global"], federation.run.data
    module = federation.run.model.for_client(replace(data.pooled().info, model_size=None))
    module.load_shared_state(model.state)
    prefix, network = ("bases.1.", module.bases[1]) if name == "SplitMix" else ("backbone.", module.backbone)
    loaders = [data.client(k).predict_dataloader() for k in range(3)]
    assert sorted(map(len, loaders)) == [2, 2, 3]
    activations = [Net.encode(network, x).detach() for loader in loaders for x, _ in loader]
    means = torch.stack([a.mean(dim=0) for a in activations]).mean(dim=0)
    variances = torch.stack([a.var(dim=0) for a in activations]).mean(dim=0)
    torch.testing.assert_close(model.statistics[f"{prefix}norm.running_mean"], means)
    torch.testing.assert_close(model.statistics[f"{prefix}norm.running_var"], variances)


@each_method
def test_fixed_sizes_are_dealt_in_turn(name: str) -> None:
    federation, turns, _ = recorded(name)
    sizes = [None, 2, 1] if name == "SplitMix" else [None, 0.5, 0.25]
    turns = [turn for turn in turns if turn.client.id >= 0 and turn.verb != "compute_statistics"]
    assert len(turns) == 3 * 3 + 3  # measured in the end
    assert all(turn.broadcast.model_size == sizes[turn.client.id] for turn in turns)
    more = federation.run.model.configure_server(clients(8)).model_size
    assert more == {client: sizes[client % 3] for client in range(8)}


def redrawn(name: str, **options: Any) -> tuple[list[dict[int, float | None]], Federation]:
    """Everybody's size in each of three rounds in which nobody learns; measured in the last."""
    sizes: list[dict[int, float | None]] = []
    method = new_method(name, **SIZES[name], assignment="redrawn", epochs=0)
    note = AfterRounds(lambda run: sizes.append(dict(run.server.model_size)))
    settings: dict[str, Any] = {"rounds": 3, "participation": 0.5, "evaluate_every": 0, "callbacks": [note]}
    return sizes, fit(method, new_data(4, 160), **settings | options)


@pytest.mark.parametrize("name", mostly_slow(SIZES, often={"FedHM"}))
def test_redrawn_sizes_are_a_function_of_seed_and_round(name: str) -> None:
    engine = Recording()
    rounds, federation = redrawn(name, engine=engine)
    assert rounds[0] != rounds[1] != rounds[2] != rounds[0]
    assert {size for drawn in rounds for size in drawn.values()} == set(federation.run.model.model_sizes)
    turns = [turn for turn in engine.turns if turn.client.id >= 0 and turn.verb != "compute_statistics"]
    assert [turn.verb for turn in turns] == ["fit"] * (3 * 2) + ["evaluate"] * 4
    assert all(turn.broadcast.model_size == rounds[turn.round - 1][turn.client.id] for turn in turns)
    assert federation.run.results.keys() == {0, 1, 2, 3}
    assert all(math.isfinite(value) for value in federation.run.history[-1].values())
    assert redrawn(name, rounds=2)[0] == rounds[:2]
    assert redrawn(name, rounds=1, seed=1)[0] != rounds[:1]


@pytest.mark.often(1)
@each_method
def test_a_finished_run_that_is_continued_has_the_same_clients(name: str) -> None:
    data, method = new_data(3, 120), partial(new_method, name, **SIZES[name], epochs=0)
    ended = fit(method(), data, rounds=2, run_dir="runs", evaluate_every=0)
    continued = new_federation(2, run_dir="runs", evaluate_every=0)
    continued.fit(method(), data, ckpt_path="last")
    assert without_seconds(continued.run.history) == without_seconds(ended.run.history)
    for client in range(3):
        before, after = (federation.client_module(client).state_dict() for federation in (ended, continued))
        assert [key for key, tensor in before.items() if not torch.equal(tensor, after[key])] == []
