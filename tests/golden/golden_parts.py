"""What golden runs are made of: data, networks and callbacks that use public names of the library alone, so that they mean the same
on both sides of a comparison.
"""

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, relu

from lightning_fed.callbacks import FederationCallback
from lightning_fed.data import InMemory, Partitioner
from lightning_fed.models import Backbone, TransformerClassifier, VisionTransformer

CLASSES = 4
PIXELS = 3 * 4 * 4
VAL_SHARE, TEST_SHARE = 0.2, 0.3


@dataclass(frozen=True)
class Growing(Partitioner):
    """Client k holds a share proportional to k + 1, so that weighted and unweighted means differ."""

    def split(self, members: list[Any], num_clients: int, rng: np.random.Generator) -> list[Any]:
        ends = np.cumsum(np.arange(1, num_clients + 1)) / np.arange(1, num_clients + 1).sum()
        order = rng.permutation(np.concatenate(members))
        return np.split(order, np.rint(ends[:-1] * len(order)).astype(int))


class Images(InMemory):
    """Noisy copies of one pattern per class, as floats."""

    def __init__(self, num_clients: int = 3, size: int = 120, batch_size: int = 8, **kwargs: Any) -> None:
        stream = torch.Generator().manual_seed(1)
        labels = torch.arange(size) % CLASSES
        patterns = torch.randn(CLASSES, 3, 4, 4, generator=stream)
        images = patterns[labels] + torch.randn(size, 3, 4, 4, generator=stream)
        # Written out: the command line finds out of the call which options are left.
        super().__init__(
            images,
            labels,
            CLASSES,
            num_clients=num_clients,
            batch_size=batch_size,
            partition=Growing(),
            val_share=VAL_SHARE,
            test_share=TEST_SHARE,
            **kwargs,
        )


class Texts(InMemory):
    """Token ids of which the second says the class; every third text is shorter."""

    def __init__(self, num_clients: int = 3, size: int = 72, batch_size: int = 4, **kwargs: Any) -> None:
        stream = torch.Generator().manual_seed(1)
        labels = torch.arange(size) % CLASSES
        ids = torch.randint(10, 30, (size, 6), generator=stream)
        ids[:, 0], ids[:, 1] = 0, labels + 3
        mask = torch.ones_like(ids)
        ids[::3, 4:], mask[::3, 4:] = 1, 0
        inputs = {"input_ids": ids, "attention_mask": mask}
        # Written out: the command line finds out of the call which options are left.
        super().__init__(
            inputs,
            labels,
            CLASSES,
            num_clients=num_clients,
            batch_size=batch_size,
            partition=Growing(),
            val_share=VAL_SHARE,
            test_share=TEST_SHARE,
            **kwargs,
        )


def scaled(size: int, width: float) -> int:
    return max(1, round(size * width))


class Net(Backbone):
    """Two linear layers and a head; it can be made narrower, cut and factorised."""

    def __init__(self, num_classes: int = CLASSES, hidden: int = 5, width: float = 1.0) -> None:
        super().__init__()
        hidden, features = scaled(hidden, width), scaled(6, width)
        self.fc1 = nn.Linear(PIXELS, hidden)
        self.fc2 = nn.Linear(hidden, features)
        self.head = nn.Linear(features, num_classes)

    @property
    def factorisable(self) -> list[str]:
        return ["fc1", "fc2"]

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
    """Another architecture with as many features."""

    def __init__(self, num_classes: int = CLASSES) -> None:
        super().__init__(num_classes, hidden=7)


class NoisyNet(Net):
    """With what differs between train and eval mode: batch norm, its integer counter, and dropout."""

    def __init__(self, num_classes: int = CLASSES, width: float = 1.0) -> None:
        super().__init__(num_classes, width=width)
        self.norm = nn.BatchNorm1d(self.head.in_features)

    def encode(self, x: Tensor, cut: str = "features") -> Tensor:
        return dropout(self.norm(super().encode(x, "features")), 0.5, self.training)


class TinyVit(VisionTransformer):
    """An image classifier with random weights."""

    def __init__(self, num_classes: int = CLASSES) -> None:
        sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
        super().__init__(num_classes, config={"model_type": "vit", "image_size": 4, "patch_size": 2} | sizes)


class TinyRoberta(TransformerClassifier):
    """A text classifier with random weights and dropout."""

    def __init__(self, num_classes: int = CLASSES) -> None:
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        known = {"model_type": "roberta", "vocab_size": 30, "max_position_embeddings": 32}
        super().__init__(num_classes, config=known | sizes)


class Prepared(Exception):  # noqa: N818 - no error
    """Ends a run before its first round: what it was made of is what was wanted."""


class Watch(FederationCallback):
    """Notes the server's tensors after every round, and what ``validate`` and ``test`` find. The command line keeps the one that it
    makes to itself: it is :attr:`newest`.
    """

    newest: "Watch"

    def __init__(self) -> None:
        Watch.newest = self
        self.server: dict[str, Tensor] = {}
        self.measured: dict[str, float] = {}

    def on_round_end(self, run: Any) -> None:
        self.server |= {f"round_{run.round}/server/{name}": t.clone() for name, t in run.server.state_dict().items()}

    def on_measure_end(self, run: Any, metrics: dict[str, float]) -> None:
        self.measured = dict(metrics)


class Prepare(FederationCallback):
    """Ends a run before its first round, and keeps a client's module and data, for a Trainer of one's own."""

    newest: "Prepare"

    def __init__(self, client: int = 1) -> None:
        Prepare.newest = self
        self.client = client
        self.module: Any = None
        self.data: Any = None

    def on_fit_start(self, run: Any) -> None:
        self.module, self.data = run.model.for_client(run.clients[self.client]), run.data.client(self.client)
        raise Prepared


class Kill(FederationCallback):
    """Kills the process in a round, after the first turn that came back."""

    def __init__(self, round: int = 2) -> None:
        self.round = round

    def on_turn_end(self, run: Any, update: Any) -> None:
        if run.round == self.round:
            os.kill(os.getpid(), signal.SIGKILL)
