"""The Trainer of a worker's turns, built once, with a training loop that calls only hooks that are overridden.

A federation runs thousands of turns, many with small steps: building a Trainer takes longer than a hundred such steps, and calling
the hooks of a batch as long as one. All changes are made on the Trainer instance, not on Lightning's classes.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from lightning.pytorch.core.hooks import DataHooks
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lightning_fed.core.client_modules import frozen_parameters
from lightning_fed.core.module import FederatedModule

TrainerFactory = Callable[..., L.Trainer]
"""Builds a client's Trainer from keyword arguments; ``L.Trainer`` is one."""

QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}
"""Options of the clients' Trainers: the federation reports, saves checkpoints and shows progress itself."""

TRIED = ("2.6.",)
"""Lightning releases for which the training loop of turns was tested; with others, Lightning's own is used."""


def without_launcher(plugins: Any) -> list[Any]:
    """A Trainer's plugins, with an environment of one process unless they have an environment: in a SLURM job of several tasks,
    Lightning would take the Trainer for one of as many.
    """
    plugins = plugins if isinstance(plugins, list) else [] if plugins is None else [plugins]
    known = any(isinstance(plugin, ClusterEnvironment) for plugin in plugins)
    return plugins if known else [*plugins, LightningEnvironment()]


def in_one_process(new_trainer: TrainerFactory) -> TrainerFactory:
    """The factory, with :func:`without_launcher` if it is ``L.Trainer`` with some arguments; any other one stays as it is."""
    given = new_trainer if isinstance(new_trainer, partial) else partial(new_trainer)
    return partial(given, plugins=without_launcher(given.keywords.get("plugins"))) if given.func is L.Trainer else new_trainer


def turn_trainer(new_trainer: TrainerFactory, **options: Any) -> L.Trainer:
    """A Trainer for turns."""
    trainer = new_trainer(**QUIET, **options)
    # The run handles signals, see lightning_fed.system.signals: Lightning would replace its handlers and restore them incorrectly.
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    # A turn starts from what its client received. On SLURM, Lightning would look for checkpoints that other programs have left.
    trainer._checkpoint_connector._select_ckpt_path = lambda *_, **__: None  # type: ignore[method-assign]
    if L.__version__.startswith(TRIED):
        trainer._run_stage = partial(_run_stage, trainer)  # type: ignore[method-assign]
    if type(trainer.strategy) is SingleDeviceStrategy:
        trainer.strategy.teardown = partial(take_back, trainer.strategy)  # type: ignore[method-assign]
        trainer.strategy.model_to_device = partial(_to_device, trainer.strategy)  # type: ignore[method-assign]
    return trainer


def _run_stage(trainer: L.Trainer) -> Any:
    """Train without Lightning's sanity check, before which it stores all random states."""
    if not trainer.training or trainer._detect_anomaly:
        return type(trainer)._run_stage(trainer)
    trainer.lightning_module.zero_grad()
    return trainer.fit_loop.run()


def _to_device(strategy: Strategy) -> None:
    """Move the module to its device, unless that is the CPU, on which the module already is between turns."""
    module, device = strategy.lightning_module, strategy.root_device
    assert module is not None
    if device.type != "cpu" or module.device.type != "cpu" or not all(parameter.is_cpu for parameter in module.parameters()):
        module.to(device)


def take_back(strategy: Strategy) -> None:
    """Move what clients have of their own to the CPU after a fit or an evaluation, also what the last phase did not train. Frozen
    tensors of all stay on their device: later turns share them, and they may be large.
    """
    module = strategy.lightning_module
    if strategy.root_device.type == "cpu" or module is None:
        return
    clients = (part for part in module.modules() if isinstance(part, FederatedModule))  # a pass over data has one within it
    frozen = {id(parameter) for client in clients for parameter in frozen_parameters(client).values()}
    module._apply(lambda tensor: tensor if id(tensor) in frozen else tensor.cpu())
    for part in module.modules():
        if isinstance(part, _DeviceDtypeModuleMixin):
            part._device = torch.device("cpu")
    strategy.precision_plugin.teardown()


