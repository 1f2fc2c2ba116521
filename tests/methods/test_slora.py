"""SLoRA: masks, what a sparse round changes and what not, where the adapter starts, and what travels."""

import copy
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
from often import mostly_slow
from peft import PeftModel
from tiny import CLASSES, Recording, assert_same_end, new_data, new_federation, same, still, tiny_vit, without_seconds
from tiny_rounds import checked
from tiny_vits import vit_small
from torch import Tensor

from lightning_fed.core.messages import Broadcast, ClientUpdate
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.errors import FederationError
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import HOMLoRA, SLoRA
from lightning_fed.methods.slora import MASK_SEED, VALUES, A, B, SLoRAServer, draw_masks, scattered
from lightning_fed.models import VisionTransformer
from lightning_fed.tensors import State, count_floats
from lightning_fed.testing.watch import InterruptInRound

adam = partial(torch.optim.AdamW, lr=0.02, weight_decay=0.5)
TARGETS = 2 * 4
"""Adapted matrices of the tiny network, 8 × 8 each."""
QUERY = "backbone.network.vit.layers.0.attention.q_proj"


@cache
def pretrained() -> VisionTransformer:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return tiny_vit(CLASSES)


def method_of(**options: Any) -> SLoRA:
    """Every method has a copy of one network, so that its pretrained weights can be compared."""
    options = {"optimizer": adam, "steps": 2, "density": 0.25, "r": 3, "sparse_rounds": 2} | options
    return SLoRA(lambda classes: copy.deepcopy(pretrained()), CLASSES, **options)


def fit(rounds: int = 3, method: Any = None, **options: Any) -> Federation:
    federation = new_federation(rounds, **{"participation": 0.7, "evaluate_every": 0} | options)
    federation.fit(method or method_of(), new_data(3, 60))
    return federation


def original(name: str) -> Tensor:
    return pretrained().get_submodule(name.removeprefix("backbone.")).weight.detach()


def module_of(federation: Federation) -> SLoRA:
    """The global model."""
    module = federation.client_module(0)
    assert isinstance(module, SLoRA)
    return module


def stage(federation: Federation, round: int) -> Broadcast:
    """What the server would send in a round."""
    federation.run.server.on_round_start(round, [])
    return federation.run.server.broadcast(federation.run.clients[0])


def logits_after(federation: Federation, broadcast: Broadcast) -> Tensor:
    images, _ = federation.run.data.client(0).data[torch.arange(20)]
    with torch.no_grad():
        return federation.run.local.module_of(federation.run.clients[0], broadcast, None).eval()(images)


# ------------------------------------------------------------------------------------------------------------------ masks


def test_masks_select_a_share_of_each_matrix() -> None:
    shapes = {name: torch.Size(size) for name, size in {"a": (40, 50), "b": (40, 50), "c": (7, 3)}.items()}
    masks = draw_masks(shapes, 0.1, torch.tensor(3))
    assert [len(mask) for mask in masks.values()] == [200, 200, 2]
    for name, mask in masks.items():
        assert len(set(mask.tolist())) == len(mask)
        assert 0 <= mask.min() <= mask.max() < shapes[name].numel()
    assert not torch.equal(masks["a"], masks["b"])
    assert same(masks, draw_masks(shapes, 0.1, torch.tensor(3)))
    assert not same(masks, draw_masks(shapes, 0.1, torch.tensor(4)))
    assert {len(mask) for mask in draw_masks(shapes, 1e-9, torch.tensor(3)).values()} == {1}
    everything = draw_masks(shapes, 1.0, torch.tensor(3))
    assert all(len(set(mask.tolist())) == shapes[name].numel() for name, mask in everything.items())


def changed_entries(module: SLoRA) -> dict[str, set[int]]:
    return {
        name: set((weight != original(name)).flatten().nonzero().flatten().tolist())
        for name, weight in module.effective_weights().items()
    }


