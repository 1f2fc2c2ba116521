"""FedEx-LoRA, FLoRA and FlexLoRA: what their servers merge is what the clients' adapters add, exactly."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from tiny import CLASSES, Recording, infos, new_federation, new_texts, private_states, same
from tiny_adapters import HEAD, LAYER, LAYERS, WIDTH, A, B, fit, method_of, network, of_factor, of_size
from tiny_texts import TINY_GPT2
from torch import Tensor

from lightning_fed.core import Broadcast, ClientInfo, ClientUpdate, FederatedModule, FederationError, ServerSGD, State
from lightning_fed.data import InMemory
from lightning_fed.methods import FedExLoRA, FedHMLoRA, FedSALoRA, FFALoRA, FlexLoRA, FLoRA, HOMLoRA, RoLoRA, SLoRA
from lightning_fed.methods.families.exact_lora import LEFT, RIGHT, WHOLE, ExactLoRA, ExactServer
from lightning_fed.models import TransformerLM
from lightning_fed.models.adapters import COMMON
from lightning_fed.models.transformer import TransformerClassifier

METHODS = [FedExLoRA, FLoRA, FlexLoRA]


def built(method: type[ExactLoRA], double: bool = False, **options: Any) -> ExactLoRA:
    module: ExactLoRA = method_of(method, **options)
    module.configure_model()
    return module.double() if double else module


def server_of(module: ExactLoRA, counts: list[int]) -> ExactServer:
    server = module.configure_server(infos(*counts))
    assert isinstance(server, ExactServer)
    return server


def updates_of(server: ExactServer, counts: list[int], seed: int = 0) -> list[ClientUpdate]:
    """Random numbers from everybody, later ones larger."""
    torch.manual_seed(seed)
    updates = []
    for client in infos(*counts):
        like = server.expected_payload(ClientUpdate(client.id, 1, {}), Broadcast({}))
        state = {n: (1.0 + client.id) * torch.randn(t.shape, dtype=torch.float64).to(t.dtype) / 4 for n, t in like.items()}
        updates.append(ClientUpdate(client.id, client.num_train, state))
    return updates


def by_hand(updates: list[ClientUpdate], scalings: list[float], shares: list[float]) -> State:
    """What the adapters add, in float64: the sum of the products, by layer."""
    total = {}
    for layer in LAYERS:
        a, b = f"{layer}.lora_A.{COMMON}.weight", f"{layer}.lora_B.{COMMON}.weight"
        terms = [p * s * (u.state[b].double() @ u.state[a].double()) for u, s, p in zip(updates, scalings, shares, strict=True)]
        total[layer] = torch.stack(terms).sum(dim=0)
    return total


def acting(module: ExactLoRA, broadcast: Broadcast, **client: Any) -> State:
    """What a model adds to the pretrained matrices once it has loaded a broadcast, by layer."""
    taken = copy.deepcopy(module) if broadcast.model_size is None else of_client(module, broadcast, **client)
    taken.load_broadcast(broadcast)
    pretrained = taken.networks.frozen[0].load(CLASSES).state_dict()
    weights = taken.effective_weights().items()
    return {layer: weight - pretrained[f"{layer.removeprefix('backbone.')}.weight"] for layer, weight in weights}


def of_client(module: ExactLoRA, broadcast: Broadcast, id: int = 0) -> ExactLoRA:
    taken = module.for_client(ClientInfo(id, 1, 0, 0, (1,) * CLASSES, model_size=broadcast.model_size))
    return taken.double() if next(module.parameters()).dtype == torch.float64 else taken


def assert_adds(found: State, expected: State, atol: float) -> None:
    assert found.keys() == expected.keys()
    for layer, change in expected.items():
        torch.testing.assert_close(found[layer].double(), change.double(), rtol=0, atol=atol)


# ---------------------------------------------------------------------------------------------------------- one round


SETTINGS: list[tuple[dict[str, Any], list[float]]] = [
    ({"r": 2}, [1.0, 1.0, 1.0]),
    ({"r": 2, "lora_alpha": 5.0}, [2.5, 2.5, 2.5]),
    ({"ranks": [1, 2, 3], "lora_alpha": 6.0}, [2.0, 2.0, 2.0]),
    ({"ranks": [1, 2, 3], "lora_alpha": 6.0, "scale": "per_rank"}, [6.0, 3.0, 2.0]),
]
"""Options, and the scale of each of three clients."""


@pytest.mark.parametrize(("double", "atol"), [(True, 1e-12), (False, 3e-6)], ids=["float64", "float32"])
@pytest.mark.parametrize(("options", "scalings"), SETTINGS)
def test_all_have_one_effective_weight_after_a_round(
    options: dict[str, Any], scalings: list[float], double: bool, atol: float
) -> None:
    """The sum of the products, each with its client's share and scale, in the model that the server is measured with."""
    counts = [5, 2, 1]
    for method in METHODS:
        module = built(method, double, weighting="examples", **options)
        server = server_of(module, counts)
        updates = updates_of(server, counts)
        server.aggregate(iter(updates))
        expected = by_hand(updates, scalings, [count / 8 for count in counts])
        assert_adds(acting(module, server.global_models()["global"]), expected, atol)
        assert max(change.abs().max().item() for change in expected.values()) > 0.3


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
@pytest.mark.parametrize("method", METHODS)
def test_who_takes_part_alone_counts(method: type[ExactLoRA], weighting: str) -> None:
    """Two of five; of equal numbers for all, or by their examples."""
    counts = [5, 2, 1, 3, 4]
    module = built(method, double=True, r=2, weighting=weighting)
    server = server_of(module, counts)
    updates = [updates_of(server, counts)[k] for k in (1, 3)]
    server.aggregate(iter(updates))
    shares = [2 / 5, 3 / 5] if weighting == "examples" else [0.5, 0.5]
    assert_adds(acting(module, server.global_models()["global"]), by_hand(updates, [1.0] * 2, shares), 1e-12)
    before = server.state
    server.aggregate(iter([]))
    assert server.state is before


