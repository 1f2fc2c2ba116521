"""Adapters are a property of the backbone: any method runs on them, and FedAvg over them is HOMLoRA."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from often import OF_THE_CORE, mostly_slow
from tiny import (
    CLASSES,
    METHODS,
    PIXELS,
    Net,
    NoisyNet,
    WideNet,
    assert_same,
    data_for,
    momentum,
    new_data,
    new_federation,
    new_method,
    new_texts,
    new_trainer,
    private_states,
    same,
    still_transformer,
    tiny_transformer,
    without_seconds,
)
from torch import nn

from lightning_fed.data.client_info import ClientInfo
from lightning_fed.engines import Engine, InProcess, Processes
from lightning_fed.engines.worker_spec import WorkerSpec
from lightning_fed.errors import FederationError
from lightning_fed.methods import MOON, SCAFFOLD, FedALA, FedAMP, FedAvg, FedBN, FedDyn, FedKD, HOMLoRA, Standalone
from lightning_fed.models import CNN1, Adapters, TextTransformer, TransformerClassifier
from lightning_fed.models.adapter_files import modules_of, save_adapter
from lightning_fed.models.adapters import COMMON, adapted_layers, adapter_names
from lightning_fed.testing import Check, checks_of
from lightning_fed.testing.subject import Subject

Text = partial(TextTransformer, vocab_size=9, width=8, heads=2, layers=1, dropout=0.0)
ON_NET = Adapters(r=2, lora_alpha=4, target_modules=["fc1", "fc2"])
LAYER = "network.roberta.encoder.layer.0.attention.self"
adamw = partial(torch.optim.AdamW, lr=0.01)


def takes_adapters(name: str) -> bool:
    try:
        new_method(name, adapters=ON_NET)
    except FederationError:
        return False
    return True


TAKING = [name for name in METHODS if takes_adapters(name)]
"""Methods that run on adapters."""

OF_TWO_RANKS = Adapters(r=[1, 3], lora_alpha=4, target_modules=["fc1", "fc2"])

EACH = [
    (name, check)
    for name in TAKING
    for check in checks_of(Subject(partial(new_method, name, adapters=ON_NET), partial(data_for, name), any_network=False))
]


@pytest.mark.parametrize(
    ("name", "check"),
    mostly_slow(EACH, [one for one in EACH if one[0] == "FedAvg" or (one[0] == "DSFL" and str(one[1]) not in OF_THE_CORE)]),
    ids=str,
)
def test_a_method_keeps_on_adapters_what_it_keeps_without(name: str, check: Check) -> None:
    check()


def test_who_runs_on_adapters_and_who_refuses_them_in_a_line() -> None:
    assert {"FedAvg", "FedPer", "FedProx", "SCAFFOLD", "Ditto", "FedRep", "FedAMP", "PFedLoRA", "FML", "FedDF", "FD"} <= set(TAKING)
    refused = set(METHODS) - set(TAKING)
    assert {"HOMLoRA", "FedHM", "HeteroFL", "FedDecomp", "SplitMix", "PFedGate"} <= refused
    for name in refused:
        with pytest.raises(FederationError, match=rf"^{name} got adapters, but it[^\n]*leave adapters out"):
            new_method(name, adapters=ON_NET)


@pytest.mark.often(1)
@pytest.mark.parametrize("backbone", [still_transformer, tiny_transformer], ids=["still", "dropout"])
@pytest.mark.parametrize("where", ["here", pytest.param("apart", marks=pytest.mark.slow)])
def test_fedavg_over_them_is_homlora(backbone: Any, where: str, two_workers: Processes) -> None:
    engine, federations = two_workers if where == "apart" else InProcess(), []
    for method in (
        HOMLoRA(backbone, CLASSES, r=4, lora_alpha=8, optimizer=adamw, steps=3),
        FedAvg(
            backbone,
            CLASSES,
            adamw,
            adapters=Adapters(r=4, lora_alpha=8),
            steps=3,
            persistent=True,
            weighting="uniform",
            metric="accuracy",
        ),
    ):
        federations.append(new_federation(3, participation=0.7, engine=engine))
        federations[-1].fit(method, new_texts(3, 60))
    homlora, fedavg = (without_seconds(federation.run.history) for federation in federations)
    assert [{name: row[name] for name in common.keys() & row.keys()} for row, common in zip(homlora, fedavg, strict=True)] == fedavg
    assert same(*(federation.run.server.state_dict() for federation in federations))
    for client in range(3):
        assert same(*(private_states(federation).get(client, {}) for federation in federations))


def test_what_travels_is_adapters_and_head() -> None:
    module = FedAvg(tiny_transformer, CLASSES, adapters=Adapters(r=2))
    module.configure_model()
    learned = module.shared_names()
    factors = {f"backbone.{LAYER}.{p}.lora_{f}.{COMMON}.weight" for p in ("query", "value") for f in "AB"}
    assert {name for name in learned if ".lora_" in name} == factors
    assert all(".lora_" in name or ".classifier." in name for name in learned)
    assert {f"backbone.{name}" for name in adapter_names(module.backbone, "A")} == {n for n in factors if "lora_A" in n}


def test_networks_of_a_list_are_frozen_alike_on_every_engine(two_workers: Processes) -> None:
    def play(engine: Engine) -> Any:
        federation = new_federation(2, participation=0.7, engine=engine)
        federation.fit(Standalone([NoisyNet, Net, WideNet], CLASSES, momentum, adapters=ON_NET), new_data(5, 150))
        return federation

    here, there = play(InProcess()), play(two_workers)
    assert_same(here, there)
    for client in range(5):
        assert same(*(federation.run.client_module(client).state_dict() for federation in (here, there)))


def test_frozen_tensors_are_one_object_and_stay_as_they_are() -> None:
    federation = new_federation(2)
    federation.fit(FedAvg(NoisyNet, CLASSES, partial(adamw, weight_decay=0.1), adapters=ON_NET), new_data(3, 100))
    first, *others = [federation.run.client_module(client) for client in (0, 1, 2)]
    fresh = FedAvg(NoisyNet, CLASSES, adapters=ON_NET).for_client(ClientInfo(0, 10, 10, 10, ()), 0)
    assert {"backbone.norm.weight", "backbone.norm.running_mean", "backbone.fc1.base_layer.weight"} <= first.frozen_names
    named = dict(first.named_parameters())
    for other in others:
        shared = {name for name, p in other.named_parameters() if p is named[name]}
        assert shared == first.frozen_names & named.keys()
    for name in first.frozen_names:
        assert torch.equal(first.state_dict()[name], fresh.state_dict()[name])


def test_weights_are_those_of_a_network_without_them() -> None:
    federations = [new_federation(1, seed=3) for _ in range(2)]
    for federation, adapters in zip(federations, (None, ON_NET), strict=True):
        federation.fit(FedAvg(Net, CLASSES, epochs=0, adapters=adapters), new_data(2, 60))
    plain, adapted = (federation.run.server_module().state_dict() for federation in federations)
    assert torch.equal(plain["backbone.fc1.weight"], adapted["backbone.fc1.base_layer.weight"])
    assert torch.equal(plain["backbone.head.weight"], adapted["backbone.head.weight"])


def test_two_seeds_draw_two_frozen_networks() -> None:
    module = FedAvg(Net, CLASSES, adapters=ON_NET)
    weights = []
    for seed in (0, 1, 0):
        federation = new_federation(1, seed=seed)
        federation.fit(module, new_data(2, 60))
        weights.append(federation.run.server_module().state_dict()["backbone.fc1.base_layer.weight"].clone())
    assert torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[1])


def test_further_layers_learn_as_a_whole() -> None:
    module = FedAvg(NoisyNet, CLASSES, adapters=Adapters(2, target_modules=["fc1"], modules_to_save=["norm"]))
    module.configure_model()
    assert {"backbone.norm.weight", "backbone.norm.running_mean"} <= module.shared_names()
    assert "backbone.fc2.weight" in module.frozen_names


def test_fedbn_is_fedavg_where_norms_are_frozen() -> None:
    federations = [new_federation(2) for _ in range(2)]
    for federation, method in zip(federations, (FedAvg, FedBN), strict=True):
        federation.fit(method(NoisyNet, CLASSES, momentum, adapters=ON_NET), new_data(3, 100))
    assert same(*(federation.run.server.state_dict() for federation in federations))


def test_adapters_of_a_network_in_half_precision_learn_in_single() -> None:
    def half(num_classes: int) -> TransformerClassifier:
        return still_transformer(num_classes).to(torch.bfloat16)

    module = FedAvg(half, CLASSES, adapters=Adapters(r=2))
    module.configure_model()
    types = {name: tensor.dtype for name, tensor in module.state_dict().items()}
    assert all(types[name] == (torch.bfloat16 if name in module.frozen_names else torch.float32) for name in types)
    new_federation(1).fit(module, new_texts(2, 60))


@pytest.mark.parametrize("adapters", [Adapters(r=2), None], ids=["adapters", "whole"])
@pytest.mark.parametrize("method", [FedALA, FedAMP, FedDyn, FedKD, MOON, SCAFFOLD])
def test_what_a_method_keeps_of_a_network_in_half_precision_is_single(method: Any, adapters: Adapters | None) -> None:
    module = method(lambda classes: still_transformer(classes).to(torch.bfloat16), CLASSES, adapters=adapters)
    module.configure_model()
    kept = {name: buffer.dtype for name, buffer in module.named_buffers() if not name.startswith(("backbone.", "shared."))}
    assert {dtype for dtype in kept.values() if dtype.is_floating_point} == {torch.float32}


def test_a_layer_of_which_a_part_learns_is_in_single_as_a_whole() -> None:
    """A frozen weight in half precision could not be added to its bias."""

    def biases(num_classes: int) -> TransformerClassifier:
        network = still_transformer(num_classes).to(torch.bfloat16)
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(name.endswith("query.bias"))
        return network

    federation = new_federation(1)
    federation.fit(FedAvg(biases, CLASSES), new_texts(2, 60))
    state = federation.run.server_module().state_dict()
    assert state[f"backbone.{LAYER}.query.weight"].dtype == torch.float32
    assert state[f"backbone.{LAYER}.key.weight"].dtype == torch.bfloat16


class Quantised(nn.Parameter):
    """Integers with a scale, which a copy as an ordinary parameter would lack."""

    scale: torch.Tensor

    def __new__(cls, weight: torch.Tensor) -> "Quantised":
        scale = weight.abs().max() / 127
        integers = torch.Tensor._make_subclass(cls, (weight / scale).round().to(torch.int8), False)
        integers.scale = scale
        return integers


class QuantisedLinear(nn.Linear):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features)
        self.load_state_dict(layer.state_dict())
        self.weight = Quantised(layer.weight.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight * self.weight.scale, self.bias)


def quantised() -> TransformerClassifier:
    network = still_transformer(CLASSES)
    for path in (f"{LAYER}.query", f"{LAYER}.value"):
        network.set_submodule(path, QuantisedLinear(network.get_submodule(path)))  # type: ignore[arg-type]
    return network


@pytest.mark.parametrize("name", ["HOMLoRA", "HETLoRA"])
def test_a_quantised_network_is_trained_as_it_is(name: str) -> None:
    network, federation = quantised(), new_federation(1)
    federation.fit(new_method(name, backbone=network), new_texts(2, 60))
    layer = adapted_layers(federation.run.client_module(0))[f"backbone.{LAYER}.query"].get_base_layer()
    assert layer.weight is network.get_parameter(f"{LAYER}.query.weight")


@pytest.mark.parametrize("name", ["FedExLoRA", "FLoRA", "FlexLoRA", "SLoRA"])
def test_a_quantised_weight_is_not_changed(name: str) -> None:
    with pytest.raises(FederationError, match=rf"query is quantised, and {name} changes its weight: load the network without"):
        new_method(name, backbone=quantised, target_modules=["query"]).configure_model()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true"])
@pytest.mark.parametrize("saved", ["word_embeddings", "intermediate.dense"])
def test_frozen_layers_in_half_precision_get_what_layers_before_them_learn(saved: str, precision: Any) -> None:
    def half(num_classes: int) -> TransformerClassifier:
        return still_transformer(num_classes).to(torch.bfloat16)

    found = []
    for modules in ([saved], None):
        module = FedAvg(half, CLASSES, momentum, adapters=Adapters(r=2, modules_to_save=modules))
        spec = WorkerSpec(module, data := new_texts(1, 8), partial(new_trainer, precision=precision), 0)
        data.setup()
        spec.build()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            loss = module.client_loss(next(iter(data.client(0).test_dataloader())))
        loss.backward()
        found.append(loss)
        if modules:
            learned = next(p for name, p in module.named_parameters() if f"{saved}.weight" in name)
            assert learned.dtype == (torch.float64 if precision == "64-true" else torch.float32)
            assert learned.grad is not None
            assert learned.grad.any()
    assert found[0].item() == pytest.approx(found[1].item(), abs=1e-2)


@pytest.mark.parametrize(
    ("backbone", "options", "said"),
    [
        (Net, {"target_modules": ["fc9"]}, r"target_modules \['fc9'\] of Net: .*Name layers .*: fc1, fc2\."),
        (Net, {}, r"target_modules None of Net: .*Name layers .*: fc1, fc2\."),
        (Net, {"r": 10**6, "target_modules": ["fc1"]}, "Adapters of rank 1000000 .* the layer fc1 of Net is 5 x 48: give up to 5"),
        (
            Net,
            {"target_modules": ["fc1"], "modules_to_save": ["fc7"]},
            "modules_to_save names 'fc7', but Net has no such layer: .*fc1",
        ),
        (Net, {"target_modules": "fc(1"}, r"target_modules fc\(1 of Net: missing \), .*Name layers"),
        (
            Net,
            {"target_modules": "fc1", "layers_to_transform": 0},
            r"target_modules fc1 of Net: `layers_to_transform` cannot be used",
        ),
        (Text, {"target_modules": ["out_proj"]}, r"No adapter can be put on .*self_attn\.out_proj of .*linear1, linear2\."),
        (Text, {"target_modules": ["self_attn"]}, r"No adapter can be put on .*self_attn of .*linear1, linear2\."),
    ],
    ids=["target", "none", "rank", "saved", "pattern", "blocks", "projection", "attention"],
)
def test_what_cannot_be_is_said_in_a_line(backbone: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(FederationError, match=said) as error:
        FedAvg(backbone, CLASSES, adapters=Adapters(**options)).configure_model()
    assert "\n" not in str(error.value)


class Blocks(nn.Module):
    """Of a user: blocks whose layers have the name of the head."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"fc": nn.Linear(PIXELS, PIXELS)}) for _ in range(2))
        self.fc = nn.Linear(PIXELS, num_classes)


