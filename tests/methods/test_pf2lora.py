"""PF2LoRA: its gradients against formulas written out here, and what stays with a client."""

from functools import partial
from typing import Any

import pytest
import torch
from often import mostly_slow
from tiny import (
    CLASSES,
    distance,
    made_precise,
    new_federation,
    new_texts,
    new_trainer,
    private_states,
    same,
    still_transformer,
    text_batches,
    tiny_transformer,
)
from tiny_adapters import adam, network
from tiny_loops import gradient_of, grads, loss_at
from torch import Tensor

from lightning_fed.errors import FederationError
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import HOMLoRA, PF2LoRA
from lightning_fed.methods.families.lora import CLIENT
from lightning_fed.models.adapters import COMMON
from lightning_fed.models.transformer import TransformerClassifier
from lightning_fed.tensors import State

Batch = tuple[dict[str, Tensor], Tensor]

ALPHA = 0.5


def module_of(backbone: Any = still_transformer, **options: Any) -> PF2LoRA:
    """In double precision and in its phase, all numbers of noticeable size; the same ones whatever the options."""
    module = PF2LoRA(**{"backbone": backbone, "num_classes": CLASSES, "r": 3, "client_lr": ALPHA} | options)
    made_precise(module)
    return module


def private_of(module: PF2LoRA) -> State:
    return {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters() if f".{CLIENT}." in name}


def common_of(module: PF2LoRA) -> State:
    """The common adapter and the head, in the order of the module's phase."""
    names = {id(p): name for name, p in module.named_parameters()}
    common = {names[id(p)]: p.detach().clone().requires_grad_() for p in module.phase.parameters}
    assert {name for name in common if ".lora_" in name} == {name for name in names.values() if f".{COMMON}." in name}
    assert {name.split(".")[2] for name in common if ".lora_" not in name} <= {"classifier", "pooler", "score"}
    return common


def moved(y: State, grad: State, alpha: float = ALPHA) -> State:
    return {name: tensor - alpha * grad[name] for name, tensor in y.items()}


def composed(module: PF2LoRA, x: State, y: State, inner: Batch, outer: Batch, alpha: float = ALPHA) -> Tensor:
    """F(x, y - alpha grad_y F(x, y; inner); outer), with its graph."""
    return loss_at(module, x | moved(y, grads(loss_at(module, x | y, inner), y, graph=True), alpha), outer)


def terms(module: PF2LoRA, x: State, y: State, pi: Batch, xi: Batch, xi_: Batch, zeta: Batch) -> tuple[State, State]:
    """grad_x F(x, y+; xi), and grad_x <grad_y F(x, y; zeta), v> with the constant v = grad_y F(x, y+; xi_)."""
    stepped = {name: t.detach().requires_grad_() for name, t in moved(y, grads(loss_at(module, x | y, pi), y)).items()}
    first = grads(loss_at(module, x | stepped, xi), x)
    v = grads(loss_at(module, x | stepped, xi_), stepped)
    inner = grads(loss_at(module, x | y, zeta), y, graph=True)
    return first, grads(sum((inner[name] * v[name]).sum() for name in y), x)  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------------------- gradients


def test_two_batches_give_the_gradient_of_the_composed_function() -> None:
    module, (inner, outer) = module_of(), text_batches(2)
    x, y = common_of(module), private_of(module)
    loss = composed(module, x, y, inner, outer)
    expected = grads(loss, x)
    torch.testing.assert_close(module.compute_gradients([inner, outer]), loss.detach(), rtol=1e-12, atol=0)
    module = module_of()
    assert distance(gradient_of(module, [inner, outer]), expected) < 1e-10
    assert distance(gradient_of(module_of(), [outer, inner]), expected) > 0.1  # which batch is which matters


gpt2 = {"model_type": "gpt2", "vocab_size": 30, "n_positions": 12, "n_embd": 8, "n_layer": 2, "n_head": 2, "pad_token_id": 1}
gpt2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
deberta = still_transformer.keywords["config"] | {"model_type": "deberta-v2", "type_vocab_size": 0, "relative_attention": True}
deberta |= {"pos_att_type": "p2c|c2p", "norm_rel_ebd": "layer_norm", "share_att_key": True, "position_buckets": 4}
deberta |= {"max_relative_positions": -1, "position_biased_input": False, "pooler_dropout": 0.0, "pad_token_id": 1}


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")  # peft, of GPT-2's layers, and sets it
@pytest.mark.parametrize("config", [gpt2, deberta], ids=["gpt2", "deberta"])
def test_the_papers_other_networks_have_such_gradients_too(config: dict[str, Any]) -> None:
    module, (inner, outer) = module_of(partial(TransformerClassifier, config=config)), text_batches(2)
    x, y = common_of(module), private_of(module)
    expected = grads(composed(module, x, y, inner, outer), x)
    assert distance(gradient_of(module, [inner, outer]), expected) < 1e-10
    first = module_of(partial(TransformerClassifier, config=config), hypergradient="first_order")
    assert distance(gradient_of(first, [inner, outer]), expected) > 1e-3


