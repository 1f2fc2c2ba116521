"""Methods whose turns kill the process that they are in, stop it, or fail."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tiny import Net, assert_same, new_data, new_federation
from torch import Tensor

from lightning_fed.engines import InProcess
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import FedAvg, PFedLoRA


class Dying(PFedLoRA):
    """A worker that takes a certain turn sends itself a signal, as often as it is told to.

    Args:
        notes: a file with a byte for each time that it has happened.
    """

    dies_in: tuple[str, int, int] = ("", 0, 0)  # the stage, the client, how often
    dies_of = signal.SIGKILL

    def __init__(self, notes: str, **kwargs: Any) -> None:
        super().__init__(Net, **kwargs)
        self.hparams["notes"] = notes
        Path(notes).touch()

    def die(self, stage: str) -> None:
        """In a worker process alone: who calls the tests would die, too."""
        wanted, client, times = self.dies_in
        assert self.client is not None
        notes = Path(self.hparams["notes"])
        if stage == wanted and self.client.id == client and len(notes.read_bytes()) < times:
            with notes.open("ab") as file:
                file.write(b"x")
            os.kill(os.getpid(), self.dies_of)

    def client_step(self, batch: Any) -> Tensor:
        loss = super().client_step(batch)
        self.die("fit")
        return loss

    def on_test_start(self) -> None:
        self.die("evaluate")


def dying(*how: Any, of: signal.Signals = signal.SIGKILL) -> Dying:
    """Which stage, which client, how often; and the signal."""
    module = Dying(str(Path("notes").absolute()), num_classes=4, optimizer=partial(torch.optim.SGD, lr=0.1))
    module.dies_in, module.dies_of = how, of
    return module


def assert_undisturbed(federation: Federation) -> None:
    """Two rounds of three clients, measured in each, ended as in one process in which nobody died."""
    undisturbed = new_federation(2, engine=InProcess(threads=1), evaluate_every=1)
    undisturbed.fit(dying("", 0, 0), new_data(3))
    assert_same(federation, undisturbed)


class Failing(FedAvg):
    """Divides by zero in a phase of client 1."""

    def client_loss(self, batch: Any) -> Tensor:
        assert self.client is not None
        if self.client.id == 1:
            1 / 0  # noqa: B018
        return super().client_loss(batch)
