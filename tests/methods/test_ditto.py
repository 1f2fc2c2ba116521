"""Ditto: a global model that does not notice the personal ones, and personal ones that stay near it."""

from functools import partial
from typing import Any

import pytest
import torch
from tiny import CLASSES, INFO, Net, NoisyNet, Recording, momentum, new_data, new_federation, new_trainer, private_states, same, sgd
from tiny_loops import fixed
from tiny_rounds import fit

from lightning_fed.engines.turn_loop import QUIET
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import Ditto, FedAvg, PFedSD, Standalone
from lightning_fed.tensors import State
from lightning_fed.testing.toys import PartlyFrozenNet

fit = partial(fit, rounds=3)


def personal(federation: Federation, client: int) -> State:
    """A client's own network, as it would be measured."""
    return dict(federation.client_module(client).personal.state_dict())


@pytest.mark.often(1)
@pytest.mark.parametrize("lam", [0.1, 0.0, 2.0])
def test_the_global_model_is_fedavgs_bit_for_bit(lam: float) -> None:
    ours = fit(Ditto(NoisyNet, CLASSES, lam, optimizer=momentum, epochs=2), participation=0.7)
    theirs = fit(FedAvg(NoisyNet, CLASSES, momentum, epochs=2), participation=0.7)
    assert same(ours.run.server.state_dict(), theirs.run.server.state_dict())
    losses = [[row["train/local_loss"] for row in federation.run.history] for federation in (ours, theirs)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("method", [Ditto, PFedSD])
def test_what_is_frozen_is_the_same_in_both_networks(method: type[Ditto | PFedSD]) -> None:
    """A personal model that learns on other frozen features than the global one would not begin as its copy."""
    module = method(PartlyFrozenNet, CLASSES).for_client(INFO)
    assert same(dict(module.personal.state_dict()), dict(module.backbone.state_dict()))


def test_without_the_term_personal_models_are_standalones_bit_for_bit() -> None:
    """From a common start; the global model is not trained here, so that the orders of batches are those of Standalone."""
    ours = fit(Ditto(fixed(Net), CLASSES, 0.0, optimizer=momentum, epochs=0, personal_epochs=2))
    theirs = fit(Standalone(fixed(Net), CLASSES, momentum, epochs=2))
    for client in range(3):
        alone = theirs.client_module(client).backbone.state_dict()
        assert same(personal(ours, client), dict(alone))
    assert ours.run.results == theirs.run.results


def test_the_gradient_that_is_added_is_lambda_times_the_distance_from_the_broadcast() -> None:
    """Not from the global model that was just trained."""
    module = Ditto(Net, CLASSES, 0.7, optimizer=sgd, personal_epochs=0).for_client(INFO)
    sent = {name: p.detach().clone() for name, p in module.backbone.named_parameters()}
    new_trainer(**QUIET, max_epochs=1, limit_val_batches=0).fit(module, datamodule=new_data().client(1))
    assert not any(torch.equal(p, sent[name]) for name, p in module.backbone.named_parameters())
    batch = (torch.randn(8, 3, 4, 4), torch.arange(8) % CLASSES)
    own = dict(module.personal.named_parameters())
    with torch.no_grad():
        for parameter in own.values():
            parameter.add_(torch.randn_like(parameter))
    _, phase = module.phases()
    assert torch.equal(phase.loss(batch), module.client_loss(batch))  # a penalty: of no example, and logged separately
    added = torch.autograd.grad(phase.penalty(), list(own.values()))
    for (name, parameter), gradient in zip(own.items(), added, strict=True):
        torch.testing.assert_close(gradient, 0.7 * (parameter.detach() - sent[name]), rtol=1e-4, atol=1e-5)


def test_it_starts_from_the_initial_model_or_from_the_first_broadcast() -> None:
    """Who did not take part yet is measured with a copy, buffers included, and nothing is stored."""
    data = new_data(3, 120)
    for start in ("initial", "first_broadcast"):
        engine = Recording()
        federation = new_federation(1, participation=0.5, evaluate_every=1, engine=engine)
        federation.fit(Ditto(NoisyNet, CLASSES, start=start, optimizer=sgd), data)
        [absent, *_] = {0, 1, 2} - {turn.client.id for turn in engine.turns if turn.verb == "fit"}
        initial, now = engine.turns[0].broadcast.state, federation.run.server.state_dict()
        expected = initial if start == "initial" else now
        assert not same(initial, now)
        assert same({f"backbone.{name}": t for name, t in personal(federation, absent).items()}, expected)
        assert absent not in private_states(federation)


@pytest.mark.parametrize("start", ["initial", "first_broadcast"])
def test_how_often_is_measured_makes_no_difference_to_the_start(start: Any) -> None:
    often, seldom = (
        fit(Ditto(Net, CLASSES, start=start, optimizer=sgd), rounds=4, participation=0.4, evaluate_every=every) for every in (1, 0)
    )
    ours, theirs = private_states(often), private_states(seldom)
    assert ours.keys() == theirs.keys()
    assert all(same(ours[client], theirs[client]) for client in ours)
    assert often.run.results == seldom.run.results


def test_alone_it_starts_from_its_own_global_model() -> None:
    module = Ditto(Net, CLASSES)
    module.configure_model()
    assert same(dict(module.personal.state_dict()), dict(module.backbone.state_dict()))
