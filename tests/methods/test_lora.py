"""What the LoRA methods share, HOMLoRA and CentralizedLoRA."""

import copy
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny import (
    CLASSES,
    Recording,
    new_data,
    new_federation,
    new_method,
    new_texts,
    private_states,
    same,
    tiny_transformer,
    tiny_vit,
)
from tiny_adapters import A, B, adam, assert_close, double, fit
from tiny_adapters import network as still
from tiny_loops import step
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import RobertaConfig, RobertaModel

from lightning_fed.core.phased_module import MOMENTS
from lightning_fed.data import InMemory, Partitioner
from lightning_fed.data.partition.pools import Indices
from lightning_fed.errors import FederationError
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import CentralizedLoRA, HOMLoRA
from lightning_fed.methods.families.lora import LoRAModule
from lightning_fed.models.adapters import COMMON
from lightning_fed.models.pretrained import classifier_from
from lightning_fed.models.transformer import TransformerClassifier
from lightning_fed.tensors import State

tiny_config: dict[str, Any] = tiny_transformer.keywords["config"]


@dataclass(frozen=True)
class Chunks(Partitioner):
    """Client k holds the k-th stretch of the examples."""

    def split(self, members: list[Indices], num_clients: int, rng: np.random.Generator) -> list[Indices]:
        return np.array_split(np.sort(np.concatenate(members)), num_clients)


