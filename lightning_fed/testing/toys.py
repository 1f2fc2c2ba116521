"""Networks, data and federations that are small enough for a round to take a fraction of a second."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, relu

from lightning_fed.data import InMemory, Partitioner
from lightning_fed.data.partition.pools import Indices, cut
from lightning_fed.federation.federation import Federation
from lightning_fed.models import Backbone
from lightning_fed.models.backbone import scaled

CLASSES = 4
PIXELS = 3 * 4 * 4

sgd = partial(torch.optim.SGD, lr=0.1)
momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
new_trainer = partial(L.Trainer, accelerator="cpu", devices=1)
quick_trainer = partial(new_trainer, limit_val_batches=0)
"""Evaluates on validation data, too, which takes as long as on test data."""


class Net(Backbone):
    """Two linear layers and a head, for images of 3×4×4 pixels; it can be made narrower and factorized."""

    def __init__(self, num_classes: int = CLASSES, hidden: int = 5, width: float = 1.0) -> None:
        super().__init__()
        hidden, features = scaled(hidden, width), scaled(6, width)
        self.fc1 = nn.Linear(PIXELS, hidden)
        self.fc2 = nn.Linear(hidden, features)
        self.head = nn.Linear(features, num_classes)

    @property
    def factorizable(self) -> list[str]:
        return ["fc1", "fc2"]

    @property
    def cuts(self) -> Mapping[str, int]:
        return {"fc1": self.fc1.out_features, **super().cuts}

    def encode(self, x: Tensor, cut: str = "features") -> Tensor:
        x = relu(self.fc1(x.flatten(1)))
        return x if cut == "fc1" else relu(self.fc2(x))

    def classify(self, representation: Tensor, cut: str = "features") -> Tensor:
        return self.head(relu(self.fc2(representation)) if cut == "fc1" else representation)


class WideNet(Net):
    """Another architecture with the same number of features."""

    def __init__(self, num_classes: int = CLASSES) -> None:
        super().__init__(num_classes, hidden=7)


class NoisyNet(Net):
    """A network with all layers that differ between train and eval mode: batch norm, with its integer counter, and dropout."""

    def __init__(self, num_classes: int = CLASSES, width: float = 1.0) -> None:
        super().__init__(num_classes, width=width)
        self.norm = nn.BatchNorm1d(self.head.in_features)

    def encode(self, x: Tensor, cut: str = "features") -> Tensor:
        return dropout(self.norm(super().encode(x, "features")), 0.5, self.training)


class PartlyFrozenNet(NoisyNet):
    """The same network with a frozen first layer."""

    def __init__(self, num_classes: int = CLASSES, width: float = 1.0) -> None:
        super().__init__(num_classes, width=width)
        self.fc1.requires_grad_(False)


@dataclass(frozen=True)
class Growing(Partitioner):
    """Client k holds a share proportional to k + 1, so that weighted and unweighted means differ."""

    def split(self, members: list[Indices], num_clients: int, rng: np.random.Generator) -> list[Indices]:
        shares = np.arange(1, num_clients + 1) / np.arange(1, num_clients + 1).sum()
        return cut(rng.permutation(np.concatenate(members)), shares)


def new_data(num_clients: int = 4, size: int = 200, dtype: torch.dtype = torch.float32, **options: Any) -> InMemory:
    """Noisy copies of one pattern per class, as floats, which the network gets unchanged."""
    stream = torch.Generator().manual_seed(1)
    labels = torch.arange(size) % CLASSES
    patterns = torch.randn(CLASSES, 3, 4, 4, generator=stream)
    images = patterns[labels] + torch.randn(size, 3, 4, 4, generator=stream)
    settings: dict[str, Any] = {"partition": Growing(), "batch_size": 16} | options
    return InMemory(images.to(dtype), labels, CLASSES, num_clients=num_clients, **settings)


def new_federation(rounds: int = 2, run_dir: Path | str | None = None, **options: Any) -> Federation:
    """A silent federation on the CPU. It writes nothing without ``run_dir``, and evaluates on test data only; with
    :data:`new_trainer` on validation data, too.
    """
    settings: dict[str, Any] = {"logger": False, "progress": False, "trainer": quick_trainer} | options
    return Federation(rounds=rounds, run_dir=run_dir, **settings)
