"""FedProx against its paper."""

from functools import partial
from typing import Any

import pytest
import torch
from tiny import CLASSES, INFO, Net, NoisyNet, momentum, new_data, new_trainer, same, sgd, without_seconds
from tiny_rounds import fit
from torch import Tensor

from lightning_fed.core.module import FederatedModule
from lightning_fed.engines.turn_loop import QUIET
from lightning_fed.methods import FedAvg, FedProx


def received(model: FederatedModule) -> FederatedModule:
    """A client's module that has just taken over what the server sent, in its only phase."""
    module = model.for_client(INFO)
    new_trainer(**QUIET, max_epochs=1, limit_train_batches=0).fit(module, datamodule=new_data().client(1))
    module.phase = module.phases()[0]
    return module


def test_without_the_term_it_is_fedavg_bit_for_bit() -> None:
    ours, theirs = (
        fit(model, rounds=3, evaluate_every=1)
        for model in (FedProx(NoisyNet, CLASSES, 0.0, optimizer=momentum, epochs=2), FedAvg(NoisyNet, CLASSES, momentum, epochs=2))
    )
    assert same(ours.run.server.state_dict(), theirs.run.server.state_dict())
    assert without_seconds(ours.run.history) == without_seconds(theirs.run.history)


def test_the_gradient_that_is_added_is_mu_times_the_drift() -> None:
    module, batch = received(FedProx(Net, CLASSES, 0.7)), (torch.randn(8, 3, 4, 4), torch.arange(8) % CLASSES)
    start = {name: p.detach().clone() for name, p in module.named_parameters()}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter))
    assert all(torch.equal(tensor, start[name]) for name, tensor in module.global_parameters.items())
    own = dict(module.named_parameters())
    assert torch.equal(module.phase.loss(batch), module.client_loss(batch))  # a penalty: of no example, and logged separately
    added = torch.autograd.grad(module.phase.penalty(), list(own.values()))
    for (name, parameter), gradient in zip(own.items(), added, strict=True):
        torch.testing.assert_close(gradient, 0.7 * (parameter.detach() - start[name]), rtol=1e-4, atol=1e-5)


class Quadratic(FedProx):
    """A client whose loss is that of one number: h (w - w*)² / 2."""

    h, optimum = 3.0, 2.0

    def client_loss(self, batch: Any) -> Tensor:
        return self.h * (self.backbone.head.bias[0] - self.optimum).square() / 2


@pytest.mark.parametrize("mu", [0.0, 1.0, 6.0])
def test_a_quadratic_client_ends_between_its_optimum_and_the_start(mu: float) -> None:
    """(h w* + mu w_t) / (h + mu)."""
    module = Quadratic(Net, CLASSES, mu, optimizer=partial(torch.optim.SGD, lr=0.1), epochs=50).for_client(INFO)
    with torch.no_grad():
        module.backbone.head.bias[0] = -1.0
    new_trainer(**QUIET, max_epochs=50, limit_val_batches=0).fit(module, datamodule=new_data().client(1))
    expected = (3.0 * 2.0 + mu * -1.0) / (3.0 + mu)
    assert module.backbone.head.bias[0].item() == pytest.approx(expected, abs=1e-5)


class FrozenBody(FedProx):
    def build(self) -> None:
        super().build()
        self.backbone.fc1.requires_grad_(False)


def test_only_what_learns_is_held() -> None:
    """Neither buffers nor frozen tensors; and the copies are in no state."""
    module = FrozenBody(NoisyNet, CLASSES).for_client(INFO)
    parameters = {name for name, _ in module.named_parameters()}
    assert set(module.global_parameters) == parameters - {"backbone.fc1.weight", "backbone.fc1.bias"}
    assert not any("received" in name for name in module.state_dict())


def test_a_new_fit_of_a_trained_module_starts_from_where_it_is() -> None:
    module, data = FedProx(Net, CLASSES, 0.5, optimizer=sgd).for_client(INFO), new_data().client(1)
    for _ in range(2):
        before = {name: p.detach().clone() for name, p in module.named_parameters()}
        new_trainer(**QUIET, max_epochs=1, limit_val_batches=0).fit(module, datamodule=data)
        assert all(torch.equal(tensor, before[name]) for name, tensor in module.global_parameters.items())


def test_a_checkpoint_of_a_plain_fit_remembers_the_start() -> None:
    """Resumed, it is held near where the fit began, not near where it was stopped."""
    module, data = FedProx(Net, CLASSES, 0.5, optimizer=sgd, epochs=4).for_client(INFO), new_data().client(1)
    start = {name: p.detach().clone() for name, p in module.named_parameters()}
    trainer = new_trainer(**QUIET, max_epochs=1, limit_val_batches=0)
    trainer.fit(module, datamodule=data)
    trainer.save_checkpoint("stopped.ckpt")
    resumed = FedProx(Net, CLASSES, 0.5, optimizer=sgd, epochs=4).for_client(INFO, seed=1)
    new_trainer(**QUIET, max_epochs=2, limit_val_batches=0).fit(resumed, datamodule=data, ckpt_path="stopped.ckpt")
    assert all(torch.equal(tensor, start[name]) for name, tensor in resumed.global_parameters.items())
