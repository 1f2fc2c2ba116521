"""What a Trainer does again and again though the answer does not change, or though nobody listens.

A federation builds thousands of Trainers and takes many small steps. The functions of Lightning that are replaced here, while a run
lasts, do what they did before; if one of them moves, the patch raises an error, which every test of a federation shows.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib.metadata import entry_points
from typing import Any
from unittest.mock import patch

import lightning as L
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

UNHEARD = frozenset(
    {
        *(f"on_{stage}_batch_{moment}" for stage in ("train", "validation", "test", "predict") for moment in ("start", "end")),
        *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
    }
)
"""Hooks of every batch that do nothing in Lightning's own classes."""


@contextmanager
def lean_lightning() -> Iterator[None]:
    """Plugins are searched once: each Trainer asks all installed packages for callbacks, which takes longer than the rest of its
    construction. Hooks that nobody overrides are not called. Signatures of hooks, and whether they are overridden, are looked up
    once per class. No Trainer asks for all signals and sets their handlers, before and after each fit.
    """
    replaced: dict[str, Callable[..., Any]] = {
        "lightning.fabric.utilities.registry.entry_points": cache(entry_points),
        "lightning.pytorch.trainer.call._call_callback_hooks": _call_callback_hooks,
        "lightning.pytorch.trainer.call._call_lightning_module_hook": _call_lightning_module_hook,
        "lightning.pytorch.trainer.call._call_strategy_hook": _call_strategy_hook,
        "lightning.pytorch.loops.training_epoch_loop.is_param_in_hook_signature": _is_param_in_hook_signature,
        "lightning.pytorch.loops.evaluation_loop.is_param_in_hook_signature": _is_param_in_hook_signature,
        "lightning.pytorch.trainer.connectors.data_connector.is_overridden": _is_overridden,
        "lightning.pytorch.trainer.connectors.signal_connector._SignalConnector.register_signal_handlers": _leave_signals,
    }
    with ExitStack() as stack:
        for name, function in replaced.items():
            stack.enter_context(patch(name, function))
        yield


_call_all_callbacks, _call_module, _call_strategy = (
    call._call_callback_hooks,
    call._call_lightning_module_hook,
    call._call_strategy_hook,
)


def _call_callback_hooks(trainer: L.Trainer, hook_name: str, *args: Any, **kwargs: Any) -> None:
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    if hook_name not in UNHEARD or any(_listens(callback, L.Callback, hook_name) for callback in callbacks):
        _call_all_callbacks(trainer, hook_name, *args, **kwargs)


def _call_lightning_module_hook(trainer: L.Trainer, hook_name: str, *args: Any, pl_module: Any = None, **kwargs: Any) -> Any:
    if hook_name not in UNHEARD or _listens(pl_module or trainer.lightning_module, L.LightningModule, hook_name):
        return _call_module(trainer, hook_name, *args, pl_module=pl_module, **kwargs)
    return None


def _call_strategy_hook(trainer: L.Trainer, hook_name: str, *args: Any, **kwargs: Any) -> Any:
    if hook_name not in UNHEARD or _listens(trainer.strategy, Strategy, hook_name):
        return _call_strategy(trainer, hook_name, *args, **kwargs)
    return None


def _leave_signals(connector: Any) -> None:
    """Signals are the run's: see :mod:`lightning_fed.signals`."""


def _listens(listener: Any, base: type, hook_name: str) -> bool:
    return hook_name in vars(listener) or _overrides(type(listener), base, hook_name)  # type: ignore[arg-type]


@cache
def _overrides(kind: Hashable, base: Hashable, hook_name: str) -> bool:
    return getattr(kind, hook_name) is not getattr(base, hook_name)


def _is_param_in_hook_signature(hook: Any, param: str, explicit: bool = False, min_args: int | None = None) -> bool:
    return _has_param(getattr(hook, "__func__", hook), param, explicit, min_args)


@cache
def _has_param(function: Any, param: str, explicit: bool, min_args: int | None) -> bool:
    return is_param_in_hook_signature(function, param, explicit, min_args)


def _is_overridden(method_name: str, instance: Any = None, parent: Any = None) -> bool:
    if instance is None or method_name in vars(instance):
        return is_overridden(method_name, instance, parent)
    key = type(instance), method_name, parent
    if key not in _OVERRIDDEN:
        _OVERRIDDEN[key] = is_overridden(method_name, instance, parent)
    return _OVERRIDDEN[key]


_OVERRIDDEN: dict[tuple[Any, ...], bool] = {}
