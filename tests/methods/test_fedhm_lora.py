"""FedHM on adapters: their sizes, what the server makes of them, and what it sends."""

import copy
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from often import mostly_slow
from peft import PeftModel
from tiny import CLASSES, Recording, new_data, new_federation, same, tiny_transformer, tiny_vit
from tiny_rounds import at_start, checked
from tiny_vits import vit_small
from torch import Tensor

from lightning_fed.__main__ import main
from lightning_fed.core.messages import ClientUpdate
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.errors import FederationError
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import FedHMLoRA
from lightning_fed.methods.fedhm_lora import FedHMLoRAServer
from lightning_fed.models import VisionTransformer
from lightning_fed.models.adapters import COMMON
from lightning_fed.tensors import State, count_floats

adam = partial(torch.optim.Adam, lr=0.02)
WIDTH = 8
BLOCKS = [f"backbone.network.vit.layers.{block}.attention" for block in range(2)]
QUERY, KEY, VALUE, OUTPUT = (f"{BLOCKS[0]}.{which}_proj" for which in "qkvo")
BIAS = "backbone.network.classifier.bias"


def a_of(layer: str) -> str:
    return f"{layer}.lora_A.{COMMON}.weight"


def b_of(layer: str) -> str:
    return f"{layer}.lora_B.{COMMON}.weight"


def method_of(**options: Any) -> FedHMLoRA:
    return FedHMLoRA(**{"backbone": tiny_vit, "num_classes": CLASSES, "optimizer": adam} | options)


def clients(number: int) -> list[ClientInfo]:
    """Whose amounts of data, which must not count, differ."""
    return [ClientInfo(k, 10 + 20 * k, 2, 2, (3,) * CLASSES) for k in range(number)]


def client_of(model_size: float | None, **options: Any) -> FedHMLoRA:
    return method_of(**options).for_client(ClientInfo(0, 10, 2, 2, (3,) * CLASSES, model_size))


def server_of(number: int, **options: Any) -> FedHMLoRAServer:
    """At the start of round 1."""
    return at_start(method_of(**options), clients(number))


def filled(state: State) -> State:
    return {name: torch.randn_like(tensor) for name, tensor in state.items()}


def updates_of(server: FedHMLoRAServer, cohort: Iterable[int] | None = None) -> list[ClientUpdate]:
    """An update of random numbers from every client, or from those in the cohort."""
    everybody = clients(len(server.model_size))
    participants = everybody if cohort is None else [everybody[k] for k in cohort]
    return [ClientUpdate(client.id, client.num_train, filled(server.broadcast(client).state)) for client in participants]


def change_of(payload: State, *layers: str) -> Tensor:
    """What a payload adds to layers that share an A, stacked, in float64."""
    return torch.cat([payload[b_of(layer)] for layer in layers]).double() @ payload[a_of(layers[0])].double()


def fused_changes(payload: State) -> State:
    return {
        f"{block}.{first}.change": change_of(payload, *(f"{block}.{which}" for which in layers))
        for block in BLOCKS
        for first, layers in (("q_proj", ("q_proj", "k_proj", "v_proj")), ("o_proj", ("o_proj",)))
    }


# ------------------------------------------------------------------------------------------------------------------ sizes


def on_meta(rank: int, targets: str) -> FedHMLoRA:
    with torch.device("meta"):
        return client_of(rank, backbone=vit_small, num_classes=10, targets=targets)


@pytest.mark.parametrize(
    ("targets", "rank", "size"),
    [
        ("fused_qkv", 2, 55_296),
        pytest.param("fused_qkv", 4, 110_592, marks=pytest.mark.slow),
        pytest.param("fused_qkv", 8, 221_184, marks=pytest.mark.slow),
        pytest.param("fused_qkv", 16, 442_368, marks=pytest.mark.slow),
        pytest.param("separate", 2, 73_728, marks=pytest.mark.slow),
        pytest.param("separate", 4, 147_456, marks=pytest.mark.slow),
        pytest.param("separate", 8, 294_912, marks=pytest.mark.slow),
        pytest.param("separate", 16, 589_824, marks=pytest.mark.slow),
    ],
)
def test_vit_small_has_the_papers_sizes(targets: str, rank: int, size: int) -> None:
    module = on_meta(rank, targets)
    travels = {name: tensor for name, tensor in module.state_dict().items() if name in module.shared_names()}
    head = {name: tensor for name, tensor in travels.items() if ".classifier." in name}
    assert count_floats(head) == 3_850
    assert count_floats(travels) == size + 3_850
    assert {name for name, p in module.named_parameters() if p.requires_grad} == travels.keys()
    assert sum(p.numel() for p in module.trainable()) == size + 3_850