@pytest.mark.often(1)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
@pytest.mark.parametrize("config", [gpt2, deberta], ids=["gpt2", "deberta"])
def test_the_papers_other_networks_train(config: dict[str, Any]) -> None:
    federation = new_federation(1, evaluate_every=0)
    method = PF2LoRA(partial(TransformerClassifier, config=config), CLASSES, r=3, optimizer=adam, steps=2)
    federation.fit(method, new_texts(2, 60))
    start = federation.run.model.shared_state()
    for name, tensor in federation.run.server.state_dict().items():
        assert not torch.equal(tensor, start[name])
    assert federation.run.history[0]["compute/flops"] > 0


@pytest.mark.parametrize("hypergradient", ["exact", "finite_difference"])
def test_four_batches_go_where_algorithm_1_has_them(hypergradient: Any) -> None:
    """With a minus; eq. (6) of the paper has a plus."""
    module, four = module_of(batches=4), text_batches(4)
    first, second = terms(module, common_of(module), private_of(module), *four)
    found = gradient_of(module_of(hypergradient=hypergradient, batches=4), four)
    expected = {name: grad - ALPHA * second[name] for name, grad in first.items()}
    assert distance(found, expected) < (1e-10 if hypergradient == "exact" else 1e-4)
    for one in range(4):
        for other in range(one):
            swapped = list(four)
            swapped[one], swapped[other] = four[other], four[one]
            assert distance(gradient_of(module_of(batches=4), swapped), expected) > 1e-3


@pytest.mark.parametrize("count", [1, 2])
def test_finite_differences_are_close(count: int) -> None:
    step: Any = text_batches(2) if count == 2 else text_batches(1)[0]
    exact, close, first = (
        gradient_of(module_of(hypergradient=kind, batches=count), step) for kind in ("exact", "finite_difference", "first_order")
    )
    assert 0 < distance(close, exact) < 1e-4
    assert distance(first, exact) > 0.01


def test_finite_differences_with_a_flat_loss_have_no_second_term() -> None:
    """Behind a head of zeros there is no direction v."""
    module, step = module_of(hypergradient="finite_difference"), text_batches(2)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "out_proj" in name:
                parameter.zero_()
    assert all(torch.isfinite(grad).all() for grad in gradient_of(module, step).values())


def test_one_batch_serves_everything() -> None:
    module, (batch,) = module_of(batches=1), text_batches(1)
    x, y = common_of(module), private_of(module)
    expected = grads(composed(module, x, y, batch, batch), x)
    assert module.batches_per_step == 1
    assert distance(gradient_of(module, batch), expected) < 1e-10


def test_first_order_is_the_gradient_at_the_new_private_adapter() -> None:
    module, (inner, outer) = module_of(hypergradient="first_order"), text_batches(2)
    x, y = common_of(module), private_of(module)
    stepped = moved(y, grads(loss_at(module, x | y, inner), y))
    assert distance(gradient_of(module, [inner, outer]), grads(loss_at(module, x | stepped, outer), x)) < 1e-10
    found = gradient_of(module_of(hypergradient="first_order"), [inner, outer])
    assert distance(found, grads(loss_at(module, x | y, outer), x)) > 0.01


def test_without_levels_it_is_the_gradient_at_the_old_private_adapter() -> None:
    module, (batch,) = module_of(hypergradient="none"), text_batches(1)
    x, y = common_of(module), private_of(module)
    expected = grads(loss_at(module, x | y, batch), x)
    stepped = moved(y, grads(loss_at(module, x | y, batch), y))
    assert module.batches_per_step == 1
    assert distance(gradient_of(module, batch), expected) < 1e-10
    assert distance(private_of(module), stepped) < 1e-12


