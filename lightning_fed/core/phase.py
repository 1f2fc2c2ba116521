"""A phase of training: what is trained, on which loss, with which optimizer and for how long; and the progress within it."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fed.core.schedules import Interval
from lightning_fed.errors import FederationError


@dataclass(frozen=True, eq=False)
class Phase:
    """A part of local training in which one set of parameters is trained and all others are frozen.

    Args:
        name: name of the phase in metrics (``train/<name>_loss``).
        parameters: trained parameters. All others have ``requires_grad=False`` and no optimizer entry and stay bit-identical.
        loss: loss of a batch, a scalar. It depends on the module and the batch alone and has no data-dependent control flow.
        optimizer: builds the phase's optimizer, anew each time the phase starts.
        epochs: passes over the data. Give either epochs or steps.
        steps: optimizer steps, across epochs if necessary. The next phase starts with a new epoch.
        eval_modules: modules in eval mode during the phase (dropout off, batch-norm statistics fixed).
        persistent: whether the optimizer state (moments) is kept from one fit to the next; in a federation it is part of the
            client's private state. Otherwise each fit starts without optimizer state.
        lr_scheduler: builds the learning-rate schedule from the optimizer. None: the module's, if it has one.
        lr_interval: unit that the schedule counts; see :class:`lightning_fed.core.schedules.Schedule`. None: the module's.
        penalty: scalar function of the parameters that is added to the loss. It is logged separately, so that losses of methods
            with and without a penalty are comparable. None: no penalty.
        terms: number of losses that the loss is the sum of. Their mean is logged, which is comparable with a single loss.
        gradient_clip: maximum gradient norm of a step. None: the module's.
    """

    name: str
    parameters: Sequence[nn.Parameter]
    loss: Callable[[Any], Tensor]
    optimizer: OptimizerCallable
    epochs: int | None = None
    steps: int | None = None
    eval_modules: Sequence[nn.Module] = ()
    persistent: bool = False
    lr_scheduler: LRSchedulerCallable | None = None
    lr_interval: Interval | None = None
    penalty: Callable[[], Tensor] | None = None
    terms: int = 1
    gradient_clip: float | None = None

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise FederationError(f"Phase {self.name!r} got epochs={self.epochs}, steps={self.steps}: give exactly one.")

    def new_optimizer(self) -> Optimizer:
        """A fresh optimizer for the phase.

        Raises:
            FederationError: if the optimizer refuses its settings, or needs a closure that evaluates the loss again.
        """
        try:
            optimizer = self.optimizer(self.parameters)
        except FederationError:
            raise
        except (TypeError, ValueError) as error:
            raise FederationError(f"The optimizer of phase {self.name!r} refuses its settings: {error}.") from error
        if not hasattr(optimizer, "param_groups"):
            raise FederationError(
                f"What builds the optimizer of phase {self.name!r} returned a {type(optimizer).__name__}: let it return a "
                "torch.optim.Optimizer."
            )
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise FederationError(
                f"The optimizer of phase {self.name!r} is {type(optimizer).__name__}, which needs a closure that computes the loss "
                "again: use one that does not, such as SGD or AdamW."
            )
        for group in optimizer.param_groups:  # NumPy's numbers keep a checkpoint from being loaded
            group |= {name: value.item() for name, value in group.items() if isinstance(value, np.generic)}
        return optimizer

    def num_epochs(self, batches_per_epoch: int, batches_per_step: int = 1) -> int:
        """Number of epochs that the phase spans; the last one may be cut short."""
        return self.epochs if self.epochs is not None else -(-(self.steps or 0) * batches_per_step // batches_per_epoch)

    def num_batches(self, batches_per_epoch: int, batches_per_step: int = 1) -> int:
        """Number of batches that the phase takes."""
        return self.epochs * batches_per_epoch if self.epochs is not None else (self.steps or 0) * batches_per_step


@dataclass(slots=True)
class Progress:
    """Position within a phase. It is a separate object because setting attributes of a module is slow compared to a small step.

    Args:
        phase: name of the phase; None: no phase is running.
        steps_left: remaining steps of a phase that is counted in steps.
        batches: number of batches of the running epoch, which the end of such a phase cuts short.
        waiting: batches of a step that needs more batches.
        last_step: the batch or batches of the last call of ``training_step``, if it made a step.
        optimizer: the phase's optimizer.
        losses: losses of the epoch's steps.
        sizes: number of examples of each step; of several batches, the terms of their losses.
    """

    phase: str | None = None
    steps_left: int | None = None
    batches: int | None = None
    waiting: list[Any] = field(default_factory=list)
    last_step: Any = None
    optimizer: LightningOptimizer | None = None
    losses: list[Tensor] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """The part that is saved to resume training."""
        names = ("phase", "steps_left", "batches", "waiting", "losses", "sizes")
        return {name: getattr(self, name) for name in names}
