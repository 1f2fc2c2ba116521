"""A phase of training: what learns, on which loss, with which optimizer, for how long; and where in it a training is."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fed.core.schedules import Interval
from lightning_fed.errors import FederationError


@dataclass(frozen=True, eq=False)
class Phase:
    """A stretch of training in which one set of parameters learns and everything else is frozen.

    Args:
        name: how the phase is called in metrics (``train/<name>_loss``).
        parameters: what learns. Everything else has ``requires_grad=False`` and no optimizer entry, so it stays bit-identical.
        loss: the loss of a batch, a scalar. It depends on the module and the batch alone and has no data-dependent control flow.
        optimizer: builds the phase's optimizer, fresh each time the phase starts.
        epochs: passes over the data. Give either epochs or steps.
        steps: optimizer steps, across epochs if need be. The next phase starts with a new epoch.
        eval_modules: modules that are in eval mode during the phase (dropout off, batch-norm statistics fixed).
        persistent: whether the optimizer's state (moments) is kept from one fit to the next: in a federation it is private state,
            and stays with the client. Else each fit begins with an empty one.
        lr_scheduler: builds the schedule of the optimizer's learning rate; None: the module's, if it has one.
        lr_interval: what the schedule counts; see :class:`lightning_fed.core.schedules.Schedule`. None: the module's.
        penalty: of the parameters, a scalar that is added to the loss. It is logged apart, so that losses of methods with and
            without one can be compared. None: there is none.
        terms: of how many losses the loss is the sum. Logged is their mean, which compares with the loss of a method that has one.
        gradient_clip: largest gradient norm of a step; None: the module's.
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
        """The phase's optimizer, fresh.

        Raises:
            FederationError: if it refuses its settings, or cannot step on gradients that are there.
        """
        try:
            optimizer = self.optimizer(self.parameters)
        except FederationError:
            raise
        except ValueError as error:
            raise FederationError(f"The optimizer of phase {self.name!r} takes no such settings: {error}.") from error
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise FederationError(
                f"The optimizer of phase {self.name!r} is {type(optimizer).__name__}, which asks for the loss again within a step: "
                "take one that steps on gradients, SGD or AdamW, say."
            )
        return optimizer

    def num_epochs(self, batches_per_epoch: int, batches_per_step: int = 1) -> int:
        """Epochs that the phase spans, the last one possibly cut short."""
        return self.epochs if self.epochs is not None else -(-(self.steps or 0) * batches_per_step // batches_per_epoch)

    def num_batches(self, batches_per_epoch: int, batches_per_step: int = 1) -> int:
        """Batches that the phase takes."""
        return self.epochs * batches_per_epoch if self.epochs is not None else (self.steps or 0) * batches_per_step


@dataclass(slots=True)
class Progress:
    """Where a phase is. An object beside the module: to set an attribute of a module takes long, next to a small step.

    Args:
        phase: its name; None: no phase is running.
        steps_left: of a phase that is counted in steps.
        batches: of the running epoch, which the end of such a phase cuts short.
        waiting: batches of a step that waits for more.
        last_step: the batch, or the batches, of the last call of ``training_step`` if it stepped.
        optimizer: the phase's.
        losses: of the epoch's steps.
        sizes: number of examples of each.
    """

    phase: str | None = None
    steps_left: int | None = None
    batches: int | None = None
    waiting: list[Any] = field(default_factory=list)
    last_step: Any = None
    optimizer: LightningOptimizer | None = None
    losses: list[Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """What a stopped training needs to go on."""
        names = ("phase", "steps_left", "batches", "waiting", "losses", "sizes")
        return {name: getattr(self, name) for name in names}
