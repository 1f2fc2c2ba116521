"""Schedules of a learning rate: over the steps or the epochs of a phase, or over the rounds of a federation."""

import copy
import warnings
from typing import Any, Literal

from lightning.pytorch.cli import LRSchedulerCallable
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_fed.errors import FederationError

Interval = Literal["round", "epoch", "step"]
"""What a schedule counts."""


Reached = tuple[int, dict[str, Any], list[dict[str, Any]]]
"""A number of steps; the scheduler's state after them, and the optimizer's hyperparameters, per group of parameters."""


class Schedule:
    """The schedule of one phase's optimizer.

    Over ``step`` and ``epoch`` it begins anew with each run of the phase, as the optimizer does. Over ``round`` the phase has the
    same rate in all its steps: that which the schedule has after as many steps as there were rounds before.

    Args:
        factory: builds a scheduler of PyTorch's from an optimizer.
        interval: what it counts.
        optimizer: of the phase.
        earlier: the schedule that the phase had with an earlier optimizer: from there a round is one step further, not as many
            steps as there were rounds.

    Raises:
        FederationError: for a scheduler that waits for a measurement.
    """

    def __init__(
        self, factory: LRSchedulerCallable, interval: Interval, optimizer: Optimizer, earlier: "Schedule | None" = None
    ) -> None:
        scheduler = factory(optimizer)
        if isinstance(scheduler, ReduceLROnPlateau):
            raise FederationError(
                "ReduceLROnPlateau waits for a measurement, which a schedule over rounds, epochs or steps has not: take another "
                "lr_scheduler, MultiStepLR or CosineAnnealingLR, say."
            )
        self.interval: Interval = interval
        self.scheduler: LRScheduler = scheduler
        self.rate = self._rate()
        self._optimizer = optimizer
        self._start = self._now(0)
        self._reached: Reached = earlier._reached if earlier else self._start

    def begin(self, round: int) -> None:
        """The phase begins, after so many rounds."""
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
        """A step, or an epoch, is over. :attr:`rate` is what it had."""
        self.rate = self._rate()
        if interval == self.interval:
            self._advance()

    def _advance(self) -> None:
        with warnings.catch_warnings():
            # Over rounds it steps before any optimizer does: those of earlier rounds did.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step\\(\\)` before")
            self.scheduler.step()

    def _rate(self) -> float:
        return float(self.scheduler.optimizer.param_groups[0]["lr"])

    def _now(self, steps: int) -> Reached:
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self._optimizer.param_groups]
        return steps, copy.deepcopy(self.scheduler.state_dict()), groups
