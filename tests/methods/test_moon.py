"""MOON against its paper."""

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from tiny import CLASSES, INFO, Net, NoisyNet, Recording, Tempered, momentum, new_data, new_trainer, private_states, same, sgd
from tiny_loops import batches, fixed, step, stripped
from tiny_rounds import assert_same_runs, fit
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from lightning_fed.core import weighted_mean
from lightning_fed.core.messages import Broadcast
from lightning_fed.engines.turn_loop import QUIET
from lightning_fed.methods import MOON, FedAvg
from lightning_fed.tensors import State

MU, T = 5.0, 0.5

moon = partial(MOON, mu=MU, temperature=T, optimizer=momentum)


def contrast(z: Tensor, received: Tensor, previous: Tensor) -> Tensor:
    """As the paper has it."""
    logits = torch.stack([cosine_similarity(z, other, dim=1) for other in (received, previous)], dim=1) / T
    return cross_entropy(logits, torch.zeros(len(z), dtype=torch.long))


def test_without_the_term_it_is_fedavg_bit_for_bit() -> None:
    ours, theirs = MOON(NoisyNet, CLASSES, 0.0, optimizer=momentum, epochs=2), FedAvg(NoisyNet, CLASSES, momentum, epochs=2)
    assert_same_runs(ours, theirs, "server", rounds=2)


def test_what_stays_is_the_last_model_and_who_is_absent_keeps_it() -> None:
    engine = Recording()
    federation = fit(moon(NoisyNet, CLASSES), rounds=3, participation=0.7, engine=engine)
    last = {update.client: update.state for update in engine.trained}
    states = private_states(federation)
    assert states.keys() == last.keys()
    for client, sent in last.items():
        kept = {name.removeprefix("previous.").replace("/", "."): tensor for name, tensor in states[client].items()}
        assert same(kept, sent)
    plain = FedAvg(NoisyNet, CLASSES).for_client(INFO)
    assert moon(NoisyNet, CLASSES).for_client(INFO).update_state().keys() == plain.update_state().keys()


def test_the_last_model_of_a_client_that_never_took_part_is_the_received_one() -> None:
    """So that its first turn is FedAvg's, however late."""
    federation = fit(moon(NoisyNet, CLASSES), rounds=1, participation=0.4)
    [absent, *_] = {0, 1, 2} - private_states(federation).keys()
    previous, state = federation.client_module(absent).previous, federation.run.server.state
    assert all(torch.equal(tensor, state[name]) for name, tensor in previous.items())


def in_a_second_turn(network: Any, **options: Any) -> tuple[MOON, nn.Module, nn.Module]:
    """A module in its phase, some way from what it received, and the two networks that it compares itself with."""
    module = moon(network, CLASSES, **options).for_client(INFO)
    networks = [copy.deepcopy(module.backbone).eval() for _ in range(2)]
    for other in networks:
        for tensor in other.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(torch.rand_like(tensor))
    received, previous = ({f"backbone.{name}": t for name, t in other.state_dict().items()} for other in networks)
    module.previous.update(previous)
    module.load_broadcast(Broadcast(received))
    new_trainer(**QUIET, max_epochs=1, limit_train_batches=0).fit(module, datamodule=new_data().client(1))
    module.phase = module.phases()[0]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module, networks[0], networks[1]


def test_the_gradient_is_that_of_the_papers_loss() -> None:
    """The two other networks are in eval mode, and none of it moves: neither they nor their statistics."""
    module, received, previous = in_a_second_turn(NoisyNet)
    x, y = torch.randn(8, 3, 4, 4), torch.arange(8) % CLASSES
    before = {name: tensor.clone() for name, tensor in (*module.previous.items(), *module.global_parameters.items())}
    modes = [layer.training for layer in module.modules()]
    own = list(module.backbone.parameters())
    torch.manual_seed(0)
    found = torch.autograd.grad(loss := module.moon_loss((x, y)), own)
    torch.manual_seed(0)
    z, logits = module.backbone.encode_and_classify(x)
    with torch.no_grad():
        others = received.encode(x), previous.encode(x)
    expected = cross_entropy(logits, y) + MU * contrast(z, *others)
    torch.testing.assert_close(loss, expected)
    for one, other in zip(found, torch.autograd.grad(expected, own), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert [layer.training for layer in module.modules()] == modes
    assert all(torch.equal(t, before[n]) for n, t in module.global_parameters.items())
    assert contrast(z, *others).item() != pytest.approx(math.log(2), abs=1e-3)
    assert not any(name.startswith("global_parameters") for name in module.state_dict())


def test_the_term_is_finite_at_any_temperature() -> None:
    module, *_ = in_a_second_turn(Net, temperature=1e-3)
    loss = module.moon_loss((torch.randn(8, 3, 4, 4), torch.arange(8) % CLASSES))
    grads = torch.autograd.grad(loss, list(module.backbone.parameters()))
    assert loss.isfinite()
    assert all(grad.isfinite().all() for grad in grads)


def test_a_loss_with_parameters_learns_beside_the_network() -> None:
    """It travels, and is no part of the last model."""
    federation = fit(moon(Net, CLASSES, loss=Tempered()), rounds=2)
    assert federation.run.server.state["task.loss.log_scale"] != 0
    assert all(name.startswith("previous.backbone/") for state in private_states(federation).values() for name in state)


def test_rounds_are_those_of_a_plain_loop() -> None:
    """Three clients, three rounds, two last models."""
    data = new_data(3, 120)
    found = fit(moon(fixed(Net), CLASSES, optimizer=sgd), data, rounds=3).run.server.state_dict()
    network, last = fixed(Net)(CLASSES), dict[int, nn.Module]()
    for round in (1, 2, 3):
        states: list[State] = []
        for client in range(3):
            own, previous = copy.deepcopy(network), last.get(client, network)
            optimizer = sgd(own.parameters())
            for x, y in batches(data, client, round, epoch=0):
                z, logits = own.encode_and_classify(x)
                with torch.no_grad():
                    others = network.encode(x), previous.encode(x)
                step(optimizer, cross_entropy(logits, y) + MU * contrast(z, *others))
            last[client] = own
            states.append(own.state_dict())
        network = copy.deepcopy(network)
        network.load_state_dict(weighted_mean(states, [info.num_train for info in data.clients]))
    torch.testing.assert_close(stripped(found), network.state_dict(), rtol=1e-3, atol=1e-5)