@pytest.mark.parametrize("targets", [["fc"], "all-linear"], ids=str)
@pytest.mark.parametrize(("blocks", "adapted"), [(None, [0, 1]), (1, [1]), ([0], [0])])
def test_only_layers_of_these_blocks_are_adapted_and_not_the_head(targets: Any, blocks: Any, adapted: list[int]) -> None:
    module = FedAvg(Blocks, CLASSES, adapters=Adapters(2, target_modules=targets, layers_to_transform=blocks))
    module.configure_model()
    assert list(adapted_layers(module)) == [f"backbone.network.blocks.{block}.fc" for block in adapted]


def test_an_adapter_that_peft_would_take_for_the_head_is_not_written(tmp_path: Path) -> None:
    module = FedAvg(Blocks, CLASSES, adapters=Adapters(2, target_modules=["fc"]))
    module.configure_model()
    with pytest.raises(
        FederationError, match=r"^blocks\.0\.fc has an adapter, but .* saves fc whole would .*export with merged\.$"
    ):
        save_adapter(tmp_path, module.backbone, module.without_adapters())
    assert not [*tmp_path.iterdir()]


def test_of_a_container_the_layers_are_saved() -> None:
    assert modules_of({"blocks.0.fc.weight", "blocks.0.fc.bias"}, Blocks(CLASSES)) == ["blocks.0.fc"]