def test_all_clients_train_the_entries_of_one_mask_which_the_seed_decides() -> None:
    engine = Recording()
    federation = fit(rounds=1, participation=1.0, engine=engine)
    drawn = draw_masks(federation.run.model.shapes, 0.25, federation.run.server.state[MASK_SEED])
    expected = {name: set(mask.tolist()) for name, mask in drawn.items()}
    assert len(expected) == TARGETS
    assert all(len(mask) == 16 for mask in expected.values())
    assert len(engine.trained) == 3
    for update in engine.trained:
        module = federation.run.local.module_of(federation.run.clients[update.client], Broadcast(update.state, 0.25), None)
        assert changed_entries(module) == expected
    other = fit(rounds=1, participation=1.0, seed=1)
    assert changed_entries(module_of(other)) != expected


def test_masks_follow_the_server() -> None:
    """A client's own draw of anything does not matter, nor which masks it had before."""
    template = method_of()
    template.configure_model()
    client = ClientInfo(0, 10, 2, 2, (3,) * CLASSES, model_size=0.25)
    module = template.for_client(client, seed=1)
    state = {name: torch.randn_like(t) if t.is_floating_point() else t for name, t in module.shared_state().items()}
    for seed in (11, 12):
        module.load_shared_state(state | {MASK_SEED: torch.tensor(seed)})
        masks = draw_masks(module.shapes, 0.25, torch.tensor(seed))
        for name, weight in module.effective_weights().items():
            expected = original(name) + scattered(state[f"{name}.{VALUES}"], masks[name], weight.shape)
            assert torch.equal(weight, expected)


def test_the_mask_is_the_seeds_in_every_turn_of_a_worker() -> None:
    federation = fit(1)
    masks = draw_masks(federation.run.model.shapes, 0.25, federation.run.server.state[MASK_SEED])
    for client in federation.run.clients:
        module = federation.run.local.load(client, stage(federation, 1), None)
        assert same({name: module._parametrization(name).entries for name in masks}, masks)


# ------------------------------------------------------------------------------------------------------- the sparse stage


@pytest.mark.often(1)
@pytest.mark.parametrize("gradient_clip", [None, 0.1])
def test_entries_outside_the_mask_keep_their_bits(gradient_clip: float | None) -> None:
    """In spite of weight decay, momentum and everything else that an optimizer may do; what is frozen is in memory once."""
    federation = fit(rounds=2, method=method_of(gradient_clip=gradient_clip))
    method: Any = federation.run.model
    masks = draw_masks(method.shapes, 0.25, federation.run.server.state[MASK_SEED])
    module = module_of(federation)
    assert module.sparse
    for name, weight in module.effective_weights().items():
        outside = torch.ones(64, dtype=torch.bool)
        outside[masks[name]] = False
        assert torch.equal(weight.flatten()[outside], original(name).flatten()[outside])
        assert (weight.flatten()[~outside] != original(name).flatten()[~outside]).all()
    own, template = dict(module.named_parameters()), dict(method.named_parameters())
    pointers = {tensor.data_ptr() for name, tensor in template.items() if name in method.frozen_names}
    assert len(pointers) > 30
    assert {own[name].data_ptr() for name in module.frozen_names} == pointers
    assert own.keys() - module.frozen_names == module.shared_names() - {MASK_SEED}
    for name, tensor in pretrained().state_dict().items():
        if ".classifier." not in name:
            assert any(torch.equal(tensor, frozen) for frozen in own.values() if frozen.shape == tensor.shape)


def test_a_step_is_a_step_of_the_dense_weight_under_a_mask() -> None:
    """The gradient of a value is that of its entry."""
    template = method_of()
    template.configure_model()
    module = template.for_client(ClientInfo(0, 10, 2, 2, (3,) * CLASSES, model_size=0.25))
    module.load_shared_state(module.shared_state() | {MASK_SEED: torch.tensor(1)})
    batch = torch.randn(20, 3, 4, 4), torch.arange(20) % CLASSES
    module.client_loss(batch).backward()
    dense = method_of(train_head=False)
    dense.configure_model()
    network = dense.networks.frozen[0].copy(CLASSES)
    dense_weights = {name: network.get_submodule(name.removeprefix("backbone.")).weight for name in module.shapes}
    for weight in dense_weights.values():
        weight.requires_grad_()
    torch.nn.functional.cross_entropy(network(batch[0]), batch[1]).backward()
    masks = draw_masks(module.shapes, 0.25, torch.tensor(1))
    for name, weight in dense_weights.items():
        gradient = module.get_parameter(f"{name}.{VALUES}").grad
        torch.testing.assert_close(gradient, weight.grad.flatten()[masks[name]], rtol=1e-5, atol=1e-7)


