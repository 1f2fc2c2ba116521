"""What is compared with what: the finished runs of a setting, and what a report shows of them."""

from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from lightning_fed.errors import FederationError
from lightning_fed.experiments.report.pairing import DRAW, cells_of
from lightning_fed.experiments.report.statistics import Cells, Estimate, estimate
from lightning_fed.experiments.report.views import View, in_percent, lower_is_better, rough, stage_of
from lightning_fed.experiments.sweep.plan import ReportOptions
from lightning_fed.formatting import sized


@dataclass(frozen=True)
class Comparison:
    """Methods in a setting.

    Args:
        setting: the point of the grid; empty without one.
        runs: its finished runs, as :func:`.load_runs` gives them.
        options: what is shown.
        baseline: the method that differences are to.
    """

    setting: str
    runs: pd.DataFrame
    options: ReportOptions
    baseline: str

    @cached_property
    def methods(self) -> dict[str, pd.DataFrame]:
        """The runs of each method, by partition and seed."""
        return {str(method): group.set_index(DRAW) for method, group in self.runs.groupby("method", sort=False)}

    @cached_property
    def metrics(self) -> dict[str, str]:
        """The column of ``metrics.csv`` that each method is measured by."""
        return {method: str(group["metric"].iloc[0]) for method, group in self.methods.items()}

    @property
    def mixed(self) -> bool:
        """Whether some are measured by clients' means, say, and others by a global model: then there is no best one."""
        return len({stage_of(metric) for metric in self.metrics.values()}) > 1

    @property
    def lower(self) -> bool:
        """Whether small values are good."""
        known = "lower_is_better" in self.runs  # files of earlier versions do not say
        return bool(self.runs["lower_is_better"].any()) if known else lower_is_better(next(iter(self.metrics.values())))

    @property
    def scale(self) -> float:
        """What numbers are multiplied by: 100 where all are accuracies."""
        return 100.0 if all(map(in_percent, self.metrics.values())) else 1.0

    @property
    def digits(self) -> int:
        """Behind the point of a number: as many make a difference of percent or of thousandths."""
        return 2 if self.scale == 100.0 else 3

    @cached_property
    def measures(self) -> dict[str, str]:
        """What is shown of each run: columns of :attr:`runs`, and how they are called. The first is what is compared."""
        view, equal, found = View(self.options.at), self.options.equal, dict[str, str]()
        if equal is not None:
            called = {"rounds": "rounds", "bytes": "bytes sent", "flops": "training FLOPs"}[equal]
            budget = self.runs[f"equal_{equal}_budget"].iloc[0]
            spent = {"rounds": f"{budget:.0f}", "bytes": sized(budget), "flops": rough(budget)}[equal]
            found[f"equal_{equal}"] = f"at equal {called} ({spent})" + ("" if view.at == "last" else f", {view.called}")
        found |= {name: View(name).called for name in dict.fromkeys((view.at, "last", "selected"))}
        of_clients = {"worst_tenth": "worst tenth of clients"} | ({"pooled": "pooled"} if self.options.pooled else {})
        ended = "" if next(iter(found)) == "last" else ", last round"
        found |= {name: f"{called}{ended}" for name, called in of_clients.items()}
        return {name: called for name, called in found.items() if self.runs[name].notna().any()}

    @property
    def compared(self) -> str:
        """The measure that differences are of."""
        return next(iter(self.measures))

    def values(self, measure: str) -> dict[str, pd.Series]:
        """Of each method, by partition and seed."""
        return {method: group[measure] for method, group in self.methods.items()}

    @property
    def alike(self) -> list[str]:
        """Methods that have the baseline's kind of metric, the baseline among them."""
        stage = stage_of(self.metrics[self.baseline])
        return [method for method, metric in self.metrics.items() if stage_of(metric) == stage]

    def cells(self, measure: str, method: str, other: str) -> Cells:
        """Differences between two methods, by partition and seed, as far as both have them."""
        return cells_of((self.methods[method][measure] - self.methods[other][measure]).dropna())

    def differences(self, measure: str) -> dict[str, Estimate]:
        """To the baseline, of each method that is like it."""
        others = [method for method in self.alike if method != self.baseline]
        return {method: estimate(self.cells(measure, method, self.baseline)) for method in others}

    @property
    def partitions(self) -> list[int]:
        """Seeds of the partitions."""
        return sorted(map(int, self.runs["partition"].unique()))

    @property
    def seeds(self) -> list[int]:
        """Training seeds."""
        return sorted(map(int, self.runs["seed"].unique()))

    @property
    def crossed(self) -> bool:
        """Whether partitions have seeds of their own; else each seed draws one, and moves both."""
        return not self.runs["partition"].equals(self.runs["seed"])


def comparisons(runs: pd.DataFrame, options: ReportOptions) -> list[Comparison]:
    """One per setting.

    Args:
        runs: as :func:`.load_runs` gives them, or its CSV file. Runs that are not finished are left out.
        options: what is shown. Without a baseline: the clients alone (``Standalone``) if they are there, else the first method.

    Raises:
        FederationError: if there is no such baseline, no finished run, or if the runs were loaded without what is to be shown.
    """
    finished = runs[runs["rounds"] >= runs["planned"]]
    if finished.empty:
        raise FederationError(f"None of the {len(runs)} runs is finished: play them to their last round first.")
    for option, value, column in (("at", View(options.at).at, options.at), ("equal", options.equal, f"equal_{options.equal}")):
        if value is not None and column not in runs:
            raise FederationError(f"The table of runs has no column {column}: write it with {option} {value}.")
    groups = finished.groupby("setting", sort=False)
    return [Comparison(str(setting), group, options, baseline_of(group, options.baseline)) for setting, group in groups]


def unfinished(runs: pd.DataFrame) -> list[str]:
    """A line for each run that a table leaves out."""
    rest = runs[runs["rounds"] < runs["planned"]]
    return [f"Left out: {row.folder} has finished {row.rounds} of {row.planned} rounds." for row in rest.itertuples()]


def baseline_of(runs: pd.DataFrame, baseline: str | None) -> str:
    """The method that differences are to."""
    methods = list(runs["method"].unique())
    alone = list(runs.loc[runs["model"] == "Standalone", "method"])
    chosen = baseline if baseline is not None else (alone or methods)[0]
    if chosen not in methods:
        raise FederationError(f"There is no method {chosen!r} to be the baseline; there are {', '.join(methods)}.")
    return str(chosen)
