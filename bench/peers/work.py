"""What all contestants have in common: data, network, settings, and the handshake with run.py. It needs torch alone.

Contestants run in environments of their own, in which lightning-fed is not installed.
"""

import argparse
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Client
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, max_pool2d, relu

State = dict[str, Tensor]


@dataclass(frozen=True)
class Settings:
    """FedAvg as everybody plays it.

    Args:
        clients: how many there are.
        images: training images of each.
        cohort: clients that take part in a round.
        batch: batch size.
        lr: of plain SGD; one local epoch.
        workers: worker processes where there are some.
        channels_last: whether the peers' networks have their weights in that memory format, as those of lightning-fed do.
    """

    clients: int
    images: int
    cohort: int
    batch: int
    lr: float
    workers: int
    channels_last: bool


class CNN1(nn.Module):
    """CNN-1, layer by layer as lightning_fed.models.CNN1, whose state it loads."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 16, 5), nn.Conv2d(16, 32, 5)
        self.fc1, self.fc2, self.head = nn.Linear(800, 2000), nn.Linear(2000, 500), nn.Linear(500, 10)
        if settings.channels_last:
            self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images (B, 3, 32, 32)."""
        x = max_pool2d(relu(self.conv1(x)), 2)
        x = max_pool2d(relu(self.conv2(x)), 2).flatten(1)
        return self.head(relu(self.fc2(relu(self.fc1(x)))))


def train(model: nn.Module, images: Tensor, labels: Tensor, settings: Settings) -> None:
    """One epoch of plain SGD, for those who bring no loop of their own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr)
    for batch in torch.randperm(len(images)).split(settings.batch):
        optimizer.zero_grad()
        cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()


@cache
def loaded(path: str, threads: int) -> tuple[Settings, Tensor, Tensor]:
    """What ``work.pt`` says, images and labels: read once by each process, which then computes with so many threads."""
    torch.set_num_threads(threads)
    work = torch.load(path, mmap=True)
    return Settings(**work["settings"]), work["images"], work["labels"]


class Contestant:
    """A contestant's end of the line: it plays a round when it is told to, and says how long that took.

    The folder of ``--work`` has ``work.pt``: settings, images (N, 3, 32, 32) of uint8, of which client k has those from
    ``k * settings.images`` on, labels, and the initial weights.
    """

    def __init__(self) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--work", type=Path, required=True)
        parser.add_argument("--name", required=True)
        parser.add_argument("--rounds", type=int, required=True)
        parser.add_argument("--engine", default="InProcess")
        parser.add_argument("--cores", type=int, default=1)
        self.options = parser.parse_args()
        self.rounds: int = self.options.rounds
        work = torch.load(self.options.work / "work.pt")
        self.settings = Settings(**work["settings"])
        self.images, self.labels, self.initial = work["images"], work["labels"], work["initial"]
        self._line = Client(str(self.options.work / "line"), "AF_UNIX")
        self._line.send(self.options.name)
        self._start = 0.0

    def begin(self) -> None:
        """Wait until it is this contestant's turn to play a round."""
        if self._line.recv() != "go":
            raise SystemExit(0)
        self._start = perf_counter()

    def end(self, state: State) -> None:
        """A round is over and its clients' models are merged."""
        seconds = perf_counter() - self._start
        torch.save({name: tensor.detach().clone() for name, tensor in state.items()}, self.options.work / f"{self.options.name}.pt")
        self._line.send(seconds)
