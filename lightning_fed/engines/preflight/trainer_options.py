"""Checks of what a client's Trainer must not have: options and callbacks that would change the course of a turn."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import lightning as L
from lightning.pytorch import callbacks as of_lightning
from lightning.pytorch.callbacks.finetuning import BaseFinetuning
from lightning.pytorch.callbacks.progress.progress_bar import ProgressBar

from lightning_fed.errors import FederationError

TURN = "the method determines the length of a turn: set --model.init_args.epochs or steps"

MANUAL = "training is manual: give the method gradient_clip, --model.init_args.gradient_clip"
MEASURED = "clients are not validated while they train: set --federation.evaluate_every"
ONE_DEVICE = "a client trains on one device: leave it out"
PROFILE = (
    "a run has thousands of Trainers, whose profiles would be separate: profile the command (python -m cProfile -m …), or "
    "one client with a Trainer of your own, Trainer(profiler=…).fit(module, data.client(0))"
)

REFUSED = {
    "max_epochs": "epochs belong to the method: set --model.init_args.epochs",
    "min_epochs": TURN,
    "min_steps": TURN,
    "max_steps": TURN,
    "max_time": TURN,
    "accumulate_grad_batches": "training is manual: give the method accumulate, --model.init_args.accumulate",
    "gradient_clip_val": MANUAL,
    "gradient_clip_algorithm": MANUAL,
    "logger": "the federation logs: set --federation.logger",
    "log_every_n_steps": "the federation logs each round: set --federation.logger",
    "enable_autolog_hparams": "the federation logs: set --federation.logger",
    "model_registry": "the federation writes checkpoints: set --federation.run_dir",
    "default_root_dir": "the federation writes, not its clients: set --federation.run_dir",
    "enable_checkpointing": "the federation writes checkpoints: set --federation.checkpoint_every",
    "enable_progress_bar": "the federation shows progress: set --federation.progress",
    "enable_model_summary": "the federation prints a summary: set --federation.progress",
    "num_sanity_val_steps": MEASURED,
    "val_check_interval": MEASURED,
    "check_val_every_n_epoch": MEASURED,
    "overfit_batches": "it would replace the order of a client's batches: set --trainer.limit_train_batches",
    "use_distributed_sampler": ONE_DEVICE,
    "sync_batchnorm": ONE_DEVICE,
    "profiler": PROFILE,
    "barebones": "it disables the clients' metrics, and their Trainers are quiet already: leave it out",
}
"""Options of Lightning's Trainer that a client's Trainer cannot take or that would have no effect, and what to do instead."""

NOT_NOTHING = {
    "limit_train_batches": "its clients would learn nothing",
    "limit_test_batches": "nothing could be reported; set --federation.evaluate_every to evaluate less often",
    "limit_predict_batches": "methods with a pass over the data after training would get none",
}
"""Options that leave out batches, and why they must not leave out all."""

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


def refuse_options(given: Mapping[str, Any], usual: Mapping[str, Any] | None = None) -> None:
    """Refuse options of Lightning's Trainer that a client's Trainer cannot take, or that would have no effect.

    Args:
        given: options by name; those that have the Trainer's default are not refused.
        usual: values that every client's Trainer has, which are not refused either. None: there are none.

    Raises:
        FederationError: names the option, and what to do instead.
    """
    parameters, usual = inspect.signature(L.Trainer).parameters, usual or {}
    for key, remedy in REFUSED.items():
        if key in given and given[key] not in (default := parameters[key].default, usual.get(key, default)):
            raise FederationError(f"trainer.{key} is set, but {remedy}.")
    for key, why in NOT_NOTHING.items():
        if given.get(key) is not None and given[key] == 0:
            raise FederationError(f"trainer.{key} is 0, but {why}: give at least 1.")
    listed = given.get("callbacks") or []
    refuse_callbacks(listed if isinstance(listed, Iterable) else [listed])


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
