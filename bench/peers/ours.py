"""lightning-fed's part: FedAvg on one of its engines."""

from functools import partial
from typing import Any

import lightning as L
import torch
from work import Contestant

from lightning_fed import Federation
from lightning_fed.callbacks import FederationCallback, RunView
from lightning_fed.data import IID, InMemory
from lightning_fed.engines import InProcess, Processes
from lightning_fed.methods import FedAvg
from lightning_fed.models import CNN1


class Line(FederationCallback):
    """Waits for its turn before each round, and says when one is over."""

    def __init__(self, contestant: Contestant) -> None:
        self.contestant = contestant

    def on_fit_start(self, run: RunView) -> None:
        """Before the first round."""
        self.contestant.begin()

    def on_round_end(self, run: RunView) -> None:
        """Between two rounds."""
        self.contestant.end({name.removeprefix("backbone."): tensor for name, tensor in run.server.state.items()})
        self.contestant.begin()


def main() -> None:
    """Play."""
    contestant = Contestant()
    settings = contestant.settings
    torch.set_num_threads(1)
    few = slice(0, settings.clients)  # test images, which nobody looks at
    data = InMemory(
        *(contestant.images, contestant.labels, 10, contestant.images[few], contestant.labels[few]),
        num_clients=settings.clients,
        partition=IID(),
        split="official",
        val_share=0,
        batch_size=settings.batch,
    )
    network = CNN1()
    network.load_state_dict(contestant.initial)
    method = FedAvg(network, optimizer=partial(torch.optim.SGD, lr=settings.lr))
    engine: Any = InProcess(threads=1) if contestant.options.engine == "InProcess" else Processes(settings.workers)
    Federation(
        contestant.rounds + 1,  # the last one is measured; it is not played to its end
        participation=settings.cohort / settings.clients,
        evaluate_every=0,
        run_dir=None,
        progress=False,
        callbacks=[Line(contestant)],
        engine=engine,
        trainer=partial(L.Trainer, accelerator="cpu", devices=1),
    ).fit(method, data)


if __name__ == "__main__":
    main()