@pytest.mark.parametrize("hypergradient", ["exact", "finite_difference", "first_order"])
@pytest.mark.parametrize("count", [2, 4])
def test_the_private_adapter_takes_the_step_of_the_first_batch(hypergradient: Any, count: int) -> None:
    module, step = module_of(hypergradient=hypergradient, batches=count), text_batches(count)
    x, y = common_of(module), private_of(module)
    stepped = moved(y, grads(loss_at(module, x | y, step[0]), y))
    assert distance(stepped, y) > 0.01
    module.compute_gradients(step)
    assert distance(private_of(module), stepped) < 1e-12
    assert same(common_of(module), x)  # that is the optimizer's
    assert all(p.grad is None for name, p in module.named_parameters() if f".{CLIENT}." in name)


def test_both_adapters_act_together_and_are_scaled_alike() -> None:
    """By lora_alpha / r of the common one."""
    module = module_of(lora_alpha=6.0)
    layer = module.backbone.network.roberta.encoder.layer[0].attention.self.query
    assert layer.scaling == {COMMON: 2.0, CLIENT: 2.0}
    x = torch.randn(5, 8, dtype=torch.float64)
    weight = layer.base_layer.weight + 2 * sum(layer.lora_B[name].weight @ layer.lora_A[name].weight for name in (COMMON, CLIENT))
    torch.testing.assert_close(layer(x), x @ weight.T + layer.base_layer.bias)


# ---------------------------------------------------------------------------------------------------- attention and dropout


def test_fused_attention_has_no_second_derivative() -> None:
    with pytest.raises(FederationError, match="attention is 'sdpa', which has no second derivative"):
        module_of(partial(still_transformer, attention="sdpa"))


def test_attention_is_made_differentiable_twice_only_where_needed() -> None:
    used = {kind: module_of(hypergradient=kind).backbone.network.config._attn_implementation for kind in ("exact", "first_order")}
    assert used == {"exact": "eager", "first_order": "sdpa"}


@pytest.mark.parametrize("hypergradient", ["first_order", "finite_difference"])
def test_the_others_work_with_fused_attention(hypergradient: Any) -> None:
    fused, eager = (
        module_of(partial(still_transformer, attention=kind), hypergradient=hypergradient) for kind in ("sdpa", "eager")
    )
    assert fused.backbone.network.config._attn_implementation == "sdpa"
    step = text_batches(2)
    assert distance(gradient_of(fused, step), gradient_of(eager, step)) < 1e-8


def test_both_sides_of_a_difference_have_the_same_dropout() -> None:
    """The difference is that of the loss under one mask, to the error of differences; another mask is another loss."""
    module, (batch,) = module_of(tiny_transformer, hypergradient="finite_difference", lora_dropout=0.2), text_batches(1)
    assert module.training
    x, y = common_of(module), private_of(module)
    v = [torch.randn_like(tensor) for tensor in y.values()]

    def product(seed: int) -> State:
        torch.manual_seed(seed)
        found = module.gradient_difference(y, v, 1e-4, batch, module.phase.parameters)
        return dict(zip(x, found, strict=True))

    torch.manual_seed(5)
    inner = grads(loss_at(module, x | y, batch), y, graph=True)
    expected = grads(sum((inner[name] * direction).sum() for name, direction in zip(y, v, strict=True)), x)  # type: ignore[arg-type]
    assert distance(product(5), expected) < 1e-4
    assert distance(product(6), expected) > 0.01
    assert same(product(5), product(5))


# ------------------------------------------------------------------------------------------------------------ federations


class OuterBatches(HOMLoRA):
    """HOMLoRA that looks at as many batches per step, and learns from the second."""

    def client_loss(self, batch: Any) -> Tensor:
        return super().client_loss(batch[1])


double = partial(new_trainer, precision="64-true")