@pytest.mark.parametrize(("targets", "per_rank"), [("fused_qkv", 2 * 6 * WIDTH), ("separate", 2 * 8 * WIDTH)])
def test_factors_of_the_clients_rank_and_the_head_travel(targets: str, per_rank: int) -> None:
    server = server_of(5, targets=targets, ranks=[2, 4, 8])
    head = WIDTH * CLASSES + CLASSES
    for client, rank in zip(clients(5), [2, 4, 8, 2, 4], strict=True):
        sent = server.broadcast(client)
        assert sent.model_size == rank
        assert count_floats(sent.state) == per_rank * rank + head
        module = client_of(rank, targets=targets)
        module.load_broadcast(sent)
        assert same(module.shared_state(), sent.state)


# ---------------------------------------------------------------------------------------------------------------- adapters


@pytest.mark.parametrize("targets", ["fused_qkv", "separate"])
def test_an_adapter_adds_its_product(targets: str) -> None:
    """Fused, query, key and value have the A of the query."""
    module = client_of(3, targets=targets).eval()
    state = filled(module.shared_state())
    module.load_shared_state(state)
    x = torch.randn(5, WIDTH)
    for layer in (QUERY, KEY, VALUE, OUTPUT):
        first = QUERY if targets == "fused_qkv" and layer != OUTPUT else layer
        expected = module.get_submodule(layer).base_layer(x) + x @ (state[b_of(layer)] @ state[a_of(first)]).T
        torch.testing.assert_close(module.get_submodule(layer)(x), expected)
    own_a = {name.split(".")[-4] for name in state if ".lora_A." in name}
    assert own_a == ({"q_proj", "o_proj"} if targets == "fused_qkv" else {"q_proj", "k_proj", "v_proj", "o_proj"})


def test_a_shared_factor_learns_from_all_of_its_layers() -> None:
    module = client_of(3)
    module.load_shared_state(filled(module.shared_state()))
    x, a = torch.randn(5, WIDTH), module.get_parameter(a_of(QUERY))
    layers = [module.get_submodule(layer) for layer in (QUERY, KEY, VALUE)]
    [together] = torch.autograd.grad(sum(layer(x).square().sum() for layer in layers), a)
    parts = [torch.autograd.grad(layer(x).square().sum(), a)[0] for layer in layers]
    assert all(part.any() for part in parts)
    torch.testing.assert_close(together, sum(parts))


@pytest.mark.parametrize("lora_alpha", [None, 32.0])
def test_the_global_model_is_the_network_with_the_changes_added(lora_alpha: float | None) -> None:
    """Whatever the rank, the scaling is lora_alpha over the largest rank."""
    server = server_of(4, lora_alpha=lora_alpha)
    server.aggregate(updates_of(server))
    pretrained = tiny_vit(CLASSES)
    module = client_of(None, backbone=lambda classes: copy.deepcopy(pretrained), lora_alpha=lora_alpha).eval()
    module.load_broadcast(server.global_models()["global"])
    merged = copy.deepcopy(pretrained)
    scaling = 1 if lora_alpha is None else 2
    with torch.no_grad():
        for number, layer in enumerate(merged.network.vit.layers):
            query, key, value = server.state[f"{BLOCKS[number]}.q_proj.change"].split(WIDTH)
            output = server.state[f"{BLOCKS[number]}.o_proj.change"]
            changes = {"q_proj": query, "k_proj": key, "v_proj": value, "o_proj": output}
            for name, change in changes.items():
                layer.attention.get_submodule(name).weight.add_(change, alpha=scaling)
        for name, parameter in merged.head.named_parameters():
            parameter.copy_(server.state[f"backbone.network.classifier.{name}"])
        images = torch.randn(6, 3, 4, 4)
        logits = module(images)
        torch.testing.assert_close(logits, merged.eval()(images), rtol=1e-5, atol=1e-5)
        assert not torch.allclose(logits, pretrained.eval()(images), atol=0.1)


# ------------------------------------------------------------------------------------------------------------ aggregation


