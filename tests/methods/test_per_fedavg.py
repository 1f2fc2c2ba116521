"""Per-FedAvg on whole networks: rounds against loops written out here. Its gradients are tried with test_per_fedavg_lora.py."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import CLASSES, INFO, Net, NoisyNet, StillNet, new_data, new_federation, new_trainer, same, sgd
from tiny_loops import batches, fixed, grads, loss_at, mean_of, stripped
from tiny_rounds import UniformFedAvg, assert_same_runs, fit
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from lightning_fed.core import FederationError, FineTuning
from lightning_fed.data import IID
from lightning_fed.engines.turn_loop import QUIET
from lightning_fed.methods import FedAvg, PerFedAvg, PerFedAvgLoRA
from lightning_fed.methods.families.lora import LoRAModule
from lightning_fed.tensors import State

ALPHA, BETA = 0.2, 0.1

per = partial(PerFedAvg, optimizer=sgd, steps=3)


class SecondOfTwo(UniformFedAvg):
    """FedAvg that looks at every second batch."""

    batches_per_step = 2

    def compute_gradients(self, batch: Any) -> Tensor:
        return super().compute_gradients(batch[1])


@pytest.mark.parametrize("hessian", ["exact", "finite_difference", "first_order"])
def test_without_adaptation_it_is_fedavg_bit_for_bit(hessian: Any) -> None:
    assert_same_runs(per(StillNet, CLASSES, 0.0, hessian), SecondOfTwo(StillNet, CLASSES, sgd, steps=3), "server", rounds=2)


def meta_gradient(network: nn.Module, support: Any, query: Any, hessian: str) -> State:
    """G with D'' = D, by the formulas; the network stays where it is."""
    point = {name: p.detach().clone().requires_grad_() for name, p in network.named_parameters()}

    first = grads(loss_at(network, point, support), point, graph=True)
    adapted = {name: tensor - ALPHA * first[name] for name, tensor in point.items()}
    if hessian == "exact":
        return grads(loss_at(network, adapted, query), point)
    still = {name: tensor.detach().requires_grad_() for name, tensor in adapted.items()}
    g = grads(loss_at(network, still, query), still)
    if hessian == "first_order":
        return g
    ahead, behind = (
        grads(loss_at(network, moved := {n: (t + d * g[n]).detach().requires_grad_() for n, t in point.items()}, support), moved)
        for d in (1e-3, -1e-3)
    )
    return {name: tensor - ALPHA * (ahead[name] - behind[name]) / 2e-3 for name, tensor in g.items()}


@pytest.mark.parametrize("hessian", ["exact", "finite_difference", "first_order"])
def test_rounds_are_those_of_a_plain_loop(hessian: Any) -> None:
    """In particular each step begins where the one before ended, not where the network was adapted to."""
    data = new_data(3, 120, batch_size=8)
    found = fit(per(fixed(Net), CLASSES, ALPHA, hessian, steps=None), data, rounds=2).run.server.state_dict()
    network = fixed(Net)(CLASSES)
    for round in (1, 2):
        clients = []
        for client in range(3):
            clients.append(own := copy.deepcopy(network))
            loader = list(batches(data, client, round, epoch=0))
            for support, query in zip(loader[::2], loader[1::2], strict=False):
                step = meta_gradient(own, support, query, hessian)
                with torch.no_grad():
                    for name, parameter in own.named_parameters():
                        parameter -= BETA * step[name]
        network.load_state_dict(mean_of(clients))
    tolerance = 1e-3 if hessian == "finite_difference" else 1e-5
    torch.testing.assert_close(stripped(found), network.state_dict(), rtol=tolerance, atol=tolerance)


class AttentionNet(Net):
    """With PyTorch's fused attention, which has no second derivative."""

    def __init__(self, num_classes: int = CLASSES) -> None:
        super().__init__(num_classes)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def encode(self, x: Tensor, cut: str = "features") -> Tensor:
        rows = super().encode(x).unsqueeze(1)
        return rows.squeeze(1) + self.attention(rows, rows, rows, need_weights=False)[0].squeeze(1)