# --------------------------------------------------------------------------------------------------- the start of the adapter


def truncated(matrix: Tensor, rank: int) -> Tensor:
    left, values, right = torch.linalg.svd(matrix.double())
    return (left[:, :rank] * values[:rank]) @ right[:rank]


@pytest.mark.parametrize("base", mostly_slow(["original", "residual"], often={"residual"}))
@pytest.mark.parametrize(("r", "lora_alpha"), mostly_slow([(3, None), (3, 12.0), (8, 2.0), (20, None)], often={(8, 2.0)}))
def test_the_adapter_starts_as_the_best_of_its_rank(base: Any, r: int, lora_alpha: float | None) -> None:
    """And with all ranks it starts as what the first stage has learned."""
    federation = fit(rounds=2, method=method_of(r=r, lora_alpha=lora_alpha, base=base))
    learned, kept, total = module_of(federation).effective_weights(), 0.0, 0.0
    second = stage(federation, 3)
    start = federation.run.local.module_of(federation.run.clients[0], second, None)
    assert isinstance(start, SLoRA)
    assert not start.sparse
    scaling = 1.0 if lora_alpha is None else lora_alpha / r
    for name, weight in start.effective_weights().items():
        change = learned[name] - original(name)
        best = truncated(change, r)
        a, b = second.state[f"{name}.{A}"], second.state[f"{name}.{B}"]
        torch.testing.assert_close(scaling * (b @ a).double(), best, rtol=0, atol=1e-6)
        torch.testing.assert_close(b.norm(dim=0), a.norm(dim=1) * (b.norm(dim=0) > 0), rtol=1e-4, atol=1e-6)  # both have the root
        expected = original(name) + best.float() if base == "original" else learned[name]
        torch.testing.assert_close(weight, expected, rtol=0, atol=1e-5)
        kept, total = kept + best.square().sum().item(), total + change.double().square().sum().item()
        if r >= 8:
            torch.testing.assert_close(weight, learned[name], rtol=0, atol=1e-5)
    assert federation.run.history[1]["server/energy"] == pytest.approx(kept / total, rel=1e-5)
    assert "server/energy" not in federation.run.history[0]
    assert federation.run.monitored("test") == "global/test_accuracy"
    assert federation.run.monitored("test") in federation.run.history[1]
    assert (kept / total > 1 - 1e-6) == (r >= 8)


def test_ranks_that_were_not_learned_start_as_loras() -> None:
    """One entry per matrix is a matrix of rank 1. A pair of a zero column and a zero row would never learn."""
    method = method_of(density=0.01)
    federation = fit(rounds=2, method=method)
    first = method.shared_state()
    state = stage(federation, 3).state
    for name in method.shapes:
        a, b = state[f"{name}.{A}"], state[f"{name}.{B}"]
        assert a[0].count_nonzero() == b[:, 0].count_nonzero() == 1
        assert torch.equal(a[1:], first[f"{name}.{A}"][1:])
        assert a[1:].all()
        assert not b[:, 1:].any()
    assert federation.run.history[1]["server/energy"] == pytest.approx(1)


def test_nothing_learned_starts_as_lora() -> None:
    federation = fit(rounds=2, method=method_of(optimizer=still))
    assert all("server/energy" not in row for row in federation.run.history)
    assert same(stage(federation, 3).state, federation.run.model.shared_state())