@pytest.mark.often(1)
@pytest.mark.parametrize(
    ("hypergradient", "count"),
    mostly_slow([("exact", 1), ("exact", 2), ("exact", 4), ("first_order", 2)], often={("exact", 2), ("first_order", 2)}),
)
def test_without_a_private_step_it_is_homlora_on_the_outer_batches(hypergradient: Any, count: int) -> None:
    options: dict[str, Any] = {
        "backbone": partial(still_transformer, attention="eager"),
        "num_classes": CLASSES,
        "r": 3,
        "optimizer": adam,
    }
    ours = PF2LoRA(**options, steps=2, client_lr=0.0, hypergradient=hypergradient, batches=count)
    theirs = (HOMLoRA if count == 1 else OuterBatches)(**options, steps=2)
    theirs.batches_per_step = count
    states = []
    for method in (ours, theirs):
        federation = new_federation(2, trainer=double, evaluate_every=0)
        federation.fit(method, new_texts(2, 80))
        states.append(federation.run.server.state_dict())
        if method is ours:
            for client in federation.run.clients:
                private = federation.run.store.get(client.id)
                initial = method.for_client(client, federation.seed).private_state()
                kept = {name: tensor for name, tensor in private.items() if f".{CLIENT}." in name and "optimizer/" not in name}
                assert same({name: tensor.float() for name, tensor in kept.items()}, initial)
                assert any(tensor.any() for tensor in initial.values())
    assert states[0].keys() == states[1].keys()
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=1e-10)
    start = ours.for_client(federation.run.clients[0]).shared_state()
    assert any((start[name] - tensor).abs().max() > 0.01 for name, tensor in states[1].items())


def test_the_private_share_is_that_of_the_products_norms() -> None:
    module = module_of()
    state = module.state_dict()
    shares = module.private_shares()
    assert shares.keys() == module.adapter_ranks().keys()
    for layer, share in shares.items():
        products = [state[f"{layer}.lora_B.{kind}.weight"] @ state[f"{layer}.lora_A.{kind}.weight"] for kind in (COMMON, CLIENT)]
        common, private = (product.norm().item() for product in products)
        assert share == pytest.approx(private / (common + private))
        assert 0.05 < share < 0.95
    fresh = PF2LoRA(still_transformer, CLASSES)
    fresh.configure_model()
    assert set(fresh.private_shares().values()) == {0}  # nothing is added yet


def test_the_private_share_is_logged_for_each_layer_and_grows_with_the_step() -> None:
    shares = []
    for client_lr in (0.0, 0.01, 1.0):
        federation = new_federation(1)
        federation.fit(PF2LoRA(network, CLASSES, r=3, client_lr=client_lr, optimizer=adam, steps=3), new_texts(3, 60))
        row, module = federation.run.history[-1], federation.client_module(0)
        columns = {f"adapter/private_share/{layer}" for layer in module.private_shares()}
        assert {name for name in row if "private_share" in name} == {*columns, "adapter/private_share/mean"}
        for column in columns:
            own = [result[column.removeprefix("adapter/")] for result in federation.run.results.values()]
            assert row[column] == pytest.approx(sum(own) / 3)
        assert row["adapter/private_share/mean"] == pytest.approx(sum(row[column] for column in columns) / len(columns))
        shares.append(row["adapter/private_share/mean"])
    assert shares[0] == 0 < shares[1] < shares[2]


def adapters(federation: Federation) -> list[State]:
    return [
        {name: t for name, t in state.items() if f".{CLIENT}." in name and not name.startswith("optimizer/")}
        for state in private_states(federation).values()
    ]


def test_neither_clipping_nor_the_optimizer_touch_the_private_adapter() -> None:
    """After one step: the common adapter and the head went elsewhere, the private one did not."""
    ends = []
    plain = partial(torch.optim.SGD, lr=0.1)
    for options in ({}, {"gradient_clip": 1e-3}, {"optimizer": partial(adam, weight_decay=0.5)}):
        federation = new_federation(1, evaluate_every=0)
        method = PF2LoRA(network, CLASSES, r=3, client_lr=0.5, steps=1, **{"optimizer": plain} | options)
        torch.manual_seed(0)
        method.configure_model()
        with torch.no_grad():
            for name, parameter in method.named_parameters():
                if ".lora_B." in name:
                    parameter.normal_(generator=torch.Generator().manual_seed(7))
        start = method.shared_state()
        federation.fit(method, new_texts(1, 60))
        ends.append((adapters(federation)[0], {k: t - start[k] for k, t in federation.run.server.state_dict().items()}))
    (private, free), (clipped_private, clipped), (other_private, other) = ends
    initial = federation.run.model.for_client(federation.run.clients[0], federation.seed).private_state()
    assert any((tensor - private[name]).abs().max() > 1e-6 for name, tensor in initial.items())
    assert same(private, clipped_private)
    assert same(private, other_private)
    norms = [torch.stack([t.square().sum() for t in moves.values()]).sum().sqrt().item() for moves in (free, clipped)]
    assert norms[0] > 1e-3
    assert norms[1] == pytest.approx(0.1 * 1e-3, rel=1e-2)
    assert distance(other, free) > 0.1