def test_attention_is_differentiated_twice() -> None:
    exact, close = (
        fit(per(AttentionNet, CLASSES, ALPHA, hessian), trainer=partial(new_trainer, precision="64-true")).run.server.state_dict()
        for hessian in ("exact", "finite_difference")
    )
    torch.testing.assert_close(exact, close, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("hessian", ["exact", "finite_difference", "first_order"])
@pytest.mark.parametrize("count", [2, 3])
def test_statistics_of_batch_norm_move_once_in_a_step(hessian: Any, count: Any) -> None:
    """By the batch of the outer gradient, at the adapted point; nothing is left of what is thrown away."""
    module, data = per(StillNet, CLASSES, ALPHA, hessian, batches=count, steps=1).for_client(INFO), new_data(batch_size=6)
    start = copy.deepcopy(module.backbone)
    trainer = new_trainer(**QUIET, max_epochs=1, limit_val_batches=0)
    trainer.fit(module, datamodule=data.client(1))
    support, query, *_ = data.client(1).train_dataloader()
    assert module.backbone.norm.num_batches_tracked.item() == 1
    stepped = copy.deepcopy(start)
    with torch.no_grad():
        step = torch.autograd.grad(seen(stepped, support), list(stepped.parameters()))
        for parameter, grad in zip(stepped.parameters(), step, strict=True):
            parameter -= ALPHA * grad
    stepped.norm.load_state_dict({**stepped.norm.state_dict(), **dict(start.norm.named_buffers())})
    seen(stepped, query)
    torch.testing.assert_close(module.backbone.norm.running_mean, stepped.norm.running_mean, rtol=1e-5, atol=1e-6)


def seen(network: nn.Module, batch: Any) -> Tensor:
    """The loss of a batch in train mode."""
    with torch.enable_grad():
        return cross_entropy(network(batch[0]), batch[1])


def test_what_is_monitored_is_adapted_on_training_data_and_leaves_nothing_behind() -> None:
    often, seldom = (fit(per(NoisyNet, CLASSES, ALPHA), rounds=3, evaluate_every=every).run for every in (1, 0))
    assert often.metric == "adapted_accuracy"
    assert same(often.server.state_dict(), seldom.server.state_dict())
    assert often.results == seldom.results
    assert {"test/accuracy", "test/adapted_accuracy"} <= often.results[0].keys()
    still = fit(per(NoisyNet, CLASSES, 0.0), rounds=1).run.results
    assert all(results["test/accuracy"] == results["test/adapted_accuracy"] for results in still.values())


def test_a_client_is_measured_after_a_step_on_its_training_data() -> None:
    """And not on its test data, as in public code, which then has seen their labels."""
    data = new_data(2, 120, partition=IID(), batch_size=200, test_share=0.4)  # one batch of all, whatever its order
    run, network = fit(per(Net, CLASSES, 2.0), data).run, Net(CLASSES)
    network.load_state_dict({name.removeprefix("backbone."): tensor for name, tensor in run.server.state.items()})
    for client, measured in run.results.items():
        own, accuracies = data.client(client), []
        x, y = own.data[own.splits[2]]
        for split in (0, 2):
            loss, parameters = seen(network, own.data[own.splits[split]]), dict(network.named_parameters())
            steps = zip(parameters.items(), torch.autograd.grad(loss, list(parameters.values())), strict=True)
            adapted = {name: parameter - 2.0 * grad for (name, parameter), grad in steps}
            accuracies.append((functional_call(network, adapted, (x,)).argmax(dim=1) == y).float().mean().item())
        assert measured["test/adapted_accuracy"] == pytest.approx(accuracies[0])
        assert accuracies[0] != accuracies[1]


def test_what_is_adapted_to_is_a_batch_as_training_sees_it() -> None:
    """Of the Trainer's precision, and prepared once."""
    data, prepared = new_data().client(1), []
    prepare = data.transform
    data.transform = lambda batch, trainer: prepared.append(batch) or prepare(batch, trainer)
    new_trainer(**QUIET, precision="64-true").test(per(Net, CLASSES, ALPHA).for_client(INFO), datamodule=data)
    assert len(prepared) == 1 + len(data.test_dataloader())


def test_without_training_data_it_is_not_measured() -> None:
    own = new_data().client(1)
    with pytest.raises(FederationError, match=r"PerFedAvg adapts to training data .* but got data loaders: .* datamodule"):
        new_trainer(**QUIET).test(per(Net, CLASSES, ALPHA).for_client(INFO), own.test_dataloader())


def test_what_travels_is_fedavgs_and_lora_is_a_use_of_it() -> None:
    ours, plain = (method(NoisyNet, CLASSES).for_client(INFO) for method in (PerFedAvg, FedAvg))
    assert ours.update_state().keys() == plain.update_state().keys()
    assert not ours.private_state()
    assert issubclass(PerFedAvgLoRA, PerFedAvg)
    assert issubclass(PerFedAvgLoRA, LoRAModule)
    with pytest.raises(FederationError, match=r"PerFedAvg has a training step of its own, .* leave fine_tuning out"):
        per(Net, CLASSES, fine_tuning=FineTuning())


def test_predictions_are_the_adapted_models(tmp_path: Path) -> None:
    """Which are what is monitored: as many are right as were measured."""
    federation = new_federation(1, run_dir=tmp_path)
    data = partial(new_data, 2, 120, partition=IID(), batch_size=200)  # one batch of all to adapt to, whatever its order
    federation.fit(per(Net, CLASSES, adaptation_lr=0.5), data())
    rows = new_federation(1, run_dir=tmp_path).predict(per(Net, CLASSES, adaptation_lr=0.5), data(), tmp_path / "p.csv")
    for client, measured in federation.run.results.items():
        right = [row["target"] == row["prediction"] for row in rows if row["client"] == client]
        assert sum(right) / len(right) == pytest.approx(measured["test/adapted_accuracy"])
