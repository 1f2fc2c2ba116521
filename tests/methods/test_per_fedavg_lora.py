"""Per-FedAvg on an adapter: its gradients against formulas written out here, and what is measured."""

from functools import partial
from typing import Any

import pytest
import torch
from tiny import (
    CLASSES,
    distance,
    made_precise,
    new_federation,
    new_texts,
    new_trainer,
    quick_trainer,
    same,
    still_transformer,
    text_batches,
    tiny_transformer,
)
from tiny_adapters import adam
from tiny_loops import gradient_of, grads, loss_at
from torch import Tensor
from torch.func import functional_call

from lightning_fed.engines.turn_loop import QUIET
from lightning_fed.errors import FederationError
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import HOMLoRA, PerFedAvgLoRA
from lightning_fed.methods.families.lora import LoRAModule
from lightning_fed.seeding import TURN, derive_seed
from lightning_fed.tensors import State

Batch = tuple[dict[str, Tensor], Tensor]

ALPHA = 0.3


def module_of(method: type[LoRAModule] = PerFedAvgLoRA, backbone: Any = still_transformer, **options: Any) -> LoRAModule:
    """In double precision and in its phase, all numbers of noticeable size; the same ones whatever the options."""
    if method is PerFedAvgLoRA:
        options = {"adaptation_lr": ALPHA} | options
    module = method(**{"backbone": backbone, "num_classes": CLASSES, "r": 3} | options)
    made_precise(module)
    return module


def learnable(module: LoRAModule) -> State:
    """x: the adapter and the head."""
    names = {id(p): name for name, p in module.named_parameters()}
    x = {names[id(p)]: p.detach().clone().requires_grad_() for p in module.phase.parameters}
    assert x.keys() == {name for name in names.values() if ".lora_" in name or ".classifier." in name}
    return x


def stepped(module: LoRAModule, x: State, batch: Batch, alpha: float = ALPHA, graph: bool = False) -> State:
    grad = grads(loss_at(module, x, batch), x, graph)
    return {name: tensor - alpha * grad[name] for name, tensor in x.items()}


def by_formula(module: LoRAModule, x: State, support: Batch, query: Batch, curvature: Batch) -> tuple[State, State]:
    """g = grad F(x~; query), and the Hessian of F(.; curvature) at x times g."""
    adapted = {name: t.detach().requires_grad_() for name, t in stepped(module, x, support).items()}
    g = grads(loss_at(module, adapted, query), adapted)
    flat = grads(loss_at(module, x, curvature), x, graph=True)
    return g, grads(sum((flat[name] * g[name]).sum() for name in x), x)  # type: ignore[arg-type]


def combined(g: State, h: State, factor: float) -> State:
    return {name: grad + factor * h[name] for name, grad in g.items()}


# -------------------------------------------------------------------------------------------------------------- gradients


def test_two_batches_give_the_gradient_of_the_composed_function() -> None:
    module, (support, query) = module_of(), text_batches(2)
    x = learnable(module)
    loss = loss_at(module, stepped(module, x, support, graph=True), query)
    expected = grads(loss, x)
    assert distance(gradient_of(module, [support, query]), expected) < 1e-10
    assert distance(gradient_of(module, [query, support]), expected) > 0.1
    torch.testing.assert_close(module.compute_gradients([support, query]), loss.detach(), rtol=1e-12, atol=0)
    assert same(learnable(module), x)


def test_the_curvature_is_of_the_third_batch() -> None:
    module, three = module_of(batches=3), text_batches(3)
    assert module.batches_per_step == 3
    g, h = by_formula(module, learnable(module), *three)
    expected = combined(g, h, -ALPHA)
    assert distance(gradient_of(module, three), expected) < 1e-10
    for order in ((1, 0, 2), (2, 1, 0), (0, 2, 1)):
        assert distance(gradient_of(module, [three[place] for place in order]), expected) > 1e-3


@pytest.mark.parametrize("count", [2, 3])
def test_hessian_free_is_close(count: int) -> None:
    step = text_batches(count)
    exact = gradient_of(module_of(batches=count), step)
    error = distance(gradient_of(module_of(hessian="finite_difference", delta=1e-5, batches=count), step), exact)
    assert 0 < error < 1e-6
    assert distance(gradient_of(module_of(hessian="finite_difference", delta=0.5, batches=count), step), exact) > 10 * error
    assert distance(gradient_of(module_of(hessian="first_order", batches=count), step), exact) > 0.01