@pytest.mark.often(1)
@pytest.mark.parametrize("base", ["residual", "original"])
def test_a_residual_base_keeps_the_function(base: Any) -> None:
    federation = fit(rounds=2, method=method_of(base=base))
    before = logits_after(federation, stage(federation, 2))
    after = logits_after(federation, stage(federation, 3))
    assert torch.allclose(before, after, rtol=0, atol=1e-5) == (base == "residual")


@pytest.mark.parametrize("base", mostly_slow(["original", "residual"], often={"original"}))
def test_the_second_stage_trains_the_adapter_alone(base: Any) -> None:
    federation = fit(rounds=4, method=method_of(base=base))
    module, server = module_of(federation), federation.run.server
    assert not module.sparse
    assert {name for name, p in module.named_parameters() if p.requires_grad} == module.shared_names()
    start = fit(rounds=2, method=method_of(base=base)).run.server.state
    moved = {name for name, tensor in server.state.items() if not torch.equal(tensor, start[name])}
    assert moved == module.shared_names()
    for name, weight in module.effective_weights().items():
        learned = scattered(start[f"{name}.{VALUES}"], draw_masks(module.shapes, 0.25, start[MASK_SEED])[name], weight.shape)
        adapter = server.state[f"{name}.{B}"] @ server.state[f"{name}.{A}"]
        first = start[f"{name}.{B}"] @ start[f"{name}.{A}"]
        fixed = original(name) + (learned - first if base == "residual" else 0)
        torch.testing.assert_close(weight, fixed + adapter, rtol=0, atol=1e-6)


class WeightedHOMLoRA(HOMLoRA):
    weighting = "examples"


@pytest.mark.parametrize(("rounds", "said"), [(2, True), (3, False)])
def test_a_run_of_the_first_stage_alone_says_so(rounds: int, said: bool, caplog: pytest.LogCaptureFixture) -> None:
    method_of().check_rounds(rounds)
    assert ("SLoRA's sparse_rounds is 2 and the run has 2 rounds: no adapter is trained" in caplog.text) == said


def test_without_sparse_rounds_it_is_homlora() -> None:
    method = method_of(sparse_rounds=0)
    federation = fit(rounds=2, method=method)
    options: dict[str, Any] = {"optimizer": adam, "steps": 2, "r": 3, "persistent": False}
    other = WeightedHOMLoRA(lambda classes: copy.deepcopy(pretrained()), CLASSES, target_modules=".*[qkvo]_proj", **options)
    expected = fit(rounds=2, method=other)
    kept = {name: federation.run.server.state[name] for name in expected.run.server.state}
    assert same(kept, expected.run.server.state)
    assert federation.run.results == expected.run.results
    adapters = {name: tensor for name, tensor in method_and_start(sparse_rounds=0).items() if "lora_" in name}
    assert len(adapters) == 2 * TARGETS
    assert all(tensor.any() == ("lora_A" in name) for name, tensor in adapters.items())


def method_and_start(**options: Any) -> State:
    method = method_of(**options)
    method.configure_model()
    return method.configure_server([]).broadcast(ClientInfo(0, 1, 1, 1, (1,) * CLASSES)).state


# ------------------------------------------------------------------------------------------------------------ what travels


def test_what_travels_in_each_stage() -> None:
    head = 8 * CLASSES + CLASSES
    engine = Recording()
    fit(rounds=3, engine=engine)
    for turn, update in engine.fits():
        expected = TARGETS * (16 if turn.round <= 2 else 3 * (8 + 8)) + head
        assert count_floats(turn.broadcast.state) == count_floats(update.state) == expected
        assert update.state.keys() == turn.broadcast.state.keys()
        assert turn.broadcast.model_size == (0.25 if turn.round <= 2 else None)


def test_a_residual_base_is_sent_and_does_not_come_back() -> None:
    head, engine = 8 * CLASSES + CLASSES, Recording()
    fit(rounds=3, engine=engine, method=method_of(base="residual"))
    turn, update = engine.fits(3)[0]
    assert count_floats(update.state) == TARGETS * 3 * 16 + head
    assert count_floats(turn.broadcast.state) == TARGETS * (2 * 3 * 16 + 16) + head


