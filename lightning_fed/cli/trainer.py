"""The ``trainer`` block: which options a client's Trainer takes, and what to set instead of the others."""

import contextlib
import copy
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import lightning as L

from lightning_fed.engines.preflight.trainer_options import TURN, refuse_callbacks
from lightning_fed.engines.turn_loop import without_launcher
from lightning_fed.errors import FederationError, one_line

MANUAL = "training is manual: set --model.init_args.gradient_clip"
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
    "accumulate_grad_batches": "training is manual: set --model.init_args.accumulate",
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


def settings_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a client's Trainer, from those of the ``trainer`` block.

    Raises:
        FederationError: for settings that it cannot take.
    """
    parameters = inspect.signature(L.Trainer).parameters
    for key, remedy in REFUSED.items():
        if key in given and given[key] != parameters[key].default:
            raise FederationError(f"trainer.{key} is set, but {remedy}.")
    for key, why in NOT_NOTHING.items():
        if given.get(key) is not None and given[key] == 0:
            raise FederationError(f"trainer.{key} is 0, but {why}: give at least 1.")
    listed = given.get("callbacks") or []
    refuse_callbacks(listed if isinstance(listed, Iterable) else [listed])
    return {key: value for key, value in given.items() if key not in REFUSED}


def build_trainer(settings: dict[str, Any], **overrides: Any) -> L.Trainer:
    """A client's Trainer. Its callbacks and plugins are copies, so that Trainers do not share their state.

    Raises:
        FederationError: if Lightning refuses the settings because of one of them.
    """
    try:
        return _new_trainer(settings, **overrides)
    except Exception as error:
        if (key := at_fault(settings, overrides)) is None:
            raise
        given = "null" if settings[key] is None else repr(settings[key])
        raise FederationError(f"trainer.{key} is {given}, with which Lightning builds no Trainer: {one_line(error)}") from error


def at_fault(settings: dict[str, Any], overrides: dict[str, Any]) -> str | None:
    """The setting without which a Trainer can be built; None if there is no single one."""
    for key, parameter in inspect.signature(L.Trainer).parameters.items():
        if key in settings and settings[key] != parameter.default:
            with contextlib.suppress(Exception):
                _new_trainer(settings, **{key: parameter.default} | overrides)
                return key
    return None


def _new_trainer(settings: dict[str, Any], **overrides: Any) -> L.Trainer:
    options = copy.deepcopy(settings) | overrides
    return L.Trainer(**options | {"plugins": without_launcher(options.get("plugins"))})
