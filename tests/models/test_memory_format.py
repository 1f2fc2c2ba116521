"""Convolutional weights are channels-last: convolutions are faster so, and compute the same."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import momentum, new_federation, sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_fed.data import IID, InMemory
from lightning_fed.engines import Engine, InProcess, Processes
from lightning_fed.methods import FedAvg, PFedLoRA
from lightning_fed.models import CNN1, CNN5, FedAvgCNN, FedProtoCNN, LeNet5, ResNet8


def weights(network: nn.Module) -> list[Tensor]:
    return [layer.weight for layer in network.modules() if isinstance(layer, nn.Conv2d)]


def are_channels_last(network: nn.Module) -> bool:
    return all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights(network))


@pytest.mark.parametrize("new_network", [CNN1, CNN5, LeNet5, FedAvgCNN, FedProtoCNN, ResNet8])
def test_it_changes_results_by_rounding_alone(new_network: Callable[..., nn.Module]) -> None:
    network = new_network(10).double().eval()
    assert are_channels_last(network)
    contiguous = copy.deepcopy(network).to(memory_format=torch.contiguous_format)
    assert not are_channels_last(contiguous)
    images, labels = torch.rand(8, 3, 32, 32, dtype=torch.float64), torch.arange(8)
    logits, expected = network(images), contiguous(images)
    torch.testing.assert_close(logits, expected)
    gradients = torch.autograd.grad(cross_entropy(logits, labels), list(network.parameters()))
    torch.testing.assert_close(gradients, torch.autograd.grad(cross_entropy(expected, labels), list(contiguous.parameters())))


@pytest.mark.parametrize("limit", [2048, 1e-5], ids=["in memory", "on disk"])
def test_moments_keep_it_wherever_they_are_kept(limit: float) -> None:
    """In half precision a step with moments in another layout is rounded otherwise."""
    layouts = []

    class Watched(FedAvg):
        def client_step(self, batch: Any) -> Tensor:
            state = self.progress.optimizer.optimizer.state  # type: ignore[union-attr]
            layouts.append([moments["momentum_buffer"].stride() == p.stride() for p, moments in state.items() if p.dim() == 4])
            return super().client_step(batch)

    data = InMemory(torch.rand(16, 3, 32, 32), torch.arange(16) % 4, num_classes=4, num_clients=2, partition=IID(), batch_size=8)
    federation = new_federation(2, evaluate_every=0, store_limit_mb=limit)
    federation.fit(Watched(LeNet5, optimizer=momentum, persistent=True), data)
    assert any(layouts)
    assert all(itertools.chain(*layouts))


class Fussy(LeNet5):
    """A network that computes with channels-last weights alone."""

    def encode(self, x: Tensor, cut: str = "features") -> Tensor:
        assert are_channels_last(self), "other weights came back from somewhere"
        return super().encode(x, cut)


@pytest.mark.often(1)
@pytest.mark.parametrize("method", [FedAvg, PFedLoRA])
@pytest.mark.parametrize("engine", [InProcess(), Processes(workers=1)])
def test_clients_keep_it_from_round_to_round(engine: Engine, method: type[FedAvg | PFedLoRA]) -> None:
    data = InMemory(torch.rand(64, 3, 32, 32), torch.arange(64) % 4, num_classes=4, num_clients=2, partition=IID(), batch_size=8)
    for rounds in (2, 3):  # the second run goes on from the first one's checkpoint
        federation = new_federation(rounds, engine=engine, run_dir="runs", evaluate_every=1)
        federation.fit(method(Fussy, optimizer=sgd), data, "last" if rounds == 3 else None)
    assert len(federation.run.history) == 3
    assert are_channels_last(federation.client_module(0))