class Tied(Net):
    """Two layers with the same weights."""

    def __init__(self, num_classes: int = CLASSES) -> None:
        super().__init__(num_classes, hidden=6)
        self.other = nn.Linear(6, 6)
        self.other.weight = self.fc2.weight


def test_weights_that_belong_to_another_layer_too_cannot_learn() -> None:
    with pytest.raises(FederationError, match=r"modules_to_save has other, which shares weights with fc2 of Tied, so that"):
        FedAvg(Tied, CLASSES, adapters=Adapters(2, target_modules=["fc1"], modules_to_save=["other"])).configure_model()


@pytest.mark.parametrize("targets", ["all-linear", ["conv1", "fc1"]], ids=str)
def test_convolutions_and_all_linear_layers(targets: Any) -> None:
    module = FedAvg(CNN1, 10, adapters=Adapters(r=2, target_modules=targets))
    module.configure_model()
    x = torch.randn(2, 3, 32, 32)
    clean = module.networks.frozen[0].load(10)
    assert torch.equal(module(x), clean(x))  # B is zero
    assert not any(name.startswith("backbone.head.") and ".lora_" in name for name in module.state_dict())


class Encoder(nn.Module):
    """Of a user: an encoder that PyTorch evaluates on nested tensors where texts are padded."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(9, 8)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2)
        self.head = nn.Linear(8, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.tokens(x), src_key_padding_mask=x == 0)[:, 0])


@pytest.mark.parametrize("network", [Text, Encoder])
def test_encoder_layers_evaluate_with_the_adapters_that_they_train(network: Any) -> None:
    """PyTorch's fused kernel for eval mode reads the weights of linear layers and does not call them."""
    module = FedAvg(network, CLASSES, adapters=Adapters(r=2, target_modules="all-linear"))
    module.configure_model()
    factors = [module.backbone.get_parameter(name) for name in sorted(adapter_names(module.backbone, "B"))]
    assert len(factors) == 2 * len([name for name, _ in module.named_modules() if name.endswith("self_attn")])
    for factor in factors:
        nn.init.normal_(factor)
    x = torch.tensor([[3, 1, 4, 0], [1, 5, 0, 0]])
    trained = module.train()(x)
    with torch.inference_mode():
        torch.testing.assert_close(module.eval()(x), trained)
    clean = module.networks.frozen[0].load(CLASSES)
    assert not torch.allclose(clean(x), trained, atol=0.01)


