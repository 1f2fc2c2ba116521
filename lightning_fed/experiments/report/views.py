"""Which of a run's rounds a number is of: the last, the best on validation data, the best on test data, or the mean of several."""

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
"""What a round had cost when it was over, since the first: columns of ``metrics.csv``."""


def measure_of(metric: str) -> str:
    """The name of what a column measures: ``accuracy`` of ``after/test_accuracy/mean``."""
    match = re.search(r"(?:test|val)[_/](\w+)", metric)
    return match[1] if match else metric


def stage_of(metric: str) -> str:
    """Whose a number is, and when: ``after``, of the clients' models after aggregation, or ``global``, say."""
    return metric.partition("/")[0]


def in_percent(metric: str) -> bool:
    """Whether a column is an accuracy."""
    return measure_of(metric).endswith("accuracy")


def lower_is_better(metric: str, facts: Mapping[str, Any] | None = None) -> bool:
    """Whether small values of a column are good ones.

    Args:
        metric: the column.
        facts: what a run says of itself in ``run.json``, where its monitored metric may be a measure of the user's own.
    """
    if facts and measure_of(facts["monitor"]) == measure_of(metric):
        return not facts["higher_is_better"]
    return measure_of(metric) in LOWER_IS_BETTER


@dataclass(frozen=True)
class View:
    """How a run's rounds become one number.

    Args:
        at: ``last``: when last measured; ``selected``: at the round that is best on validation data; ``best``: at the round that is
            best on what is reported itself, which is a choice on test data; ``mean10``, or another number: the mean of the last ten
            rounds that were measured.

    Raises:
        FederationError: if it is none of these.
    """

    at: str = "last"

    def __post_init__(self) -> None:
        """Refuse what is no view."""
        if not VIEWS.fullmatch(self.at):
            raise FederationError(f"at is {self.at!r}, expected last, selected, best or, say, mean10.")

    @property
    def span(self) -> int:
        """How many rounds the mean is over; 0 where it is no mean."""
        match = VIEWS.fullmatch(self.at)
        return int(match[1]) if match and match[1] else 0

    @property
    def called(self) -> str:
        """The heading of a column of such numbers."""
        names = {"last": "last round", "selected": "best on validation", "best": "best measured round, chosen on test data"}
        return names.get(self.at) or f"mean of the last {self.span} measured rounds"

    def value(self, rounds: pd.DataFrame, metric: str, lower: bool | None = None) -> float:
        """The number of a run; NaN where its rounds do not have it.

        Args:
            rounds: its ``metrics.csv``, or the first rounds of it.
            metric: a column.
            lower: whether small values of it are good ones; None: its name says so.
        """
        measured = measured_in(rounds, metric)
        if self.span:
            return float(measured[metric].iloc[-self.span :].mean()) if len(measured) >= self.span else math.nan
        row = self.row(measured, metric, lower)
        return math.nan if row is None else float(row[metric])

    def row(self, rounds: pd.DataFrame, metric: str, lower: bool | None = None) -> "pd.Series | None":
        """The round that is looked at; None if there is none, or if it is several. Arguments are those of :meth:`value`."""
        measured = measured_in(rounds, metric)
        by = {"selected": metric.replace("test_", "val_"), "best": metric, "last": "round"}.get(self.at)
        lower = lower_is_better(metric) if lower is None else lower
        known = measured[by].dropna() if by in measured else measured[:0]
        if known.empty:
            return None
        return measured.loc[known.idxmin() if by != "round" and lower else known.idxmax()]


def measured_in(rounds: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The rounds in which a column was measured."""
    return rounds[rounds[metric].notna()] if metric in rounds else rounds[:0]


def up_to(rounds: pd.DataFrame, cost: Cost, budget: float) -> pd.DataFrame:
    """The rounds that a run finishes within a budget."""
    return rounds[rounds[COSTS[cost]] <= budget]


def rough(number: float) -> str:
    """Three digits and a power of ten; nothing is 0."""
    if not number:
        return "0"
    return f"{number:.2e}".replace("e+0", "e").replace("e+", "e")