class Trainers:
    """The Trainers of a worker, each built on first use.

    Args:
        new_trainer: builds them.

    Attributes:
        max_steps: steps after which a fit ends, in a dry run; -1: all that the phases take.
    """

    def __init__(self, new_trainer: TrainerFactory) -> None:
        self.new_trainer = new_trainer
        self.max_steps = -1
        self._fitting: L.Trainer | None = None
        self._others: dict[bool, L.Trainer] = {}

    def for_fit(self, epochs: int, callbacks: Iterable[L.Callback], **options: Any) -> L.Trainer:
        """A Trainer that has not trained yet, because one that has reached its ``max_epochs`` does not train again.

        It is the Trainer of the previous turn with a new training loop, unless options differ between turns or a part of it (a
        callback, a gradient scaler) would carry state over from an earlier turn.
        """
        trainer = self._fitting
        if trainer is None or options:
            trainer = turn_trainer(self.new_trainer, max_epochs=epochs, **(options or {"limit_val_batches": 0}))
            if not options and _keeps_nothing(trainer):
                self._fitting = trainer
        else:
            trainer.callbacks = []  # type: ignore[attr-defined]
        trainer.callbacks += callbacks  # type: ignore[attr-defined]
        old = trainer.fit_loop
        if trainer is self._fitting:
            trainer.fit_loop = _FitLoop(trainer, old.min_epochs, epochs)
        kind = _TurnEpochLoop if L.__version__.startswith(TRIED) else _TrainingEpochLoop
        quick = trainer.fast_dev_run  # type: ignore[attr-defined]
        trainer.fit_loop.epoch_loop = kind(trainer, old.min_steps, old.max_steps if quick else self.max_steps)
        return trainer

    def for_evaluating(self, gradients: bool = False) -> L.Trainer:
        """A Trainer that validates, tests and predicts; it starts afresh on every call."""
        if gradients not in self._others:
            trainer = turn_trainer(self.new_trainer, **({"inference_mode": False} if gradients else {}))
            for loop in (trainer.validate_loop, trainer.test_loop):
                loop._results = _Results(training=False)
            self._others[gradients] = trainer
        return self._others[gradients]


def _keeps_nothing(trainer: L.Trainer) -> bool:
    """Whether a Trainer with a new training loop is equivalent to a newly built one."""
    plugin = trainer.precision_plugin
    return (
        type(trainer) is L.Trainer
        and not trainer.callbacks  # type: ignore[attr-defined]
        and not trainer.fast_dev_run  # type: ignore[attr-defined]
        and type(trainer.strategy) is SingleDeviceStrategy
        and type(plugin).__module__.startswith("lightning.")
        and getattr(plugin, "scaler", None) is None
    )