def unique_texts(size: int) -> tuple[dict[str, Tensor], Tensor]:
    """Texts of which no two are equal; the second token says the class."""
    number = torch.arange(size)
    labels = number % CLASSES
    ids = torch.stack([0 * number, labels + 3, 10 + number % 20, 10 + number // 20], dim=1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, labels


def official(copies: int, num_clients: int, size: int = 40) -> InMemory:
    """Every text as often as said, in one batch, and an official test set."""
    texts, labels = unique_texts(size)
    many = {name: tensor.repeat(copies, 1) for name, tensor in texts.items()}, labels.repeat(copies)
    options: dict[str, Any] = {"partition": Chunks(), "split": "official", "val_share": 0.0, "batch_size": 1000}
    return InMemory(*many, CLASSES, texts, labels, num_clients=num_clients, **options)


class Noting(HOMLoRA):
    """Keeps the batches that it steps on."""

    seen: list[Any]

    def client_step(self, batch: Any) -> Tensor:
        self.seen.append(batch)
        return super().client_step(batch)


class NotingCentralized(CentralizedLoRA, Noting):
    pass


def noting(method: type[Noting] = Noting, **options: Any) -> Any:
    module = method(**{"backbone": still, "num_classes": CLASSES, "r": 3, "optimizer": adam, "steps": 3} | options)
    module.seen = []
    return module


# ---------------------------------------------------------------------------------------------------------------- HOMLoRA


def test_clients_with_the_same_data_are_as_one() -> None:
    options: dict[str, Any] = {"num_classes": CLASSES, "r": 3, "optimizer": adam, "steps": 3}
    many = fit(HOMLoRA(still, **options), official(3, 3), trainer=double)
    one = fit(HOMLoRA(still, **options), official(1, 1), trainer=double)
    assert [client.num_train for client in many.run.clients] == [40, 40, 40]
    assert_close(many.run.server.state_dict(), one.run.server.state_dict(), atol=1e-9)
    other = fit(HOMLoRA(still, **options), official(3, 3), rounds=1, trainer=double)
    for name, tensor in one.run.server.state_dict().items():
        assert not torch.allclose(other.run.server.state_dict()[name], tensor, rtol=0, atol=1e-4)


def loop(module: LoRAModule, batches: list[Any], restart: int | None = None) -> State:
    """Bare PyTorch: AdamW on the adapter and the head; anew after so many steps."""
    network = copy.deepcopy(module.backbone).train()
    parameters = [p for p in network.parameters() if p.requires_grad]
    optimizer = adam(parameters)
    for taken, (inputs, labels) in enumerate(batches):
        if taken == restart:
            optimizer = adam(parameters)
        step(optimizer, cross_entropy(network(inputs), labels))
    return {f"backbone.{name}": p.detach() for name, p in network.named_parameters() if p.requires_grad}


def test_moments_go_on_in_the_next_round() -> None:
    """Two rounds of three steps are six steps of plain AdamW on the same batches."""
    method = noting()
    federation = fit(method, new_texts(1, 60))
    start = federation.run.model  # the server's copy is copied, never trained
    assert len(method.seen) == 6
    assert_close(federation.run.server.state_dict(), loop(start, method.seen), atol=1e-6)
    forgetful = loop(start, method.seen, restart=3)
    assert any((forgetful[name] - tensor).abs().max() > 1e-3 for name, tensor in federation.run.server.state_dict().items())


def test_two_rounds_are_one_of_twice_as_many_steps() -> None:
    one, two = (fit(noting(steps=6 // rounds), official(1, 1), rounds=rounds, trainer=double) for rounds in (1, 2))
    assert_close(two.run.server.state_dict(), one.run.server.state_dict(), atol=1e-9)


@cache
def recorded() -> tuple[Federation, Recording, State]:
    """Two rounds of five clients, and the template as it was before."""
    engine, method = Recording(), new_method("HOMLoRA", backbone=still, r=3)
    federation = new_federation(2, engine=engine, evaluate_every=0)
    data = new_texts(5, 200)
    data.setup()
    torch.manual_seed(0)
    method.configure_model()
    before = {name: tensor.clone() for name, tensor in method.state_dict().items()}
    federation.fit(method, data)
    return federation, engine, before


def payloads() -> list[State]:
    _, engine, _ = recorded()
    return [turn.broadcast.state for turn in engine.turns] + [update.state for update in engine.updates]


def test_moments_are_private() -> None:
    federation, _, _ = recorded()
    kept = private_states(federation)
    shared = federation.run.server.state_dict().keys()
    assert kept.keys() == {0, 1, 2, 3, 4}
    for client, state in kept.items():
        assert state.keys() == {f"{MOMENTS}local/{name}/{key}" for name in shared for key in ("step", "exp_avg", "exp_avg_sq")}
        for name in shared:
            assert state[f"{MOMENTS}local/{name}/step"] == 2 * 2
            mine = state[f"{MOMENTS}local/{name}/exp_avg"]
            assert mine.any()
            assert not any(torch.equal(mine, kept[other][f"{MOMENTS}local/{name}/exp_avg"]) for other in range(client))


def test_moments_are_never_sent() -> None:
    federation, engine, _ = recorded()
    expected = {name for name in federation.run.model.state_dict() if ".lora_" in name or ".classifier." in name}
    for turn, update in zip(engine.turns, engine.updates, strict=True):
        assert turn.broadcast.state.keys() == expected
        assert update.state.keys() == (expected if turn.verb == "fit" else set())
    assert federation.run.server.state_dict().keys() == expected
    adapter, head = 2 * 3 * (8 + 8), (8 * 8 + 8) + (8 * CLASSES + CLASSES)
    for way in ("down", "up"):
        assert federation.run.history[0][f"traffic/{way}_parameters"] == 5 * (adapter + head)


def test_all_start_from_the_same_adapter() -> None:
    _, engine, before = recorded()
    first = [turn.broadcast.state for turn, _ in engine.fits(1)]
    assert len(first) == 5
    for state in first:
        for name, tensor in state.items():
            assert torch.equal(tensor, before[name])
            assert tensor.any() == (".lora_B." not in name and not name.endswith("bias"))


def test_factors_are_averaged_one_by_one_with_equal_weights() -> None:
    federation, engine, _ = recorded()
    updates = [update for _, update in engine.fits(2)]
    assert len({update.num_examples for update in updates}) > 1
    for name, tensor in federation.run.server.state_dict().items():
        torch.testing.assert_close(tensor, torch.stack([update.state[name] for update in updates]).mean(dim=0))
    product = torch.stack([update.state[B] @ update.state[A] for update in updates]).mean(dim=0)
    assert not torch.allclose(federation.run.server.state_dict()[B] @ federation.run.server.state_dict()[A], product, rtol=1e-3)


def test_the_backbone_is_frozen_and_in_memory_once() -> None:
    federation, engine, before = recorded()
    frozen = {name for name in before if ".lora_" not in name and ".classifier." not in name}
    assert len(frozen) > 10
    modules = [federation.client_module(client) for client in range(5)] + list(engine.worker._modules.values())
    assert len(modules) == 6
    own = federation.run.model.state_dict()
    for module in modules:
        state = module.state_dict()
        assert state.keys() == own.keys()
        for name, tensor in state.items():
            assert (tensor.data_ptr() == own[name].data_ptr()) == (name in frozen)
    assert same({name: own[name] for name in frozen}, {name: before[name] for name in frozen})
    assert not any(frozen & payload.keys() for payload in payloads())


def test_the_model_of_a_client_acts_as_merged_weights() -> None:
    federation, _, _ = recorded()
    module = federation.client_module(0).eval()
    inputs, _ = new_texts(1, 40).client(0).data[torch.arange(20)]
    state = module.state_dict()
    network = still(CLASSES).eval()
    merged = {}
    for name in network.state_dict():
        adapted = name.replace("query.weight", "query.base_layer.weight").replace("value.weight", "value.base_layer.weight")
        adapted = adapted.replace("query.bias", "query.base_layer.bias").replace("value.bias", "value.base_layer.bias")
        merged[name] = state[f"backbone.{adapted}"].clone()
        if name.endswith(("query.weight", "value.weight")):
            prefix = f"backbone.{name.removesuffix('.weight')}"
            merged[name] += state[f"{prefix}.lora_B.{COMMON}.weight"] @ state[f"{prefix}.lora_A.{COMMON}.weight"]
    network.load_state_dict(merged)
    with torch.no_grad():
        torch.testing.assert_close(module(inputs), network(inputs), rtol=0, atol=1e-5)


# -------------------------------------------------------------------------------------------------------- CentralizedLoRA


def test_central_training_is_homlora_with_one_client_that_has_all_data() -> None:
    options: dict[str, Any] = {"num_classes": CLASSES, "r": 3, "optimizer": adam, "steps": 3}
    central = fit(CentralizedLoRA(still, **options), official(1, 4), trainer=double)
    single = fit(HOMLoRA(still, **options), official(1, 1), trainer=double)
    several = fit(HOMLoRA(still, **options), official(1, 4), trainer=double)
    assert_close(central.run.server.state_dict(), single.run.server.state_dict(), atol=1e-9)
    for name, tensor in central.run.server.state_dict().items():
        assert not torch.allclose(several.run.server.state_dict()[name], tensor, rtol=0, atol=1e-4)
    for row in central.run.history:
        assert {value for column, value in row.items() if column.startswith("traffic/")} == {0}
    assert {"after/test_accuracy/mean", "global/test_accuracy"} <= central.run.history[-1].keys()
    assert central.run.results.keys() == {0, 1, 2, 3}
    assert single.run.history[0]["traffic/up_parameters"] > 0


def test_nobodys_test_data_are_trained_on() -> None:
    """In enough steps that everything else is."""
    texts, labels = unique_texts(120)
    data = InMemory(texts, labels, CLASSES, num_clients=3, partition=Chunks(), batch_size=16, test_share=0.3)
    method = noting(NotingCentralized, steps=7)
    federation = fit(method, data, rounds=1)
    splits = [federation.run.data.client(client).splits for client in range(3)]
    train, val, test = ({tuple(row) for parts in splits for row in texts["input_ids"][parts[which]].tolist()} for which in range(3))
    assert len(train) + len(val) + len(test) == 120
    assert len(test) >= 30
    seen = {tuple(row[:4]) for inputs, _ in method.seen for row in inputs["input_ids"].tolist()}
    assert seen == train


# ---------------------------------------------------------------------------------------------------------------- options


def built(**options: Any) -> LoRAModule:
    module = HOMLoRA(**{"backbone": still, "num_classes": CLASSES, "r": 3} | options)
    module.configure_model()
    return module


@pytest.mark.parametrize(("lora_alpha", "scaling"), [(None, 1.0), (3.0, 1.0), (12.0, 4.0), (1.0, 1 / 3)])
def test_the_adapter_is_scaled(lora_alpha: float | None, scaling: float) -> None:
    module = built(lora_alpha=lora_alpha).eval()
    layer = module.backbone.network.roberta.encoder.layer[0].attention.self.query
    a, b = layer.lora_A[COMMON].weight, layer.lora_B[COMMON].weight
    torch.nn.init.normal_(b)
    x = torch.randn(5, 8)
    torch.testing.assert_close(layer(x), layer.base_layer(x) + scaling * (x @ a.T @ b.T))
    assert (a.shape, b.shape) == ((3, 8), (8, 3))


@pytest.mark.parametrize(
    ("target_modules", "layers"),
    [
        (None, {"attention.self.query", "attention.self.value"}),
        (["key"], {"attention.self.key"}),
        (["query", "intermediate.dense"], {"attention.self.query", "intermediate.dense"}),
        (r".*self\.(key|value)", {"attention.self.key", "attention.self.value"}),
    ],
)
def test_the_layers_named_are_adapted(target_modules: Any, layers: set[str]) -> None:
    prefix = "backbone.network.roberta.encoder.layer.0."
    expected = {f"{prefix}{layer}.lora_{factor}.{COMMON}.weight" for layer in layers for factor in "AB"}
    module = built(target_modules=target_modules)
    assert module.adapter(COMMON).keys() == expected
    assert {name for name in module.shared_names() if "lora" in name} == expected
    assert {name for name, p in module.named_parameters() if p.requires_grad} == module.shared_names()


@pytest.mark.parametrize("train_head", [True, False])
def test_a_name_that_the_head_has_too_means_the_body(train_head: bool) -> None:
    """RoBERTa's head has a layer "dense", as its body has: the head is trained as a whole or not at all."""
    module = built(target_modules=["query", "dense"], train_head=train_head)
    assert {name for name in module.adapter(COMMON) if ".roberta." not in name} == set()
    layers = ("dense.weight", "dense.bias", "out_proj.weight", "out_proj.bias") if train_head else ()
    expected = {f"backbone.network.classifier.{layer}" for layer in layers}
    assert {name for name in module.shared_names() if ".classifier." in name} == expected
    assert {name for name, p in module.named_parameters() if p.requires_grad and ".classifier." in name} == expected


def test_layers_that_do_not_exist_are_an_error() -> None:
    with pytest.raises((FederationError, ValueError), match="nothing"):
        built(target_modules=["nothing"])


def test_a_head_that_is_not_trained_stays_as_it_was_drawn() -> None:
    engine = Recording()
    method = noting(train_head=False)
    method.configure_model()
    drawn = {name: tensor.clone() for name, tensor in method.state_dict().items() if ".classifier." in name}
    federation = fit(method, new_texts(3, 120), engine=engine)
    heads = drawn.keys()
    assert len(heads) == 4
    assert len(federation.run.server.state_dict()) == 4
    assert not any(heads & {*turn.broadcast.state, *u.state} for turn, u in zip(engine.turns, engine.updates, strict=True))
    for client in range(3):
        state = federation.client_module(client).state_dict()
        assert same({name: state[name] for name in heads}, drawn)
    modules = engine.worker._modules.values()
    assert all(same({name: module.state_dict()[name] for name in heads}, drawn) for module in modules)
    trained = federation.client_module(0).state_dict()
    assert all(trained[name].any() for name in trained if ".lora_B." in name)


# ------------------------------------------------------------------------------------------------------- where it comes from


def test_a_pretrained_network_is_loaded_from_a_folder(tmp_path: Path) -> None:
    settings = {key: value for key, value in tiny_config.items() if key != "model_type"}
    body = RobertaModel(RobertaConfig(**settings), add_pooling_layer=False)
    body.save_pretrained(tmp_path / "model")
    method = noting(backbone=partial(TransformerClassifier, name=str(tmp_path / "model")))
    federation = fit(method, new_texts(2, 60), rounds=1)
    module = federation.client_module(0)
    assert module.backbone.training
    assert module.backbone.network.classifier.out_proj.weight.shape == (CLASSES, 8)
    state, found = module.state_dict(), 0
    for name, tensor in body.state_dict().items():
        for layer in ("query", "value"):
            name = name.replace(f"{layer}.", f"{layer}.base_layer.")
        assert torch.equal(state[f"backbone.network.roberta.{name}"], tensor)
        found += 1
    assert found == len(body.state_dict()) > 15


def test_a_network_that_does_not_exist_is_named(tmp_path: Path) -> None:
    for name in ("./no/such/folder", str(tmp_path / "empty")):
        with pytest.raises(FederationError, match=f"No model '{name}' could be loaded: give a local folder or a name"):
            TransformerClassifier(CLASSES, name=name)


def test_a_folder_in_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_transformer(CLASSES).network.save_pretrained(str(tmp_path / "model"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert TransformerClassifier(CLASSES, "~/model").drawn == frozenset()


def test_an_adapter_beside_a_missing_model_is_looked_for_in_the_cache_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transformers library would ask the hub for it six times, waiting longer and longer."""
    asked: list[Any] = []
    find = "transformers.models.auto.auto_factory.find_adapter_config_file"
    monkeypatch.setattr(find, lambda name, **options: asked.append(options.get("local_files_only")))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FederationError, match=r"No model 'data/missing' could be loaded: .* is not in the local cache"):
        TransformerClassifier(CLASSES, "data/missing")
    assert asked == [True]


def test_a_revision_on_the_hub_is_asked_for_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    def found(name: str, local_files_only: bool, revision: str | None = None) -> Any:
        asked.append((name, revision))
        return SimpleNamespace(model_type="bert")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", found)
    monkeypatch.setattr("lightning_fed.models.pretrained.TransformerClassifier", lambda classes, name: name)
    assert classifier_from("owner/name@v2", CLASSES) == "owner/name@v2"
    assert asked == [("owner/name", "v2")]


@pytest.mark.parametrize("options", [{}, {"name": "roberta-base", "config": tiny_config}])
def test_a_network_needs_a_name_or_a_config(options: dict[str, Any]) -> None:
    with pytest.raises(FederationError, match=r"TransformerClassifier got name=.* and config=.*: give exactly one"):
        TransformerClassifier(CLASSES, **options)


@pytest.mark.parametrize("name", ["HOMLoRA", "RoLoRA", "PF2LoRA"])
def test_embeddings_are_adapted(name: str) -> None:
    """The adapter of an embedding is shared or private as any other, and its rank is evaluated."""
    federation = new_federation(2)
    federation.fit(new_method(name, target_modules=["word_embeddings", "query"]), new_texts(2, 40))
    sent = {name for name in federation.run.server.state if "word_embeddings.lora_embedding" in name}
    assert {name.partition("lora_embedding_")[2] for name in sent} == {f"{factor}.{COMMON}" for factor in "AB"}
    module = federation.client_module(0)
    assert isinstance(module, LoRAModule)
    assert any("word_embeddings" in layer for layer in module.adapter_ranks())
    kept = {name.partition("lora_embedding_")[2] for name in private_states(federation)[0] if not name.startswith(MOMENTS)}
    assert kept - {""} == ({"A.client", "B.client"} if name == "PF2LoRA" else set())


def test_convolutions_are_adapted() -> None:
    federation = new_federation(1)
    federation.fit(new_method("HOMLoRA", backbone=tiny_vit, target_modules=["projection", "q_proj"]), new_data(2, 40))
    assert [tensor.any() for name, tensor in federation.run.server.state.items() if "projection.lora_B" in name] == [True]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("FFALoRA", "is an embedding, whose A is zero"),
        ("FedSALoRA", "is an embedding, whose A is zero at first, and FedSALoRA averages A alone"),
        ("HETLoRA", "is a Embedding, but HETLoRA adapts linear layers"),
    ],
)
def test_methods_that_cannot_adapt_embeddings_say_so(name: str, why: str) -> None:
    with pytest.raises(FederationError, match=why):
        new_federation(1).fit(new_method(name, target_modules=["word_embeddings"]), new_texts(2, 40))
