"""Checks of what a client's Trainer must not have: options and callbacks that would change the course of a turn."""

from collections.abc import Iterable

import lightning as L
from lightning.pytorch import callbacks as of_lightning
from lightning.pytorch.callbacks.finetuning import BaseFinetuning
from lightning.pytorch.callbacks.progress.progress_bar import ProgressBar

from lightning_fed.errors import FederationError

TURN = "the method determines the length of a turn: set --model.init_args.epochs or steps"

NO_LOGGER = "the federation logs, and a client's Trainer has no logger"
NO_CALLBACKS: dict[type[L.Callback], str] = {
    of_lightning.Checkpoint: "the federation writes checkpoints: set --federation.checkpoint_every",
    ProgressBar: "the federation shows progress: set --federation.progress",
    of_lightning.ModelSummary: "the federation prints a summary: set --federation.progress",
    of_lightning.EarlyStopping: "it would end a client's turn in any phase: set --federation.patience",
    of_lightning.Timer: f"it would end a client's turn in any phase; {TURN}",
    of_lightning.LearningRateMonitor: f"{NO_LOGGER}: where there is a schedule, metrics.csv has lr/<phase>",
    of_lightning.DeviceStatsMonitor: NO_LOGGER,
    of_lightning.ThroughputMonitor: f"{NO_LOGGER}: metrics.csv has seconds and FLOPs of each round",
    of_lightning.StochasticWeightAveraging: "it would replace the schedule and the weights of a client's turn: the server averages",
    of_lightning.WeightAveraging: "it would replace the weights of a client's turn: the server averages",
    of_lightning.BatchSizeFinder: "it would train clients without using the result: set --data.init_args.batch_size",
    of_lightning.LearningRateFinder: "it would train clients without using the result: set the rate of --model.init_args.optimizer",
    of_lightning.GradientAccumulationScheduler: "training is manual: set --model.init_args.accumulate",
    BaseFinetuning: "the method determines what is trained: choose one that freezes, or a network with frozen parameters",
    of_lightning.SpikeDetection: "training is manual, and no step returns a loss: a run whose loss is not finite ends by itself",
    of_lightning.ModelPruning: "it renames the tensors that are sent",
}
"""Callbacks that a client's Trainer cannot have, and why, or what to use instead."""


def refuse_callbacks(callbacks: Iterable[L.Callback]) -> None:
    """Refuse callbacks that a client's Trainer cannot have.

    Raises:
        FederationError: names the callback.
    """
    for callback in callbacks:
        for kind, why in NO_CALLBACKS.items():
            if isinstance(callback, kind):
                raise FederationError(f"trainer.callbacks has {type(callback).__name__}, but {why}.")


def refuse_another_course(trainer: L.Trainer) -> None:
    """Refuse a Trainer that would end a turn before its last phase, or has a callback that a client's Trainer cannot have: in
    Python one object would serve all clients and rounds, whose averages or patience it would mix up. Those that only show
    something may be Lightning's own.

    Raises:
        FederationError: names the option or callback.
    """
    if trainer.max_steps != -1 and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        raise FederationError(f"trainer.max_steps is {trainer.max_steps}, but {TURN}.")
    showing = (of_lightning.Checkpoint, ProgressBar, of_lightning.ModelSummary)
    refuse_callbacks(one for one in trainer.callbacks if not isinstance(one, showing))  # type: ignore[attr-defined]