class _TurnEpochLoop(_TrainingEpochLoop):
    """An epoch loop for manual optimization that behaves like Lightning's but skips work without effect.

    Hooks of a batch are called only if they are overridden, which is checked once per fit. A batch that is already on the device
    is not moved. Nothing is profiled without a profiler. Logged values are updated after a batch only if a step logs.
    """

    _batches_that_stepped: int
    """Used by Lightning's loop, for loggers."""

    def __init__(self, trainer: L.Trainer, min_steps: int | None = None, max_steps: int = -1) -> None:
        super().__init__(trainer, min_steps, max_steps)
        self._results = _Results(training=True)
        self._short: bool | None = None  # whether Lightning's processing of a batch can be shortened; None: not known yet
        self._logs_steps = False
        self._logged = 0  # number of names logged at the end of an epoch
        self._moves = self._takes_number = True
        self._step: Callable[..., Any] = _nothing
        self._before_transfer: list[Callable[..., Any]] = []
        self._after_transfer: list[Callable[..., Any]] = []
        self._callbacks_start: list[Callable[..., Any]] = []
        self._callbacks_end: list[Callable[..., Any]] = []
        self._module_start: list[Callable[..., Any]] = []
        self._module_end: list[Callable[..., Any]] = []
        self._strategy_start: list[Callable[..., Any]] = []

    def run(self, data_fetcher: _DataFetcher) -> None:
        """Process all batches."""
        module = self.trainer.lightning_module
        before = module._current_fx_name
        try:
            super().run(data_fetcher)
        finally:
            module._current_fx_name = before
            self.manual_optimization.on_run_end()

    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        """Prepare an epoch."""
        super().on_run_start(data_fetcher)
        trainer, module = self.trainer, self.trainer.lightning_module
        if self._short is None:
            self._short = (
                not module.automatic_optimization
                and type(trainer.profiler) is PassThroughProfiler
                and not isinstance(data_fetcher, _DataLoaderIterDataFetcher)
                and not trainer.loggers
                and not trainer.fast_dev_run
            )
            if self._short:
                self._find_hooks()
        if self._short:
            data_fetcher._start_profiler = data_fetcher._stop_profiler = _nothing
            self.manual_optimization.on_run_start()
            module._current_fx_name = "training_step"
            self._logged = len(self._results)

    def _find_hooks(self) -> None:
        """Find the overridden hooks."""
        trainer, module = self.trainer, self.trainer.lightning_module
        self._step = trainer.strategy.training_step
        self._takes_number = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        self._callbacks_start = _who("on_train_batch_start", trainer.callbacks, L.Callback)
        self._callbacks_end = _who("on_train_batch_end", trainer.callbacks, L.Callback)
        self._module_start = _who("on_train_batch_start", [module], L.LightningModule)
        self._module_end = _who("on_train_batch_end", [module], L.LightningModule)
        self._strategy_start = _who("on_train_batch_start", [trainer.strategy], Strategy)
        data = trainer._data_connector._datahook_selector
        self._before_transfer = _who("on_before_batch_transfer", [data.get_instance("on_before_batch_transfer")], DataHooks)
        self._moves = bool(_who("transfer_batch_to_device", [data.get_instance("transfer_batch_to_device")], DataHooks))
        self._after_transfer = _who("on_after_batch_transfer", [data.get_instance("on_after_batch_transfer")], DataHooks)
        self._spare_hooks_of_a_step()

    def _spare_hooks_of_a_step(self) -> None:
        """Let the Trainer's own precision plugin call only overridden hooks of backward passes and optimizer steps."""
        trainer, plugin = self.trainer, self.trainer.precision_plugin
        short_ways = {
            "pre_backward": ("on_before_backward", lambda loss, module: loss),
            "post_backward": ("on_after_backward", lambda loss, module: loss.detach()),
            "optimizer_step": ("on_before_optimizer_step", _optimizer_step),
        }
        for name, (hook, short) in short_ways.items():
            vars(plugin).pop(name, None)
            overridden = _who(hook, trainer.callbacks, L.Callback) or _who(hook, [trainer.lightning_module], L.LightningModule)
            if not overridden and getattr(type(plugin), name) is getattr(Precision, name):
                setattr(plugin, name, short)

    def advance(self, data_fetcher: _DataFetcher) -> None:
        """Process one batch."""
        if not self._short:
            super().advance(data_fetcher)
            return
        trainer, progress = self.trainer, self.batch_progress
        module, results = trainer.lightning_module, self._results
        batch, _, _ = next(data_fetcher)
        number = self.batch_idx + 1
        progress.is_last_batch = data_fetcher.done
        batch = trainer.precision_plugin.convert_input(batch)
        for hook in self._before_transfer:
            batch = hook(batch, 0)
        if self._moves or not _is_on(batch, trainer.strategy.root_device):
            batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)  # calls the hook after the transfer, too
        else:
            for hook in self._after_transfer:
                batch = hook(batch, 0)
        progress.increment_ready()
        trainer._logger_connector.on_batch_start(batch)
        for hook in self._callbacks_start:
            hook(trainer, module, batch, number)
        skip = [hook(batch, number) for hook in self._module_start] == [-1]
        for hook in self._strategy_start:
            hook(batch, number)
        if skip:
            progress.increment_by(0, is_last_batch=True)
            progress.increment_processed()
            raise StopIteration
        progress.increment_started()
        output = self._step(batch, number) if self._takes_number else self._step(batch)
        output = self.manual_optimization.output_result_cls.from_training_step_output(output).asdict()
        progress.increment_processed()
        for hook in self._callbacks_end:
            hook(trainer, module, output, batch, number)
        for hook in self._module_end:
            hook(output, batch, number)
        if self._logs_steps or len(results) > self._logged:
            self._logs_steps = True
            trainer._logger_connector.on_batch_end()
        else:
            results.batch = results.batch_size = None
        progress.increment_completed()

    def on_advance_end(self, data_fetcher: _DataFetcher) -> None:
        """Validate if it is due."""
        if self._short and not self.trainer.limit_val_batches:
            self._batches_that_stepped += 1
        else:
            super().on_advance_end(data_fetcher)


class _Results(_ResultCollection):
    """Logged results. Lightning searches all of a result for tensors to move to a value's device, each time a value is logged; this
    class does so only if they are on another device.
    """

    def __setitem__(self, name: str, result: _ResultMetric) -> None:
        result.__class__ = _Result
        super().__setitem__(name, result)


class _Result(_ResultMetric):
    def to(self, *args: Any, **kwargs: Any) -> Any:
        own = getattr(self, "value", None)  # missing when a metric is logged for the first time
        return self if own is not None and (own.device,) == args else super().to(*args, **kwargs)


def _who(hook: str, objects: Iterable[Any], base: type) -> list[Callable[..., Any]]:
    """The hooks of those objects that override it."""
    default = getattr(base, hook)
    return [getattr(one, hook) for one in objects if hook in vars(one) or getattr(type(one), hook, default) is not default]


def _is_on(batch: Any, device: torch.device) -> bool:
    return type(batch) is tuple and all(isinstance(part, Tensor) and part.device == device for part in batch)


def _optimizer_step(optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
    return optimizer.step(closure=closure, **kwargs)


def _nothing() -> None:
    pass
