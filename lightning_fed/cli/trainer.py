"""The ``trainer`` block: which options a client's Trainer takes, and what to set instead of the others."""

import contextlib
import copy
import inspect
from collections.abc import Mapping
from typing import Any

import lightning as L

from lightning_fed.engines.preflight.trainer_options import REFUSED, refuse_options
from lightning_fed.engines.turn_loop import without_launcher
from lightning_fed.errors import FederationError, one_line


def settings_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a client's Trainer, from those of the ``trainer`` block.

    Raises:
        FederationError: for settings that it cannot take.
    """
    refuse_options(given)
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