@pytest.mark.parametrize("method", METHODS)
def test_everything_else_is_averaged(method: type[ExactLoRA]) -> None:
    counts = [5, 2, 1]
    server = server_of(built(method, weighting="examples"), counts)
    updates = updates_of(server, counts)
    server.aggregate(iter(updates))
    heads = [name for name in updates[0].state if ".classifier." in name]
    assert len(heads) == 4
    for name in heads:
        mean = sum((c / 8 * u.state[name] for c, u in zip(counts, updates, strict=True)), torch.zeros(()))
        torch.testing.assert_close(server.state[name], mean)


# ------------------------------------------------------------------------------------------------------ several rounds


@pytest.mark.parametrize("method", [FedExLoRA, FLoRA])
def test_who_joins_late_lacks_nothing(method: type[ExactLoRA]) -> None:
    """The changes of all rounds are in a broadcast, as factors while these are fewer numbers than the matrix, then as that."""
    counts = [1, 1, 1]
    module = built(method, double=True, r=1)
    server, moved, kept = server_of(module, counts), dict.fromkeys(LAYERS, torch.zeros(())), []
    for round in range(6):
        updates = updates_of(server, counts, seed=round)[:2]  # the last one never takes part
        added = by_hand(updates, [1.0] * 2, [0.5] * 2)
        expected = {layer: moved[layer] + added[layer] for layer in LAYERS}
        server.aggregate(iter(updates))
        for client in infos(*counts):
            assert_adds(acting(module, server.broadcast(client), id=client.id), expected, 1e-12)
        moved = expected
        if method is FedExLoRA:  # a part of that is in the factors, which the next updates replace
            mean = {name: (updates[0].state[name] + updates[1].state[name]) / 2 for name in (updates[0].state)}
            held = by_hand([ClientUpdate(0, 1, mean)], [1.0], [1.0])
            moved = {layer: expected[layer] - held[layer] for layer in LAYERS}
        kept.append(sum(t.numel() for name, t in server.state.items() if name.startswith(f"{LAYER}.change")))
    ranks = [(1 if method is FedExLoRA else 2) * (round + 1) for round in range(6)]
    assert kept == [min(rank * 2 * WIDTH, WIDTH * WIDTH) for rank in ranks]
    assert f"{LAYER}.{WHOLE}" in server.state