@pytest.mark.slow
def test_what_travels_of_vit_small() -> None:
    with torch.device("meta"):
        method = SLoRA(vit_small, 10, r=4)
        method.configure_model()
        sparse = method.for_client(ClientInfo(0, 1, 1, 1, (1,) * 10, model_size=method.density))

        def sent(module: SLoRA) -> int:
            return sum(p.numel() for name, p in module.named_parameters() if name in module.shared_names())

        assert sum(p.numel() for p in method.backbone.parameters()) == 21_669_514 + 36_864 * 4
        assert sent(method) == 36_864 * 4 + 3_850
        assert sent(sparse) == 12 * 4 * round(0.01 * 384**2) + 3_850 == 70_800 + 3_850
        server = SLoRAServer({f"{n}.{x}": torch.empty(1) for n in method.shapes for x in (A, B)}, method)
    assert count_floats(server.broadcast(ClientInfo(0, 1, 1, 1, ())).state) == 70_800


# -------------------------------------------------------------------------------------------------------------- resumption


@pytest.mark.parametrize(("round", "base"), mostly_slow(product([2, 3], ["original", "residual"]), often={(2, "residual")}))
def test_a_run_continues_across_the_change_of_stages(base: Any, round: int) -> None:
    whole = fit(method=method_of(sparse_rounds=1, base=base), run_dir="whole")
    with pytest.raises(KeyboardInterrupt):
        fit(method=method_of(sparse_rounds=1, base=base), run_dir="parts", callbacks=[InterruptInRound(round)])
    parts = new_federation(3, "parts", participation=0.7, evaluate_every=0)
    parts.fit(method_of(sparse_rounds=1, base=base), new_data(3, 60), ckpt_path="last")
    assert without_seconds(parts.run.history) == without_seconds(whole.run.history)
    assert parts.run.results == whole.run.results
    assert_same_end(whole.run.folder, parts.run.folder)


# ------------------------------------------------------------------------------------------------------------------ export


@pytest.mark.parametrize("client", mostly_slow([None, 1], often={1}), ids=["server", "client"])
@pytest.mark.parametrize(
    ("rounds", "base"), mostly_slow([(2, "original"), (4, "original"), (4, "residual")], often={(2, "original"), (4, "residual")})
)
def test_what_is_exported_is_the_global_model(rounds: int, base: Any, client: int | None) -> None:
    federation = fit(rounds=rounds, method=method_of(base=base), run_dir="runs")
    images, _ = federation.run.data.client(0).data[torch.arange(20)]
    with torch.no_grad():
        expected = module_of(federation).eval()(images)
    new_federation(rounds, "runs").export(method_of(base=base), new_data(3, 60), "exported", client)
    if (rounds, base) == (4, "original"):
        network = copy.deepcopy(pretrained())
        network.network = PeftModel.from_pretrained(network.network, "exported").merge_and_unload()
    else:
        network = VisionTransformer(CLASSES, name="exported")
    with torch.no_grad():
        torch.testing.assert_close(network.eval()(images), expected, rtol=0, atol=1e-5)
        assert not torch.allclose(pretrained().eval()(images), expected, atol=1e-3)
    pretrained().train()


# ------------------------------------------------------------------------------------------------------------------ errors


def test_what_is_no_linear_layer_has_no_mask() -> None:
    with pytest.raises(FederationError, match="is a Conv2d, but SLoRA adapts linear layers"):
        method_of(target_modules=["projection"]).configure_model()


def test_a_lacking_tensor_is_an_error_and_changes_nothing() -> None:
    federation = fit(rounds=1)
    server = federation.run.server
    before = dict(server.state)
    update = ClientUpdate(0, 10, dict(server.trained()))
    del update.state[f"{QUERY}.{VALUES}"]
    with pytest.raises(FederationError, match="lacks"):
        server.aggregate(checked(server, [replace(update)]))
    assert same(server.state, before)
