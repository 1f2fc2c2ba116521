"""What a module was made with, in plain words: names and numbers that YAML and any checkpoint can hold."""

import sys
from collections.abc import Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

INSTANTIATOR = "lightning.pytorch.cli.instantiate_module"
"""Reads such words: Lightning's, which reads configurations, too."""

Plain = bool | int | float | str | None | list["Plain"] | dict[str, "Plain"]


class NotPlainError(ValueError):
    """Something that has no name by which it could be found again."""


def describe(arguments: Mapping[str, Any]) -> tuple[dict[str, Plain], list[str]]:
    """Arguments of a constructor as in a configuration file: a class or function by its path, with what it was bound to.

    Returns:
        What could be described, and the names of the arguments that could not: a lambda, what is defined inside a function, or an
        object that is neither a number nor a name.
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
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, partial) and not value.args:
        return {"class_path": _path(value.func), "init_args": _plain(value.keywords)}
    if isinstance(value, type):
        return {"class_path": _path(value)}
    if callable(value):
        return _path(value)
    raise NotPlainError


def _path(thing: Any) -> str:
    """Where it can be imported from."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "<")
    if module is None or "<" in name or getattr(sys.modules.get(module), name, None) is not thing:
        raise NotPlainError
    return f"{module}.{name}"