@pytest.mark.parametrize("method", METHODS)
def test_what_travels(method: type[ExactLoRA]) -> None:
    """Of two matrices of 8 x 8 with adapters of rank 1, 16 numbers each, and a head."""
    federation = fit(method_of(method, r=1), new_texts(3, 120), rounds=3, participation=0.7)
    changes = {FedExLoRA: [0, 1, 2], FLoRA: [0, 2, 4], FlexLoRA: [0, 0, 0]}[method]
    adapter = 0 if method is FLoRA else 1
    for row, rank in zip(federation.run.history, changes, strict=True):
        change = min(rank * 2 * WIDTH, WIDTH * WIDTH)
        assert row["traffic/up_parameters"] == 2 * (2 * 2 * WIDTH + HEAD)
        assert row["traffic/down_parameters"] == 2 * (2 * (adapter * 2 * WIDTH + change) + HEAD)


@pytest.mark.parametrize(("method", "moments"), [(FedExLoRA, True), (FLoRA, False), (FlexLoRA, False)])
def test_moments_stay_where_the_factors_do(method: type[ExactLoRA], moments: bool) -> None:
    assert bool(private_states(fit(method_of(method)))) == moments


def test_ranks_are_the_clients_own() -> None:
    engine = Recording()
    fit(method_of(FlexLoRA, ranks=[1, 3]), new_texts(3, 120), engine=engine)
    for turn, update in engine.fits():
        rank = [1, 3, 1][turn.client.id]
        assert turn.broadcast.model_size == rank
        assert update.state[A].shape == (rank, WIDTH)
        assert update.state[B].shape == (WIDTH, rank)


def test_an_update_of_another_rank_is_refused() -> None:
    server = server_of(built(FedExLoRA, ranks=[1, 2]), [1, 1])
    [client, _] = infos(1, 1)
    [_, larger] = updates_of(server, [1, 1])
    with pytest.raises(FederationError, match=r"The update of client 0 has .* of shape \(2, 8\), expected \(1, 8\)"):
        server.check(ClientUpdate(0, 1, larger.state, {"flops": 0.0}), server.broadcast(client), client)


@pytest.mark.parametrize("given", [[], [2, 0]])
def test_ranks_that_there_are_not(given: list[int]) -> None:
    with pytest.raises(FederationError, match=r"ranks is .*: give at least one, and none below 1"):
        method_of(FlexLoRA, ranks=given)


# -------------------------------------------------------------------------------------------------------- the networks


def test_other_layers_than_linear_ones_are_refused() -> None:
    with pytest.raises(FederationError, match="word_embeddings is a Embedding, but FLoRA adapts linear layers"):
        built(FLoRA, target_modules=["word_embeddings"])


@pytest.mark.parametrize("method", [FLoRA, FlexLoRA, FedHMLoRA, SLoRA])
def test_an_optimizer_that_stays_is_refused(method: type[FederatedModule]) -> None:
    with pytest.raises(FederationError, match=f"{method.__name__} got persistent=True, but its optimizers are new in each round"):
        method("no/network", persistent=True)


def test_a_change_that_does_not_fit_is_refused() -> None:
    module = built(FLoRA)
    for payload in ({f"{LAYER}.{LEFT}": torch.zeros(8, 2), f"{LAYER}.{RIGHT}": torch.zeros(3, 8)}, {"else": torch.zeros(1)}):
        with pytest.raises(FederationError, match="What was sent to FLoRA"):
            module.load_payload(payload)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
def test_layers_that_are_stored_the_other_way_round_change_the_right_way() -> None:
    """GPT-2's, ``(in, out)``: one that is not square, with a change that is not symmetric."""
    backbone = partial(TransformerLM, config=TINY_GPT2, max_new_tokens=2)
    module = FedExLoRA(backbone, 1, r=2, target_modules=["c_attn"])
    module.configure_model()
    [(name, (rows, columns)), *_] = module.matrices.shapes.items()
    assert rows == 3 * columns
    left, right = torch.randn(rows, 1), torch.randn(1, columns)
    layer: Any = module.get_submodule(name)
    x = torch.randn(5, columns)
    before = layer(x)
    module.load_payload({f"{name}.{LEFT}": left, f"{name}.{RIGHT}": right})
    torch.testing.assert_close(layer(x), before + x @ (left @ right).T)
    module.load_payload({})
    assert torch.equal(layer(x), before)