def test_at_full_rank_with_equal_weights_the_changes_are_averaged_exactly() -> None:
    server = server_of(3, ranks=[WIDTH], weights="uniform")
    updates = updates_of(server)
    metrics = server.aggregate(updates)
    found = fused_changes(server.broadcast(clients(1)[0]).state)
    for name, change in found.items():
        mean = torch.stack([fused_changes(update.state)[name] for update in updates]).mean(dim=0)
        torch.testing.assert_close(server.state[name], mean.float(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(change, mean, rtol=1e-5, atol=1e-5)
    assert metrics == {"server/energy_rank_8": pytest.approx(1, abs=1e-6), "server/energy_tail": pytest.approx(0, abs=1e-6)}


def shares(cohort: list[int], **options: Any) -> list[float]:
    """What participants of rank 2, 4, 8 and 16 count: participant k alone says that the bias of class k is 1."""
    server = server_of(4, **options)
    updates = updates_of(server, cohort)
    for update in updates:
        update.state[BIAS] = torch.eye(CLASSES)[update.client]
    server.aggregate(updates)
    name = f"{OUTPUT}.change"
    found = server.state[BIAS].tolist()
    mean = sum(share * fused_changes(u.state)[name] for u, share in zip(updates, [found[k] for k in cohort], strict=True))
    torch.testing.assert_close(server.state[name], mean.float(), rtol=1e-5, atol=1e-5)  # the same weights
    return found


@pytest.mark.parametrize(
    ("options", "cohort", "expected"),
    [
        ({}, [0, 1, 2, 3], [0.167, 0.189, 0.243, 0.401]),  # FedHM's, of ratios 1/8, 1/4, 1/2, 1
        ({}, [0, 1], [0.469, 0.531, 0, 0]),
        ({"temperature": 0.25}, [0, 1, 2, 3], [0.025, 0.041, 0.111, 0.823]),
        ({"weights": "uniform"}, [0, 1, 2, 3], [0.25, 0.25, 0.25, 0.25]),
        ({"ranks": [4]}, [0, 1, 2, 3], [0.25, 0.25, 0.25, 0.25]),
    ],
)
def test_weights_grow_with_the_rank_and_not_with_the_data(options: Any, cohort: list[int], expected: list[float]) -> None:
    assert shares(cohort, **options) == pytest.approx(expected, abs=6e-4)


def test_an_update_of_another_rank_is_refused() -> None:
    server = server_of(2, ranks=[2, 4])
    before = dict(server.state)
    small, large = updates_of(server)
    with pytest.raises(FederationError, match=r"update of client 1 has .* of shape"):
        server.aggregate(checked(server, [small, ClientUpdate(1, 10, small.state)]))
    assert same(server.state, before)
    server.aggregate(checked(server, [small, large]))


# ------------------------------------------------------------------------------------------------------------- truncation


@pytest.mark.parametrize("targets", ["fused_qkv", "separate"])
def test_a_rank_gets_the_best_factors_of_its_rank(targets: str) -> None:
    server = server_of(4, targets=targets, ranks=[1, 2, 5, 8])
    metrics = server.aggregate(updates_of(server))
    groups = [[QUERY, KEY, VALUE], [OUTPUT]] if targets == "fused_qkv" else [[QUERY], [KEY], [VALUE], [OUTPUT]]
    for client, rank in zip(clients(4), [1, 2, 5, 8], strict=True):
        sent = server.broadcast(client).state
        for layers in groups:
            whole = server.state[f"{layers[0]}.change"].double()
            values = torch.linalg.svdvals(whole)
            tail = values[rank:].square().sum().sqrt()
            torch.testing.assert_close((whole - change_of(sent, *layers)).norm(), tail, rtol=1e-5, atol=1e-5)
            a, b = sent[a_of(layers[0])], torch.cat([sent[b_of(layer)] for layer in layers])
            torch.testing.assert_close(b.T @ b, values[:rank].diag().float(), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(a @ a.T, values[:rank].diag().float(), rtol=1e-5, atol=1e-5)
        spectra = [torch.linalg.svdvals(change.double()).square() for name, change in server.state.items() if "change" in name]
        energy = sum(values[:rank].sum() for values in spectra) / sum(values.sum() for values in spectra)
        assert metrics[f"server/energy_rank_{rank}"] == pytest.approx(energy.item(), abs=1e-6)
    assert metrics["server/energy_tail"] == 1 - metrics["server/energy_rank_8"]
    assert metrics["server/energy_rank_1"] < 0.9 < 1 - 1e-6 < metrics["server/energy_rank_8"]


def test_at_first_everybody_starts_as_lora_does_with_the_same_numbers() -> None:
    server = server_of(3, ranks=[2, 4, 16])
    sent = [server.broadcast(client).state for client in clients(3)]
    for layer in (QUERY, OUTPUT):
        whole = sent[2][a_of(layer)]
        assert whole.shape == (16, WIDTH)  # more than there can be: the rest stays as at first
        assert 0.1 < whole.std() < 0.4  # uniform in ±1/sqrt(8): 0.204
        for state, rank in zip(sent, [2, 4, 16], strict=True):
            assert torch.equal(state[a_of(layer)], whole[:rank])
    assert not torch.equal(sent[2][a_of(QUERY)], sent[2][a_of(OUTPUT)])
    assert not any(tensor.any() for state in sent for name, tensor in state.items() if ".lora_B." in name)
    assert server.aggregate([])["server/energy_rank_2"] == 1.0


def test_ranks_that_the_change_lacks_can_learn() -> None:
    """One side of them is random, the other zero: nothing is added, and the gradients of the zeros are not zero."""
    server = server_of(2, ranks=[1, 4])
    first = {name: tensor.clone() for name, tensor in server.broadcast(clients(2)[1]).state.items()}
    server.aggregate(updates_of(server, [0]))
    sent = server.broadcast(clients(2)[1]).state
    for layer in (QUERY, OUTPUT):
        assert torch.equal(sent[a_of(layer)][1:], first[a_of(layer)][1:])
        assert not torch.equal(sent[a_of(layer)][0], first[a_of(layer)][0])
        assert sent[b_of(layer)][:, 0].all()
        assert not sent[b_of(layer)][:, 1:].any()
    for name, change in fused_changes(sent).items():
        torch.testing.assert_close(change.float(), server.state[name], rtol=1e-5, atol=1e-5)
    module = client_of(4)
    module.load_broadcast(server.broadcast(clients(2)[1]))
    module.client_loss((torch.randn(6, 3, 4, 4), torch.arange(6) % CLASSES)).backward()
    for layer in (QUERY, KEY, VALUE, OUTPUT):
        gradient = module.get_parameter(b_of(layer)).grad
        assert gradient is not None
        assert gradient.abs().amin(dim=1).any()
        assert gradient[:, 1:].abs().amax(dim=0).all()


# ------------------------------------------------------------------------------------------------------------ federations


def fit(rounds: int = 2, engine: Recording | None = None, data: Any = None, **options: Any) -> Federation:
    federation = new_federation(rounds, evaluate_every=0, engine=engine)
    federation.fit(method_of(**options), data or new_data(4, 160))
    return federation


@cache
def recorded() -> tuple[Federation, Recording]:
    engine = Recording()
    return fit(engine=engine), engine


def test_the_backbone_stays_as_it_is() -> None:
    pretrained = tiny_vit(CLASSES)
    engine = Recording()
    federation = fit(1, engine, new_data(2, 60), backbone=lambda classes: copy.deepcopy(pretrained))
    expected = {f"backbone.{name}": tensor for name, tensor in pretrained.state_dict().items() if ".classifier." not in name}
    for module in [federation.run.model, federation.client_module(0), *engine.worker._modules.values()]:
        state = {name.replace(".base_layer", ""): tensor for name, tensor in module.state_dict().items()}
        assert same({name: state[name] for name in expected}, expected)
        assert {id(module.get_parameter(name)) for name in module.frozen_names} == {
            id(federation.run.model.get_parameter(name)) for name in federation.run.model.frozen_names
        }


def test_a_round_averages_what_was_sent_and_measures_the_sum() -> None:
    federation, engine = recorded()
    last = [update for turn, update in engine.fits() if turn.round == 2]
    weights = torch.tensor([1 / 8, 1 / 4, 1 / 2, 1]).double().softmax(dim=0)
    for name in fused_changes(last[0].state):
        mean = sum(weight * fused_changes(update.state)[name] for weight, update in zip(weights, last, strict=True))
        torch.testing.assert_close(federation.run.server.state[name], mean.float(), rtol=1e-5, atol=1e-6)
        assert mean.any()
    row, module = federation.run.history[-1], federation.run.model
    module.load_broadcast(federation.run.server.global_models()["global"])
    images, labels = federation.run.data.pooled().data[federation.run.data.pooled().splits[2]]
    assert row["global/test_accuracy"] == pytest.approx((module.eval()(images).argmax(dim=1) == labels).float().mean().item())
    assert {f"rank_{rank}/test_accuracy" for rank in (2, 4, 8, 16)} <= row.keys()
    assert {f"server/energy_rank_{rank}" for rank in (2, 4, 8, 16)} <= row.keys()
    assert federation.run.monitored("test") == "global/test_accuracy"


def test_nothing_stays_with_the_client_and_adam_starts_afresh() -> None:
    federation, _ = recorded()
    assert not federation.run.model.has_private_state
    assert not any(client.id in federation.run.store for client in federation.run.clients)
    assert {type(phase.optimizer(phase.parameters)) for phase in federation.run.model.phases()} == {torch.optim.Adam}
    assert [phase.epochs for phase in federation.run.model.phases()] == [1]
    default = FedHMLoRA(tiny_vit).optimizer([torch.zeros(1)])
    assert isinstance(default, torch.optim.Adam)
    assert default.defaults["lr"] == 2e-3


@pytest.mark.parametrize("assignment", ["fixed", "redrawn"])
def test_who_has_which_rank(assignment: str) -> None:
    server, rounds = server_of(6, ranks=[1, 2, 3], assignment=assignment), []
    for number in range(3):
        server.on_round_start(number, clients(6))
        sent = [server.broadcast(client) for client in clients(6)]
        rounds.append([len(broadcast.state[a_of(QUERY)]) for broadcast in sent])
        assert rounds[-1] == [broadcast.model_size for broadcast in sent]
        server.aggregate(updates_of(server))
    assert {rank for ranks in rounds for rank in ranks} == {1, 2, 3}
    assert (rounds == [[1, 2, 3, 1, 2, 3]] * 3) == (assignment == "fixed")


# ----------------------------------------------------------------------------------------------------------------- export


@pytest.mark.parametrize("client", mostly_slow([None, 1], often={1}), ids=["server", "client"])
@pytest.mark.parametrize("targets", mostly_slow(["fused_qkv", "separate"], often={"fused_qkv"}))
def test_what_was_trained_is_exported_as_an_adapter_and_merged(targets: str, client: int | None) -> None:
    pretrained = tiny_vit(CLASSES)

    def method() -> FedHMLoRA:
        return method_of(backbone=lambda classes: copy.deepcopy(pretrained), targets=targets, ranks=[2, 3], lora_alpha=6.0)

    data = new_data(3, 120)
    federation, model = new_federation(2, "runs"), method()
    federation.fit(method(), data)
    federation.export(model, data, "adapter", client)
    frozen = {name: model.state_dict()[name].clone() for name in model.frozen_names}
    federation.export(model, data, "merged", client, merged=True)
    assert same({name: model.state_dict()[name] for name in frozen}, frozen)
    module = federation.run.server_module() if client is None else federation.client_module(client)
    images = torch.randn(20, 3, 4, 4)
    adapter = PeftModel.from_pretrained(copy.deepcopy(pretrained.network), "adapter").eval()
    merged = VisionTransformer(CLASSES, name="merged").eval()
    with torch.no_grad():
        logits = module.eval()(images)
        torch.testing.assert_close(adapter(pixel_values=images).logits, logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(merged(images), logits, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(logits, pretrained.eval()(images), atol=1e-2)
    assert next(iter(adapter.peft_config.values())).r == (WIDTH if client is None else 3)
    assert merged.state_dict().keys() == pretrained.state_dict().keys()
    assert not (Path("merged") / "adapter_config.json").exists()


# ---------------------------------------------------------------------------------------------------------------- options


def test_a_network_must_say_what_its_projections_are_called() -> None:
    with pytest.raises(FederationError, match="TransformerClassifier does not say what the projections of its attention"):
        method_of(backbone=tiny_transformer).configure_model()


def test_the_command_exports_merged_weights(tmp_path: Path) -> None:
    tiny_vit(10).network.save_pretrained(tmp_path / "vit")
    options = ["--data=Digits", "--data.num_clients=2", "--federation.rounds=1"]
    options += ["--model=FedHMLoRA", "--model.backbone=VisionTransformer", f"--model.backbone.name={tmp_path / 'vit'}"]
    main(["fit", *options, "--model.steps=1", "--model.ranks=[2]", "--federation.progress=false"])
    main(["export", *options, "--model.ranks=[2]", "--output=merged", "--merged=true"])
    assert VisionTransformer(10, name="merged").head.out_features == 10
