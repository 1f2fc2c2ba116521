"""RoLoRA: the factors learn in turns, and what rests is left alone."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from tiny import Recording, new_texts, private_states, same
from tiny_adapters import (
    HEAD,
    WIDTH,
    A,
    B,
    adam,
    assert_close,
    double,
    fit,
    mean_of,
    method_of,
    of_factor,
    one_batch,
    products,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_fed.core import ClientUpdate, FederationError
from lightning_fed.core.phased_module import MOMENTS
from lightning_fed.methods import RoLoRA
from lightning_fed.methods.families.lora import LoRAModule


def test_each_round_is_exact_and_both_factors_learn() -> None:
    engine = Recording()
    federation = fit(method_of(RoLoRA), rounds=5, engine=engine)
    before = [engine.fits(r)[0][0].broadcast.state for r in range(1, 6)] + [federation.run.server.state]
    for round in range(1, 6):
        learned, rested = ("B", "A") if round % 2 else ("A", "B")
        start, end = before[round - 1], before[round]
        assert same(of_factor(start, rested), of_factor(end, rested))
        assert all(not torch.equal(start[name], tensor) for name, tensor in of_factor(end, learned).items())
        updates = [update.state for _, update in engine.fits(round)]
        assert all(not of_factor(state, rested) and len(of_factor(state, learned)) == 2 for state in updates)
        mean = mean_of([products(start | state) for state in updates], [1.0] * 3)
        assert_close(products(end), mean, atol=1e-6)


def test_what_travels() -> None:
    """Down both factors, for whoever comes back; up the one that has learned."""
    federation = fit(method_of(RoLoRA, target_modules=["query", "intermediate.dense"]), rounds=3)
    halves = {"B": 3 * 2 * WIDTH, "A": 3 * 2 * WIDTH}
    for row in federation.run.history:
        learned = "B" if row["round"] % 2 else "A"
        assert row["traffic/up_parameters"] == 3 * (halves[learned] + HEAD)
        assert row["traffic/down_parameters"] == 3 * (sum(halves.values()) + HEAD)


def test_a_factor_that_rests_is_in_no_optimizer() -> None:
    """Momentum and weight decay would move it."""
    optimizer = partial(torch.optim.AdamW, lr=0.02, weight_decay=0.5)
    federation = fit(method_of(RoLoRA, optimizer=optimizer), new_texts(1, 60), rounds=2)
    kept = private_states(federation)[0]
    moments: dict[str, set[str]] = {}
    for name in kept:
        assert name.startswith(MOMENTS)
        _, factor, parameter, _ = name.split("/")
        moments.setdefault(factor, set()).add(parameter)
    assert {factor: {name for name in names if ".lora_" in name} for factor, names in moments.items()} == {
        factor: set(of_factor(federation.run.server.state, factor)) for factor in ("A", "B")
    }
    assert all(kept[f"{MOMENTS}{factor}/{name}/step"] == 3 for factor, name in (("A", A), ("B", B)))


def loop(module: LoRAModule, batch: tuple[Any, Tensor], rounds: int, steps: int) -> nn.Module:
    """Bare PyTorch: an optimizer for each factor, with the head in both."""
    network = copy.deepcopy(module.backbone)
    learning = {name: p for name, p in network.named_parameters() if p.requires_grad}
    optimizers = [adam([p for name, p in learning.items() if f".lora_{rests}." not in name]) for rests in "AB"]
    for round in range(rounds):
        for _ in range(steps):
            network.zero_grad()
            cross_entropy(network(batch[0]), batch[1]).backward()
            optimizers[round % 2].step()
    return network


def test_one_client_alternates_alone() -> None:
    federation = fit(method_of(RoLoRA), data := one_batch(1), rounds=4, trainer=double)
    module = federation.run.model
    alone = loop(module, next(iter(data.client(0).train_dataloader())), 4, 3)
    expected = {f"backbone.{name}": p.detach() for name, p in alone.named_parameters()}
    assert_close(federation.run.server.state, {name: expected[name] for name in federation.run.server.state}, atol=1e-9)


def test_the_factor_that_rests_is_not_taken_back() -> None:
    method = method_of(RoLoRA)
    method.configure_model()
    [client] = new_texts(1, 60).clients
    server = method.configure_server([client])
    server.on_round_start(1, [client])
    sent = server.broadcast(client)
    with pytest.raises(FederationError, match=r"The update of client 0 holds .* and 1 more tensor, which does not belong there"):
        server.check(ClientUpdate(0, client.num_train, dict(sent.state), {"flops": 0.0}), sent, client)
    without = {name: tensor for name, tensor in sent.state.items() if ".lora_A." not in name}
    server.check(ClientUpdate(0, client.num_train, without, {"flops": 0.0}), sent, client)
