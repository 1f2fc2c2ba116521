"""pFedMe against its paper."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from tiny import CLASSES, INFO, Net, NoisyNet, Recording, new_data, new_trainer, private_states, same, sgd
from tiny_loops import batches, fixed, mean_of, stripped
from tiny_rounds import UniformFedAvg, fit
from torch import Tensor
from torch.nn.functional import cross_entropy

from lightning_fed.engines.turn_loop import QUIET
from lightning_fed.methods import FedAvg, PFedMe

ETA, LAM, RATE, K = 0.1, 3.0, 0.05, 4

me = partial(PFedMe, lam=LAM, personal_lr=RATE, inner_steps=K, optimizer=sgd)
fit = partial(fit, rounds=2)


def test_rounds_and_personal_models_are_those_of_a_plain_loop() -> None:
    data = new_data(3, 120)
    federation = fit(me(fixed(Net), CLASSES), data)
    network, personal = fixed(Net)(CLASSES), {}
    for round in (1, 2):
        clients = []
        for client in range(3):
            clients.append(own := copy.deepcopy(network))
            for x, y in batches(data, client, round, epoch=0):
                theta = copy.deepcopy(own)
                for _ in range(K):
                    grads = torch.autograd.grad(cross_entropy(theta(x), y), list(theta.parameters()))
                    with torch.no_grad():
                        for t, w, grad in zip(theta.parameters(), own.parameters(), grads, strict=True):
                            t -= RATE * (grad + LAM * (t - w))
                with torch.no_grad():
                    for t, w in zip(theta.parameters(), own.parameters(), strict=True):
                        w -= ETA * LAM * (w - t)
            personal[client] = theta
        network.load_state_dict(mean_of(clients))
    torch.testing.assert_close(stripped(federation.run.server.state), network.state_dict(), rtol=1e-4, atol=1e-5)
    for client, theta in personal.items():
        found = federation.client_module(client).personal.state_dict()
        torch.testing.assert_close(found, theta.state_dict(), rtol=1e-4, atol=1e-5)
        own = data.client(client)
        x, y = own.data[own.splits[2]]
        assert federation.run.results[client]["test/accuracy"] == (theta(x).argmax(dim=1) == y).float().mean().item()


def test_without_a_pull_the_global_model_stays() -> None:
    engine = Recording()
    federation = fit(me(Net, CLASSES, lam=0.0), engine=engine)
    assert same(federation.run.server.state_dict(), engine.turns[0].broadcast.state)


def test_with_one_inner_step_it_is_fedavg_with_the_product_of_the_rates() -> None:
    ours = fit(me(Net, CLASSES, inner_steps=1)).run.server.state_dict()
    theirs = fit(UniformFedAvg(Net, CLASSES, partial(torch.optim.SGD, lr=ETA * LAM * RATE))).run.server.state_dict()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


class Quadratic(PFedMe):
    """A client whose loss is that of one number: h (θ - θ*)² / 2."""

    h, optimum = 2.0, 3.0

    def client_loss(self, batch: Any) -> Tensor:
        return self.h * (self.predictor.head.bias[0] - self.optimum).square() / 2


def test_a_quadratic_client_steps_along_the_gradient_of_its_envelope() -> None:
    """θ~ = (h θ* + λ w) / (h + λ), and w moves by η λ h / (h + λ) of its way."""
    module, w = Quadratic(Net, CLASSES, LAM, 0.1, 60, optimizer=sgd, steps=1).for_client(INFO), -1.0
    with torch.no_grad():
        module.backbone.head.bias[0] = w
    new_trainer(**QUIET, max_epochs=1, limit_val_batches=0).fit(module, datamodule=new_data().client(1))
    assert module.personal.head.bias[0].item() == pytest.approx((2 * 3 + LAM * w) / (2 + LAM), abs=1e-5)
    assert module.backbone.head.bias[0].item() == pytest.approx(w - ETA * LAM * 2 / (2 + LAM) * (w - 3), abs=1e-5)


@pytest.mark.parametrize("beta", [0.5, 2.0])
def test_the_server_moves_by_beta(beta: float) -> None:
    engine = Recording()
    whole, moved = (fit(me(NoisyNet, CLASSES, beta=b), rounds=1, engine=e).run for b, e in ((1.0, engine), (beta, Recording())))
    start, learning = engine.turns[0].broadcast.state, {name for name, _ in whole.model.named_parameters()}
    for name, tensor in whole.server.state.items():
        expected = torch.lerp(start[name], tensor, beta) if name in learning else tensor
        torch.testing.assert_close(moved.server.state[name], expected)
        assert name not in learning or not torch.equal(tensor, start[name])


def test_who_is_absent_does_not_train_and_predicts_with_what_is_sent() -> None:
    engine = Recording()
    federation = fit(me(NoisyNet, CLASSES), rounds=1, participation=0.4, engine=engine)
    cohort = {update.client for update in engine.trained}
    assert private_states(federation).keys() == cohort
    plain = FedAvg(NoisyNet, CLASSES).for_client(INFO).update_state().keys()
    assert all(update.state.keys() == plain for update in engine.trained)
    [absent, *_] = {0, 1, 2} - cohort
    assert same(federation.client_module(absent).export_state(), federation.run.server.state_dict())
    for update in engine.trained:  # statistics are those of what was trained
        personal = federation.client_module(update.client).personal.norm.running_mean
        assert torch.equal(update.state["backbone.norm.running_mean"], personal)
        assert not torch.equal(personal, engine.turns[0].broadcast.state["backbone.norm.running_mean"])
