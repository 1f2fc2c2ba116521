"""The round of a run that is reported: the last, the best on validation data, the best on test data, or the mean of several."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd

from lightning_fed.errors import FederationError
from lightning_fed.experiments.sweep.plan import VIEWS

LOWER_IS_BETTER = {"loss", "perplexity", "ter", "rmse", "mae"}

Cost = Literal["rounds", "bytes", "flops"]

COSTS: dict[Cost, str] = {"rounds": "round", "bytes": "traffic/total_bytes", "flops": "compute/total_flops"}
"""Total costs at the end of a round: columns of ``metrics.csv``."""


def measure_of(metric: str) -> str:
    """The measure of a column: ``accuracy`` for ``after/test_accuracy/mean``."""
    match = re.search(r"(?:test|val)[_/](\w+)", metric)
    return match[1] if match else metric


def stage_of(metric: str) -> str:
    """The stage of a column: ``after`` for the clients' models after aggregation, or ``global``, for example."""
    return metric.partition("/")[0]


def kind_of(metric: str) -> tuple[str, str]:
    """Stage and measure of a column; only equal ones are compared. ``adapted_accuracy``, of a model that a client adapts before it
    is measured, is an accuracy.
    """
    return stage_of(metric), measure_of(metric).removeprefix("adapted_")


def in_percent(metric: str) -> bool:
    """Whether a column is an accuracy."""
    return measure_of(metric).endswith("accuracy")


def lower_is_better(metric: str, facts: Mapping[str, Any] | None = None) -> bool:
    """Whether smaller values of a column are better. A user's own measures are known by ``facts``, the content of ``run.json``."""
    if facts and measure_of(facts["monitor"]) == measure_of(metric):
        return not facts["higher_is_better"]
    measure = measure_of(metric)
    return measure.endswith("_loss") or measure in LOWER_IS_BETTER.union((facts or {}).get("lower_is_better", ()))


@dataclass(frozen=True)
class View:
    """How a run's rounds become one number.

    Args:
        at: ``last``: the last evaluation; ``selected``: the round that is best on validation data; ``best``: the round that is best
            on the reported metric itself, which selects on test data; ``mean10``, or another number: the mean of the last ten
            evaluated rounds.

    Raises:
        FederationError: for any other value.
    """

    at: str = "last"

    def __post_init__(self) -> None:
        if not VIEWS.fullmatch(self.at):
            raise FederationError(f"at is {self.at!r}, expected last, selected, best or, say, mean10.")

    @property
    def span(self) -> int:
        """Number of rounds that are averaged; 0 without averaging."""
        match = VIEWS.fullmatch(self.at)
        return int(match[1]) if match and match[1] else 0

    @property
    def called(self) -> str:
        """Heading of a column of such numbers."""
        names = {"last": "last round", "selected": "best on validation", "best": "best measured round, chosen on test data"}
        return names.get(self.at) or f"mean of the last {self.span} measured rounds"

    def value(self, rounds: pd.DataFrame, metric: str, lower: bool | None = None) -> float:
        """The number of a run, from its ``metrics.csv`` or its first rounds; NaN if they do not have it. ``lower``: whether smaller
        values are better. None: determined from the name of the column.
        """
        measured = measured_in(rounds, metric)
        if self.span:
            return float(measured[metric].iloc[-self.span :].mean(skipna=False)) if len(measured) >= self.span else math.nan
        row = self.row(measured, metric, lower)
        return math.nan if row is None else float(row[metric])

    def row(self, rounds: pd.DataFrame, metric: str, lower: bool | None = None) -> "pd.Series | None":
        """The reported round; None if there is none, or if there are several. Arguments are those of :meth:`value`."""
        measured = measured_in(rounds, metric)
        validation = metric.replace("test_", "val_")
        by = {"selected": validation if "val_" in validation else None, "best": metric, "last": "round"}.get(self.at)
        lower = lower_is_better(metric) if lower is None else lower
        known = measured[by].dropna() if by in measured else measured[:0]
        if known.empty:
            return None
        return measured.loc[known.idxmin() if by != "round" and lower else known.idxmax()]


def measured_in(rounds: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The rounds in which a column was evaluated, also where it came to no number and others of its stage did."""
    if metric not in rounds:
        return rounds[:0]
    return rounds[rounds.filter(regex=rf"^{re.escape(stage_of(metric))}/test_|^{re.escape(metric)}$").notna().any(axis=1)]


def up_to(rounds: pd.DataFrame, cost: Cost, budget: float) -> pd.DataFrame:
    """The rounds that a run finishes within a budget."""
    return rounds[rounds[COSTS[cost]] <= budget]


def rough(number: float) -> str:
    """A number with three digits and a power of ten; 0 as 0."""
    if not number:
        return "0"
    return f"{number:.2e}".replace("e+0", "e").replace("e+", "e")
