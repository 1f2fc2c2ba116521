"""Learning-rate schedules over the steps or epochs of a phase, or over the rounds of a federation."""

import copy
import warnings
from typing import Any, Literal

from lightning.pytorch.cli import LRSchedulerCallable
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_fed.errors import FederationError

Interval = Literal["round", "epoch", "step"]
"""The unit that a schedule counts."""

SPANS = {"round": "rounds in the run", "epoch": "epochs in a phase", "step": "steps in a phase"}
"""What a schedule lasts for, by the unit that it counts."""

Reached = tuple[int, dict[str, Any], list[dict[str, Any]]]
"""A number of steps, the scheduler's state after them, and the optimizer's hyperparameters per parameter group."""


NEEDS_A_METRIC = (
    "ReduceLROnPlateau needs a metric, which a schedule over rounds, epochs or steps does not have: use another lr_scheduler, such "
    "as MultiStepLR or CosineAnnealingLR."
)


class Schedule:
    """The learning-rate schedule of one phase.

    Over ``step`` and ``epoch`` it restarts with each run of the phase, like the optimizer. Over ``round`` all steps of a phase have
    the same rate: that of the schedule after as many steps as there were rounds before.

    Args:
        factory: builds a PyTorch scheduler from an optimizer.
        interval: unit that it counts.
        optimizer: the phase's optimizer.
        earlier: the phase's schedule with an earlier optimizer. If it started as this one does, a new round takes one step from
            there, instead of as many steps as there were rounds. It may have started otherwise, for another client.

    Raises:
        FederationError: for a scheduler that needs a metric.
    """

    def __init__(
        self, factory: LRSchedulerCallable, interval: Interval, optimizer: Optimizer, earlier: "Schedule | None" = None
    ) -> None:
        scheduler = factory(optimizer)
        if isinstance(scheduler, ReduceLROnPlateau):
            raise FederationError(NEEDS_A_METRIC)
        self.interval: Interval = interval
        self.factory = factory
        self.scheduler: LRScheduler = scheduler
        self.rate = self._rate()
        self._optimizer = optimizer
        self._start = self._now(0)
        self._reached: Reached = earlier._reached if earlier and self._starts_as(earlier) else self._start

    def _starts_as(self, other: "Schedule") -> bool:
        """Whether both have the same factory and start in the same state, with the same hyperparameters."""
        try:
            return self.factory is other.factory and self._start == other._start
        except (RuntimeError, ValueError):  # of tensors and arrays with several values
            return False

    def begin(self, round: int) -> None:
        """Start the phase after ``round`` earlier rounds."""
        steps = round if self.interval == "round" else 0
        done, state, hyperparameters = self._reached if self._reached[0] <= steps else self._start
        self.scheduler.load_state_dict(copy.deepcopy(state))
        for group, values in zip(self._optimizer.param_groups, hyperparameters, strict=True):
            group.update(values)
        for _ in range(steps - done):
            self._advance()
        self._reached = self._now(steps)
        self.rate = self._rate()

    def step(self, interval: Interval) -> None:
        """Advance after a step or an epoch; :attr:`rate` is the learning rate that it had."""
        self.rate = self._rate()
        if interval == self.interval:
            self._advance()

    def _advance(self) -> None:
        with warnings.catch_warnings():
            # Over rounds the scheduler steps before this optimizer does; the optimizers of earlier rounds have stepped.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step\\(\\)` before")
            try:
                self.scheduler.step()
            except ValueError as error:
                if (last := getattr(self.scheduler, "total_steps", None)) is None:
                    raise
                raise FederationError(
                    f"The {type(self.scheduler).__name__} of lr_scheduler ends after its total_steps, {last} {self.interval}s: "
                    f"give it as many as there are {SPANS[self.interval]}, or set another lr_interval."
                ) from error

    def _rate(self) -> float:
        return float(self.scheduler.optimizer.param_groups[0]["lr"])

    def _now(self, steps: int) -> Reached:
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self._optimizer.param_groups]
        return steps, copy.deepcopy(self.scheduler.state_dict()), groups
