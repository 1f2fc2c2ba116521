"""What a Trainer does again and again though the answer does not change, or though nobody listens.

A federation builds thousands of Trainers and takes many small steps. The functions of Lightning that are replaced here, while a run
lasts, do what they did before; if one of them moves, the patch raises an error, which every test of a federation shows.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from enum import Enum
from functools import cache
from importlib.metadata import entry_points
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.utilities.argparse import _parse_env_variables
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.enums import StrEnum
from torch import Tensor

from lightning_fed.engines.overlapping import while_any

UNHEARD = frozenset(
    {
        *(f"on_{stage}_batch_{moment}" for stage in ("train", "validation", "test", "predict") for moment in ("start", "end")),
        *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
    }
)
"""Hooks of every batch that do nothing in Lightning's own classes."""


ASK_FOR_SIGNATURES = ("core.module", "core.optimizer", "loops.evaluation_loop", "loops.training_epoch_loop", "loops.utilities")
"""Modules of ``lightning.pytorch`` that look at the signatures of hooks."""


@while_any
@contextmanager
def lean_lightning() -> Iterator[None]:
    """What does not change while a run lasts is found out once: installed plugins, environment variables, GPUs, whether there is a
    SLURM, signatures of hooks and whether they are overridden. What nobody listens to is not done: hooks that nobody overrides,
    profiling without a profiler, moving to a device what is there already. No Trainer sets signal handlers.
    """
    replaced: dict[str, Callable[..., Any]] = {
        "lightning.fabric.utilities.device_dtype_mixin._DeviceDtypeModuleMixin.cpu": _to_cpu,
        "lightning.fabric.utilities.device_dtype_mixin._DeviceDtypeModuleMixin.to": _to,
        "lightning.fabric.utilities.registry.entry_points": cache(entry_points),
        "lightning.fabric.plugins.environments.slurm.SLURMEnvironment._validate_srun_used": staticmethod(
            cache(SLURMEnvironment._validate_srun_used)
        ),
        "lightning.pytorch.core.module.LightningModule._call_batch_hook": _call_batch_hook,
        "lightning.pytorch.profilers.Profiler.profile": _profile,
        "lightning.pytorch.trainer.call._call_callback_hooks": _call_callback_hooks,
        "lightning.pytorch.trainer.call._call_lightning_module_hook": _call_lightning_module_hook,
        "lightning.pytorch.trainer.call._call_strategy_hook": _call_strategy_hook,
        "lightning.pytorch.trainer.connectors.data_connector.is_overridden": _is_overridden,
        "lightning.pytorch.trainer.connectors.signal_connector._SignalConnector.register_signal_handlers": _leave_signals,
        "lightning.pytorch.trainer.connectors.logger_connector.result._ResultCollection.to": _results_to,
        "lightning.pytorch.utilities.argparse._parse_env_variables": cache(_parse_env_variables),
        "lightning_utilities.core.enums.StrEnum.__eq__": _equal,
        "torch.cuda.device_count": cache(torch.cuda.device_count),
        **{f"lightning.pytorch.{place}.is_param_in_hook_signature": _is_param_in_hook_signature for place in ASK_FOR_SIGNATURES},
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
_call_any_batch_hook, _move_results, _move, _move_to_cpu = (
    L.LightningModule._call_batch_hook,
    _ResultCollection.to,
    _DeviceDtypeModuleMixin.to,
    _DeviceDtypeModuleMixin.cpu,
)
_profile_with, _equal_as_text = Profiler.profile, StrEnum.__eq__


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


def _call_batch_hook(module: L.LightningModule, hook_name: str, batch: Any, *args: Any) -> Any:
    default = hook_name == "on_before_batch_transfer" or (hook_name == "transfer_batch_to_device" and _is_on(batch, args[0]))
    datamodule = getattr(module._trainer, "datamodule", None)
    if (
        default
        and not _listens(module, L.LightningModule, hook_name)
        and (datamodule is None or not _listens(datamodule, L.LightningDataModule, hook_name))
    ):
        return batch
    return _call_any_batch_hook(module, hook_name, batch, *args)


def _is_on(batch: Any, device: torch.device) -> bool:
    return type(batch) is tuple and all(isinstance(part, Tensor) and part.device == device for part in batch)


def _to(module: Any, *args: Any, **kwargs: Any) -> Any:
    to_cpu = args == (torch.device("cpu"),) and not kwargs
    return module if to_cpu and _is_on_cpu(module) else _move(module, *args, **kwargs)


def _to_cpu(module: Any) -> Any:
    return module if _is_on_cpu(module) else _move_to_cpu(module)


def _results_to(results: _ResultCollection, *args: Any, **kwargs: Any) -> _ResultCollection:
    to_cpu = (*args, *kwargs.values()) in (("cpu",), (torch.device("cpu"),))
    there = to_cpu and all(metric.device.type == "cpu" for metric in results.values())
    return results if there else _move_results(results, *args, **kwargs)


def _is_on_cpu(module: Any) -> bool:
    return module.device.type == "cpu" and all(t.is_cpu for t in (*module.parameters(), *module.buffers()))


def _profile(profiler: Profiler, action_name: str) -> AbstractContextManager[Any]:
    if type(profiler) is PassThroughProfiler:
        return nullcontext(action_name)
    return _profile_with(profiler, action_name)


def _equal(one: StrEnum, other: object) -> bool:
    """Values of a kind are compared as the objects that they are, everything else as text."""
    return one is other if isinstance(other, Enum) and type(one) is type(other) else _equal_as_text(one, other)


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
