"""FFA-LoRA: one A for everybody, for ever; the mean of the factors is the mean of the products."""

from functools import partial
from typing import Any

import pytest
import torch
from tiny import CLASSES, Recording, new_texts, private_states, same
from tiny_adapters import (
    HEAD,
    LAYER,
    WIDTH,
    A,
    B,
    adam,
    assert_close,
    double,
    fit,
    mean_of,
    method_of,
    network,
    of_factor,
    one_batch,
    products,
    sgd,
)

from lightning_fed.engines import Processes
from lightning_fed.methods import CentralizedLoRA, FFALoRA, HOMLoRA
from lightning_fed.models.adapters import COMMON
from lightning_fed.tensors import State


def test_a_is_one_for_all_stays_and_does_not_travel() -> None:
    """In payloads, in moments, in the server's checkpoint; with weight decay, too."""
    engine = Recording()
    method = method_of(FFALoRA, optimizer=partial(torch.optim.AdamW, lr=0.02, weight_decay=0.5))
    federation = fit(method, new_texts(3, 120), rounds=3, engine=engine, participation=0.7)
    drawn = of_factor(dict(federation.run.model.state_dict()), "A")
    assert len(drawn) == 2
    for state in drawn.values():
        assert state.abs().max() <= WIDTH**-0.5
        assert state.std() > 0.5 * (3 * WIDTH) ** -0.5
    for client in range(3):
        own = dict(federation.client_module(client).state_dict())
        assert same(of_factor(own, "A"), drawn)
        assert of_factor(own, "B")[B].any()
    sent = [turn.broadcast.state for turn in engine.turns] + [update.state for update in engine.updates]
    kept = [*private_states(federation).values(), federation.run.server.state_dict()]
    assert not any(".lora_A." in name for state in [*sent, *kept] for name in state)
    assert federation.run.history[0]["traffic/up_parameters"] == 2 * (3 * 2 * WIDTH + HEAD)


@pytest.mark.slow
def test_a_is_the_same_in_every_process(two_workers: Processes) -> None:
    one, two = (fit(method_of(FFALoRA), engine=engine) for engine in (None, two_workers))
    assert same(one.run.server.state_dict(), two.run.server.state_dict())
    for client in range(3):
        assert same(dict(one.client_module(client).state_dict()), dict(two.client_module(client).state_dict()))


@pytest.mark.parametrize(("method", "exact"), [(FFALoRA, True), (HOMLoRA, False)])
def test_the_mean_of_what_was_learned_is_exact(method: type[Any], exact: bool) -> None:
    engine = Recording()
    federation = fit(method_of(method), rounds=1, engine=engine)
    common = of_factor(dict(federation.run.model.state_dict()), "A")
    states: list[State] = [common | update.state for _, update in engine.fits(1)]
    mean = mean_of([products(state) for state in states], [1.0] * 3)
    merged = products(common | federation.run.server.state)
    gap = max((merged[name] - mean[name]).abs().max().item() for name in mean)
    assert (gap < 1e-7) == exact


def test_a_step_moves_the_weights_in_the_rows_of_a() -> None:
    r"""A step of gradient descent: :math:`-\eta s^2 G A^\top A`."""
    module = method_of(FFALoRA, optimizer=sgd, lora_alpha=6.0).for_client(new_texts(1, 60).clients[0]).double()
    layer = module.get_submodule(LAYER)
    torch.nn.init.normal_(layer.lora_B["common"].weight)
    base = layer.base_layer.weight.requires_grad_()
    batch = next(iter(new_texts(1, 60).client(0).train_dataloader()))
    before = layer.get_delta_weight("common").detach()
    module.client_loss(batch).backward()
    a, b = layer.lora_A["common"].weight, layer.lora_B["common"].weight
    assert a.grad is None
    with torch.no_grad():
        b -= 0.1 * b.grad
        moved = layer.get_delta_weight("common") - before
    assert base.grad is not None
    torch.testing.assert_close(moved, -0.1 * 2**2 * base.grad @ a.T @ a, rtol=0, atol=1e-12)


class CentralizedFFA(CentralizedLoRA, FFALoRA):
    pass


def test_a_step_each_is_one_step_on_everybodys_data() -> None:
    """Of gradient descent, on all data of a client, weighted by how many these are; round after round."""
    options: dict[str, Any] = {"optimizer": sgd, "steps": 1}
    many = fit(method_of(FFALoRA, weighting="examples", **options), one_batch(3), rounds=3, trainer=double)
    pooled = fit(method_of(CentralizedFFA, **options), one_batch(3), rounds=3, trainer=double)
    assert len({client.num_train for client in many.run.clients}) == 3
    assert_close(many.run.server.state, pooled.run.server.state, atol=1e-12)
    uniform = fit(method_of(FFALoRA, **options), one_batch(3), rounds=3, trainer=double)
    assert not torch.allclose(uniform.run.server.state[B], pooled.run.server.state[B], rtol=0, atol=1e-6)


def test_only_a_head_and_b_have_moments() -> None:
    method = method_of(FFALoRA, optimizer=adam)
    method.configure_model()
    [phase] = method.phases()
    learning = {name for name, p in method.named_parameters() if any(p is mine for mine in phase.parameters)}
    assert {name for name in learning if ".classifier." not in name} == of_factor(dict(method.state_dict()), "B").keys()
    assert A not in learning
    assert sum(p.numel() for p in phase.parameters) == 3 * 2 * WIDTH + HEAD
    assert method.num_classes == CLASSES


def test_a_is_single_precision_on_a_half_precision_network() -> None:
    """It learns nothing, but multiplies what does; and the sum with the weights can be written."""
    module = method_of(FFALoRA, backbone=lambda num_classes: network(num_classes).bfloat16())
    module.configure_model()
    assert {tensor.dtype for tensor in module.adapter(COMMON).values()} == {torch.float32}
    assert len(module.effective_weights()) == 2
