"""Arguments of a module's constructor as plain values: names and numbers that YAML and any checkpoint can hold."""

import sys
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.core.mixins.hparams_mixin import _given_hyperparameters
from lightning.pytorch.utilities.parsing import collect_init_args

from lightning_fed.errors import FederationError
from lightning_fed.options import parameters_of, require_choices

INSTANTIATOR = "lightning.pytorch.cli.instantiate_module"
"""The Lightning function that reads such values, as it reads configurations."""

NOT_STORED = "not_stored_hyperparameters"
"""The checkpoint key of the names of arguments that could not be described."""

Plain = bool | int | float | str | None | list["Plain"] | dict[str, "Plain"]


class NotPlainError(ValueError):
    """A value that has no import path by which it could be found again."""


def describe(arguments: Mapping[str, Any]) -> tuple[dict[str, Plain], list[str]]:
    """Describe arguments of a constructor as in a configuration file: a class or function by its path, with its bound arguments.

    Returns:
        The described arguments, and the names of those that could not be described: a lambda, something defined inside a function,
        or an object that is neither a number nor importable.
    """
    plain: dict[str, Plain] = {}
    lost = []
    for name, value in arguments.items():
        try:
            plain[name] = _plain(value)
        except NotPlainError:
            lost.append(name)
    return plain, lost


def _plain(value: Any) -> Plain:
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, np.generic):  # NumPy's floats are Python's, too, but no checkpoint may load them
        return _plain(value.item())
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {
            "class_path": _path(type(value)),
            "init_args": {field.name: _plain(getattr(value, field.name)) for field in fields(value)},
        }
    if isinstance(value, partial) and not value.args:
        return {"class_path": _path(value.func), "init_args": _plain(value.keywords)}
    if isinstance(value, type):
        return {"class_path": _path(value)}
    if callable(value):
        return _path(value)
    raise NotPlainError


def _path(thing: Any) -> str:
    """The path from which an object can be imported."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "<")
    if module is None or "<" in name or getattr(sys.modules.get(module), name, None) is not thing:
        raise NotPlainError
    return f"{module}.{name}"


def check_choices(module: L.LightningModule, frame: FrameType | None) -> None:
    """Refuse arguments that are none of their option's choices, in the constructor that calls this and in those of the module's
    class and its bases that have called it.

    Args:
        module: the module.
        frame: frame of the constructor that calls this.

    Raises:
        FederationError: names the option and its choices.
    """
    makers = {vars(kind)["__init__"].__code__: vars(kind)["__init__"] for kind in type(module).__mro__ if _has_own_init(kind)}
    while frame is not None and frame.f_code in makers:
        require_choices(makers[frame.f_code], frame.f_locals, type(module).__name__)
        frame = frame.f_back


def _has_own_init(kind: type) -> bool:
    return isinstance(vars(kind).get("__init__"), FunctionType)


def store_hyperparameters(module: L.LightningModule, frame: FrameType | None) -> list[str]:
    """Store a module's constructor arguments in its ``hparams``, in the form of a configuration.

    Args:
        module: the module.
        frame: frame of the constructor that calls this. The stored arguments are those of the instantiated class, not of its bases.

    Returns:
        Names of the arguments that could not be stored.
    """
    if _given_hyperparameters.get() is not None:  # the command line stores its configuration itself
        module.save_hyperparameters(frame=frame)
        return []
    assert frame is not None
    plain, not_stored = describe(collect_init_args(frame, [], classes=(L.LightningModule,))[-1])
    module.save_hyperparameters({**plain, "_instantiator": INSTANTIATOR})
    return not_stored


def refuse_missing(cls: type, checkpoint_path: Any, given: Collection[str], error: Exception) -> None:
    """Explain which arguments a checkpoint lacks, if that is why it cannot be loaded.

    Raises:
        FederationError: if an argument was a lambda, an object or the like, which has no import path.
    """
    checkpoint = torch.load(checkpoint_path, map_location="meta", weights_only=True)
    missing = [name for name in checkpoint.get(NOT_STORED, []) if name not in given]
    if missing:
        raise FederationError(
            f"A checkpoint stores only what has an import path, which {' and '.join(missing)} had not: give it again, as in "
            f"{cls.__name__}.load_from_checkpoint(path, {', '.join(f'{name}=…' for name in missing)})."
        ) from error


def remedy(module: L.LightningModule, rate: str = "the learning rate") -> str:
    """What to change, as the end of an error message.

    Args:
        module: the module that diverged.
        rate: its learning rate, as far as that is known.
    """
    chosen = [f"model.{name}={value:g}" for name, value in chosen_numbers(module).items()]
    return f"lower {rate}{''.join(f', change {each}' for each in chosen)}, or set model.gradient_clip"


def chosen_numbers(module: L.LightningModule) -> dict[str, float]:
    """Float arguments of a module that differ from their defaults, by name: learning rates, scales and weights of loss terms.
    Integers are sizes and durations, which do not make training diverge.
    """
    usual = {name: parameter.default for name, (parameter, _) in parameters_of(type(module)).items()}
    return {
        name: value
        for name, value in module.hparams.items()
        if isinstance(value, float) and name in usual and value != usual[name] and name != "gradient_clip"
    }