def test_a_small_change_of_a_half_is_rounded_once() -> None:
    """Sums of changes are in float32; what a layer computes with has the weight's precision."""
    module = built(FLoRA, backbone=lambda classes: network(classes).bfloat16())
    layer: Any = module.get_submodule(LAYER)
    base = layer.get_base_layer()
    before = base.weight.clone()
    small = of_size([[float(before[0, 0].float().abs()) * 2**-10]], WIDTH, WIDTH)
    module.load_payload({f"{LAYER}.{WHOLE}": small})
    assert base.weight.dtype == torch.bfloat16
    assert torch.equal(base.weight, before)
    module.load_payload({f"{LAYER}.{WHOLE}": 8 * small})
    assert base.weight[0, 0] != before[0, 0]


# ------------------------------------------------------------------------------------------------------------- exports


def exported(method: type[Any], client: int | None, merged: bool = False) -> tuple[Any, Any, Any, InMemory]:
    """A run, what it exports from its files, and the network that it started from."""
    pretrained = method_of(HOMLoRA).networks.frozen[0].load(CLASSES)
    options: dict[str, Any] = {"backbone": lambda classes: copy.deepcopy(pretrained), "r": 1}
    data = new_texts(3, 120, test_share=0.3)
    federation = new_federation(2, "runs")
    federation.fit(method_of(method, **options), data)
    other, model = new_federation(2, "runs"), method_of(method, **options)
    other.export(model, data, "exported", client, merged=merged)
    return federation, other.run.server_module() if client is None else other.client_module(client), pretrained, data


def logits_of(loaded: Any, module: Any, federation: Any, client: int | None) -> None:
    """Are the same, and so is what was measured."""
    data = federation.run.data.client(client or 0)
    inputs, labels = data.data[data.splits[2]]
    with torch.no_grad():
        logits: Tensor = loaded.eval()(**inputs).logits
        torch.testing.assert_close(logits, module.eval()(inputs), rtol=0, atol=1e-5)
    if client is not None:
        accuracy = (logits.argmax(dim=1) == labels).float().mean().item()
        assert accuracy == pytest.approx(federation.run.results[client]["test/accuracy"])


@pytest.mark.often(2)
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize(("method", "client"), [(FedExLoRA, 1), (FLoRA, 1), (FLoRA, None), (FlexLoRA, None)])
def test_what_has_moved_the_network_is_exported_as_a_network(method: type[Any], client: int | None, merged: bool) -> None:
    federation, module, pretrained, data = exported(method, client, merged)
    assert not Path("exported/adapter_config.json").exists()
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained("exported")
    logits_of(loaded, module, federation, client)
    inputs = data.client(1).data[torch.arange(20)][0]
    assert not torch.allclose(loaded(**inputs).logits, pretrained.network(**inputs).logits, atol=1e-3)


@pytest.mark.often(1)
@pytest.mark.parametrize("method", [FFALoRA, FedSALoRA, RoLoRA, FlexLoRA])
def test_what_is_an_adapter_is_exported_as_one(method: type[Any]) -> None:
    federation, module, pretrained, _ = exported(method, 1)
    loaded = PeftModel.from_pretrained(copy.deepcopy(pretrained.network), "exported")
    logits_of(loaded, module, federation, 1)


def test_a_new_adapter_adds_nothing_to_the_network(tmp_path: Path) -> None:
    """After a merge FLoRA's clients compute what the merged network does, bit for bit."""
    federation = fit(method_of(FLoRA))
    module = federation.client_module(1).eval()
    module.export_merged(tmp_path / "merged")
    merged = TransformerClassifier(CLASSES, name=str(tmp_path / "merged")).eval()
    inputs = new_texts(1, 40).client(0).data[torch.arange(20)][0]
    assert of_factor(dict(module.state_dict()), "A")[A].any()
    assert torch.equal(module(inputs), merged(inputs))
    assert not same(dict(merged.state_dict()), dict(module.networks.frozen[0].load(CLASSES).state_dict()))


@pytest.mark.parametrize("method", METHODS)
def test_a_server_optimizer_is_refused(method: type[ExactLoRA]) -> None:
    """It would step the factors, and what was merged for others would stay."""
    module = method_of(method, server_optimizer=ServerSGD(0.5))
    module.configure_model()
    with pytest.raises(FederationError, match=f"{method.__name__} got server_optimizer=ServerSGD.*merges the products"):
        module.new_server(infos(1, 2))