@pytest.mark.often(1)
@pytest.mark.parametrize("name", ["Standalone", "LGFedAvg", "FedKD"])
def test_clients_may_have_ranks_of_their_own(name: str, two_workers: Processes) -> None:
    """In turn; of networks that everybody has in common, all have the first. Workers make no difference."""
    ends = []
    for engine in (InProcess(), two_workers):
        federation = new_federation(1, engine=engine)
        federation.fit(new_method(name, backbone=NoisyNet, adapters=OF_TWO_RANKS), new_data(3))
        modules = [federation.client_module(client) for client in range(3)]
        ends.append([module.state_dict() for module in modules])
        for module, rank in zip(modules, [1, 3, 1], strict=True):
            assert {module.get_parameter(f"backbone.{path}").shape[0] for path in adapter_names(module.backbone, "A")} == {rank}
        if name == "FedKD":
            assert {module.get_parameter(f"shared.{path}").shape[0] for path in adapter_names(modules[1].shared, "A")} == {1}
        weights = [module.get_parameter("backbone.fc1.base_layer.weight") for module in modules]
        assert len({weight.data_ptr() for weight in weights}) == 1
    assert all(same(one, other) for one, other in zip(*ends, strict=True))


@pytest.mark.parametrize(("name", "ranks"), [("FedAvg", [1, 3]), ("FedPer", [2, 4]), ("Standalone", [])])
def test_adapters_that_are_averaged_have_one_rank(name: str, ranks: list[int]) -> None:
    with pytest.raises(FederationError, match=r"adapters have r=\[.*\], but .* averages them: give one rank, or use .*FlexLoRA"):
        new_method(name, adapters=Adapters(r=ranks, target_modules=["fc1"]))
