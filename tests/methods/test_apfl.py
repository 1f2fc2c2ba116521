"""APFL: a global model that does not notice the personal ones, and personal ones that learn within a mixture."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from tiny import CLASSES, INFO, Net, NoisyNet, Recording, momentum, new_data, private_states, same, sgd
from tiny_loops import batches, fixed
from tiny_rounds import fit
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from lightning_fed.core import FineTuning, weighted_mean
from lightning_fed.methods import APFL, FedAvg, Standalone
from lightning_fed.privacy import ExampleDP
from lightning_fed.tensors import State

fit = partial(fit, rounds=2)


def mixed(v: State, w: State, alpha: float) -> State:
    return {name: alpha * tensor + (1 - alpha) * w[name] for name, tensor in v.items()}


@pytest.mark.parametrize(("alpha", "alpha_lr"), [(0.0, 0.0), (0.3, 0.5), (1.0, 0.0)])
def test_the_global_model_is_fedavgs_bit_for_bit(alpha: float, alpha_lr: float) -> None:
    """With dropout and batch norm, of which the mixture has its own."""
    ours = fit(APFL(NoisyNet, CLASSES, alpha, alpha_lr, optimizer=momentum, epochs=2), participation=0.7)
    theirs = fit(FedAvg(NoisyNet, CLASSES, momentum, epochs=2), participation=0.7)
    assert same(ours.run.server.state_dict(), theirs.run.server.state_dict())


def test_with_alpha_0_clients_predict_with_the_global_model_and_with_1_alone() -> None:
    federation = fit(APFL(NoisyNet, CLASSES, 0.0, optimizer=momentum))
    for client in range(3):
        assert same(federation.client_module(client).export_state(), federation.run.server.state_dict())
    ours, theirs = fit(APFL(fixed(Net), CLASSES, 1.0, optimizer=momentum)), fit(Standalone(fixed(Net), CLASSES, momentum))
    for client in range(3):
        assert same(ours.client_module(client).export_state(), dict(theirs.client_module(client).state_dict()))
    assert ours.run.results == theirs.run.results


def test_gradients_are_those_of_the_formulas() -> None:
    """α∇f(v̄) in v, ⟨v - w, ∇f(v̄)⟩ in α, ∇f(w) in w: weights are mixed, and not logits."""
    module, batch = (
        APFL(Net, CLASSES, 0.3, 1.0, optimizer=sgd).for_client(INFO),
        (torch.randn(8, 3, 4, 4), torch.arange(8) % CLASSES),
    )
    with torch.no_grad():
        for parameter in module.personal.parameters():
            parameter.add_(torch.randn_like(parameter))
    w, v = (dict(network.named_parameters()) for network in (module.backbone, module.personal))
    point = {name: t.detach().requires_grad_() for name, t in mixed(v, w, 0.3).items()}
    loss = cross_entropy(functional_call(module.personal, point, (batch[0],)), batch[1])
    at_mixture = dict(zip(point, torch.autograd.grad(loss, list(point.values())), strict=True))
    at_global = torch.autograd.grad(cross_entropy(module.backbone(batch[0]), batch[1]), list(w.values()))
    module.joint_loss(batch).backward()
    for (name, parameter), expected in zip(w.items(), at_global, strict=True):
        assert torch.equal(parameter.grad, expected)
        torch.testing.assert_close(v[name].grad, 0.3 * at_mixture[name])
    along = sum(((v[name] - w[name]) * grad).sum() for name, grad in at_mixture.items())
    torch.testing.assert_close(module.alpha.grad, along)


@pytest.mark.parametrize("alpha_lr", [0.0, 0.4])
def test_rounds_are_those_of_a_plain_loop(alpha_lr: float) -> None:
    """v's step is at the mixture of before the step, and α's is the first of a turn alone."""
    data, rate = new_data(3, 120), 0.1
    federation = fit(APFL(fixed(Net), CLASSES, 0.6, alpha_lr, optimizer=sgd), data, rounds=3)
    network = fixed(Net)(CLASSES)
    own, alphas = [{n: p.detach().clone() for n, p in network.named_parameters()} for _ in range(3)], [0.6] * 3
    for round in (1, 2, 3):
        states: list[State] = []
        for client in range(3):
            local = copy.deepcopy(network)
            for step, (x, y) in enumerate(batches(data, client, round, epoch=0)):
                w, v, alpha = dict(local.named_parameters()), own[client], alphas[client]
                point = {name: t.detach().requires_grad_() for name, t in mixed(v, w, alpha).items()}
                loss = cross_entropy(functional_call(local, point, (x,)), y)
                grads = dict(zip(point, torch.autograd.grad(loss, list(point.values())), strict=True))
                steps = torch.autograd.grad(cross_entropy(local(x), y), list(w.values()))
                if step == 0:
                    along = sum(((v[name] - w[name]) * grad).sum().item() for name, grad in grads.items())
                    alphas[client] = min(1.0, max(0.0, alpha - alpha_lr * along))
                with torch.no_grad():
                    own[client] = {name: t - rate * alpha * grads[name] for name, t in v.items()}
                    for parameter, grad in zip(w.values(), steps, strict=True):
                        parameter -= rate * grad
            states.append(local.state_dict())
        network = copy.deepcopy(network)
        network.load_state_dict(weighted_mean(states, [info.num_train for info in data.clients]))
    for client in range(3):
        module = federation.client_module(client)
        assert module.alpha.item() == pytest.approx(alphas[client], abs=1e-5)
        for name, tensor in module.export_state().items():
            expected = mixed(own[client], dict(network.state_dict()), alphas[client])[name.removeprefix("backbone.")]
            torch.testing.assert_close(tensor.detach(), expected, rtol=1e-4, atol=1e-5)
    assert (len(set(alphas)) > 1) == bool(alpha_lr)


def test_alpha_stays_between_0_and_1() -> None:
    """Far steps end at a side, and the network of a client is of consequence for the next step of it."""
    federation = fit(APFL(Net, CLASSES, 0.5, 1e6, optimizer=sgd))
    alphas = [state["alpha"].item() for state in private_states(federation).values()]
    assert set(alphas) <= {0.0, 1.0}


def test_private_gradients_have_noise_for_alpha_in_the_first_step_of_a_turn_alone() -> None:
    privacy = ExampleDP(clip=1.0, delta=1e-3, noise_multiplier=1.0)
    runs = [fit(APFL(Net, CLASSES, 0.5, 0.1, optimizer=sgd, epochs=e), rounds=1, privacy=privacy) for e in (1, 3)]
    short, long = ([state["alpha"].item() for state in private_states(run).values()] for run in runs)
    assert short == long
    assert 0.5 not in short


def test_networks_and_alpha_of_clients_are_in_no_message() -> None:
    engine = Recording()
    fit(APFL(NoisyNet, CLASSES, 0.5, 0.1, optimizer=sgd), engine=engine)
    plain = FedAvg(NoisyNet, CLASSES).for_client(INFO).update_state().keys()
    assert all(update.state.keys() == plain for update in engine.trained)
    assert all(turn.broadcast.state.keys() == plain for turn in engine.turns)


def test_fine_tuning_leaves_alpha() -> None:
    """It tunes the client's network within its mixture."""
    options: Any = {"optimizer": sgd, "fine_tuning": FineTuning(epochs=2)}
    tuned, plain = (fit(APFL(Net, CLASSES, 0.5, 0.3, **each)) for each in (options, {"optimizer": sgd}))
    for client in range(3):
        one, other = (each.client_module(client) for each in (tuned, plain))
        assert torch.equal(one.alpha, other.alpha)
        assert not same(one.export_state(), other.export_state())
