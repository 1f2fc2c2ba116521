"""Checks of a configuration that go beyond the types of its options, and of options in environment variables."""

import inspect
import os
import pkgutil
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any

import torch
from jsonargparse import Namespace
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_fed.cli.refusals import BASES, known, options_of, untyped
from lightning_fed.core.schedules import NEEDS_A_METRIC
from lightning_fed.errors import FederationError, error_text
from lightning_fed.experiments.sweep.plan import LARGEST_SEED

PREFIX = "LIGHTNING_FED"
"""Start of the variables that set options, such as ``LIGHTNING_FED_FIT__FEDERATION__ROUNDS``."""


def check_variables(verb: str, parser: Any) -> None:
    """Print on standard error which options come from the environment, so that a forgotten variable is noticed.

    Raises:
        FederationError: for a variable that belongs to no option.
    """
    options = {action.dest.replace(".", "__").upper(): action.dest for action in parser._actions if action.option_strings}
    start = f"{PREFIX}_{verb.upper()}__"
    if (of_all := f"{PREFIX}_CONFIG") in os.environ:
        raise FederationError(f"{of_all} is set, but options are those of a verb: unset it, or set {start}CONFIG.")
    for variable, value in sorted((name, value) for name, value in os.environ.items() if name.startswith(start)):
        name = variable.removeprefix(start)
        if name not in options:
            block = name.partition("__")[0]
            raise FederationError(
                f"{variable} is set, but {verb} has no such option: unset it"
                + (f", or give {start}{block} a YAML file." if block in ("MODEL", "DATA") else ".")
            )
        print(f"lightning-fed: {options[name]} is {value} unless set otherwise ({variable}).", file=sys.stderr)


def check_config(config: Namespace) -> None:
    """Refuse blocks that name no class, and nulls where a value is needed.

    Raises:
        FederationError: names the option.
    """
    seed = config.get("seed_everything")
    if seed is True or (seed is not None and not 0 <= seed <= LARGEST_SEED):  # True: Lightning would draw one of its own
        raise FederationError(f"seed_everything is {seed}: give a whole number from 0 to {LARGEST_SEED}.")
    for key, value in config.items(branches=True):
        if isinstance(value, Namespace) and "." not in key:
            refuse_nulls(value, key)
        if key == "model" and (reason := untyped(str(value.get("class_path")))):
            raise FederationError(reason)
        if isinstance(value, Namespace) and "class_path" in value:
            refuse_base(value, key)
            refuse_settings(value, key)
    federation = config.get("federation") or Namespace()
    for name in takes_no_null("lightning_fed.federation.federation.Federation") & vars(federation).keys():
        if federation[name] is None:
            raise FederationError(f"federation.{name} is null: give a value, or leave it out for the default.")


def refuse_base(value: Namespace, key: str) -> None:
    """Refuse a class that cannot be used itself, which is also what an option without a class gets."""
    path = str(value.class_path)
    if (name := path.rpartition(".")[2]) in BASES and path.startswith("lightning_fed."):
        raise FederationError(
            f"{key.replace('.init_args', '')} is a {name}, which is only a base class, or has no class_path: name one of "
            f"{', '.join(known(key.rpartition('.')[2]))}."
        )


def refuse_settings(value: Namespace, key: str) -> None:
    """Refuse settings that an optimizer or schedule of PyTorch refuses, before networks and data are built."""
    name = str(value.class_path)
    try:
        kind = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError):
        return
    if not isinstance(kind, type) or not (name.startswith("torch.optim.") or issubclass(kind, ReduceLROnPlateau)):
        return
    if issubclass(kind, ReduceLROnPlateau):
        raise FederationError(f"{key.replace('.init_args', '')}: {NEEDS_A_METRIC}")
    settings = dict(value.get("init_args") or {})
    parameter = [torch.nn.Parameter(torch.zeros(1, 1))]
    try:
        if issubclass(kind, torch.optim.Optimizer):
            kind(parameter, **settings)
        elif issubclass(kind, LRScheduler):
            kind(torch.optim.SGD(parameter, lr=0.1), **settings)
    except Exception as error:
        raise FederationError(
            f"{key.replace('.init_args', '')}: {kind.__name__} takes no such settings: {error_text(error)}"
        ) from error


def refuse_nulls(value: Any, key: str) -> None:
    """Refuse null for options whose type excludes it. jsonargparse accepts it within ``init_args``."""
    if isinstance(value, list):
        for place, entry in enumerate(value):
            refuse_nulls(entry, f"{key}[{place}]")
    elif isinstance(value, Namespace) and "class_path" in value:
        given = vars(value.get("init_args") or Namespace())
        for name in takes_no_null(str(value.class_path)) & given.keys():
            if given[name] is None:
                raise FederationError(f"{key}.{name} is null: give a value, or leave it out for the default.")
        for name, entry in given.items():
            refuse_nulls(entry, f"{key}.{name}")
    elif isinstance(value, Namespace | Mapping):
        for name, entry in (vars(value) if isinstance(value, Namespace) else value).items():
            refuse_nulls(entry, f"{key}.{name}")


def takes_no_null(path: str) -> set[str]:
    """Names of a class's options that have a default and a type that excludes null."""
    return {
        name
        for name, (parameter, maker) in options_of(path).items()
        if parameter.default not in (None, inspect.Parameter.empty) and not _takes_null(maker, parameter)
    }


def _takes_null(maker: Any, parameter: inspect.Parameter) -> bool:
    try:
        hint = typing.get_type_hints(maker).get(parameter.name, Any)
    except (NameError, TypeError):  # names that only type checkers import
        return True
    if hint in (Any, object, None, types.NoneType):
        return True
    taken = typing.get_args(hint)
    return types.NoneType in taken or (Any in taken and not isinstance(hint, type))