@pytest.mark.parametrize("hessian", ["exact", "finite_difference", "first_order"])
def test_without_adaptation_it_is_homloras_gradient(hessian: Any) -> None:
    step = text_batches(3)
    expected = gradient_of(module_of(HOMLoRA), step[1])
    for count in (2, 3):
        assert distance(gradient_of(module_of(adaptation_lr=0.0, hessian=hessian, batches=count), step[:count]), expected) < 1e-10


def test_fused_attention_has_no_second_derivative() -> None:
    fused = partial(still_transformer, attention="sdpa")
    with pytest.raises(FederationError, match="attention is 'sdpa', which has no second derivative"):
        module_of(backbone=fused)
    for hessian in ("finite_difference", "first_order"):
        module = module_of(backbone=fused, hessian=hessian)
        assert module.backbone.network.config._attn_implementation == "sdpa"
        assert distance(gradient_of(module, text_batches(2)), gradient_of(module_of(hessian=hessian), text_batches(2))) < 1e-8


# -------------------------------------------------------------------------------------------------------------- measuring

STEP = 20.0
"""So large that the adapted model is another one."""


def fit(trainer: Any = quick_trainer, **options: Any) -> Federation:
    """With dropout, which neither adapting for a measurement nor measuring has."""
    federation = new_federation(1, evaluate_every=0, trainer=trainer)
    options = {"adaptation_lr": STEP, "hessian": "first_order", "optimizer": partial(adam, lr=0.002)} | options
    federation.fit(PerFedAvgLoRA(tiny_transformer, CLASSES, r=3, steps=2, **options), new_texts(3, 240, batch_size=6))
    return federation


def adapted_by_hand(federation: Federation, client: int, donor: int) -> tuple[float, float]:
    """Test accuracy of a client's model, and of that after a step on a batch of the donor's training data."""
    module, data = federation.client_module(client).eval(), federation.run.data.client(client)
    source = federation.run.data.client(donor)
    source.order_seed = derive_seed(federation.seed, TURN, federation.run.round, donor)
    batch = next(iter(source.train_dataloader()))
    x = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters() if name in module.shared_names()}
    inputs, labels = data.data[data.splits[2]]
    values = stepped(module, x, batch, STEP)
    return tuple((functional_call(module, p, (inputs,)).argmax(dim=1) == labels).float().mean().item() for p in (x, values))  # type: ignore[return-value]


def test_the_adapted_model_is_measured_and_the_plain_one_too() -> None:
    federation = fit()
    assert federation.run.metric == "adapted_accuracy"
    last, found = federation.run.history[-1], []
    for client in range(3):
        plain, adapted = adapted_by_hand(federation, client, client)
        assert federation.run.results[client]["test/accuracy"] == pytest.approx(plain)
        assert federation.run.results[client]["test/adapted_accuracy"] == pytest.approx(adapted)
        found.append((plain, adapted, adapted_by_hand(federation, client, (client + 1) % 3)[1]))
    plains, adapteds, of_others = zip(*found, strict=True)
    assert plains != adapteds  # the measurement can tell
    assert of_others != adapteds  # whose data it was
    assert last["after/test_accuracy/mean"] == pytest.approx(sum(plains) / 3)
    assert last["after/test_adapted_accuracy/mean"] == pytest.approx(sum(adapteds) / 3)


def test_validation_adapts_too_and_the_headline_selects() -> None:
    federation = fit(new_trainer, metric="matthews")
    last = federation.run.history[-1]
    assert federation.run.metric == "adapted_matthews"
    assert last["selected/test_adapted_matthews"] == last["after/test_adapted_matthews/mean"]
    kinds = {f"{prefix}{name}" for prefix in ("", "adapted_") for name in ("accuracy", "matthews")}
    for results in federation.run.results.values():
        measured = {f"{split}/{kind}" for split in ("val", "test") for kind in kinds}
        assert results.keys() == measured | federation.client_module(0).inspect().keys()


@pytest.mark.parametrize("hessian", ["exact", "finite_difference"])
def test_measuring_changes_no_parameter(hessian: Any) -> None:
    data = new_texts(2, 80)
    module = PerFedAvgLoRA(tiny_transformer, CLASSES, r=3, adaptation_lr=STEP, hessian=hessian).for_client(data.clients[0])
    before = {name: (tensor.clone(), tensor.data_ptr()) for name, tensor in module.state_dict().items()}
    learning = {name: p.requires_grad for name, p in module.named_parameters()}
    trainer = new_trainer(**QUIET)
    [results] = trainer.test(module, datamodule=data.client(0), verbose=False)
    assert {"test/accuracy", "test/adapted_accuracy"} == results.keys()
    assert {name: p.requires_grad for name, p in module.named_parameters()} == learning
    assert all(p.grad is None for p in module.parameters())
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name][0])
        assert tensor.data_ptr() == before[name][1]
