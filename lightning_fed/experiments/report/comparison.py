"""Comparisons: the finished runs of a setting, and what a report shows of them."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median

import numpy as np
import pandas as pd

from lightning_fed.errors import FederationError
from lightning_fed.experiments.report.pairing import DRAW, cells_of
from lightning_fed.experiments.report.statistics import Cells, Estimate, estimate
from lightning_fed.experiments.report.views import View, in_percent, kind_of, lower_is_better, rough
from lightning_fed.experiments.sweep.folder import CellFolder
from lightning_fed.experiments.sweep.plan import ReportOptions
from lightning_fed.formatting import sized


@dataclass(frozen=True)
class Comparison:
    """The methods of a setting.

    Args:
        setting: point of the grid; empty without one.
        runs: its finished runs, as returned by :func:`.load_runs`.
        options: what to show.
        baseline: reference method of differences.
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
        """The column of ``metrics.csv`` for each method."""
        return {method: str(group["metric"].iloc[0]) for method, group in self.methods.items()}

    @property
    def mixed(self) -> bool:
        """Whether methods have different kinds of metrics (other measures, or clients' means and a global model): then no method is
        the best.
        """
        return len({kind_of(metric) for metric in self.metrics.values()}) > 1

    @property
    def lower(self) -> bool:
        """Whether smaller values of the baseline's metric are better."""
        of_baseline = self.methods[self.baseline]
        known = "lower_is_better" in of_baseline  # missing in files of earlier versions
        return bool(of_baseline["lower_is_better"].any()) if known else lower_is_better(self.metrics[self.baseline])

    @property
    def scale(self) -> float:
        """Factor of the numbers: 100 if all are accuracies."""
        return 100.0 if all(map(in_percent, self.metrics.values())) else 1.0

    @property
    def digits(self) -> int:
        """Number of decimals: 2 of percents, otherwise at least 3, and so many that a usual standard deviation has two digits."""
        if self.scale == 100.0:
            return 2
        values = [of[np.isfinite(of)] for of in self.values(self.compared).values()]
        sizes = [size for of in values if len(of) and (size := of.std(ddof=1) if len(of) > 1 else abs(of.mean())) > 1e-9]
        return min(max(3, 1 - math.floor(math.log10(median(sizes)))), 9) if sizes else 3

    @cached_property
    def measures(self) -> dict[str, str]:
        """The measures of a run to show: columns of :attr:`runs`, and their names. The first one is compared. Those without any
        number are left out, unless that would be all.
        """
        view, equal, found = View(self.options.at), self.options.equal, dict[str, str]()
        if equal is not None:
            called = {"rounds": "rounds", "bytes": "bytes sent", "flops": "training FLOPs"}[equal]
            budget = self.runs[f"equal_{equal}_budget"].fillna(0).iloc[0]  # NaN: nobody sends anything
            spent = {"rounds": f"{budget:.0f}", "bytes": sized(budget), "flops": rough(budget)}[equal]
            found[f"equal_{equal}"] = f"at equal {called} ({spent})" + ("" if view.at == "last" else f", {view.called}")
        found |= {name: View(name).called for name in dict.fromkeys((view.at, "last", "selected"))}
        of_clients = {"worst_tenth": "worst tenth of clients"} | ({"pooled": "pooled"} if self.options.pooled else {})
        ended = "" if next(iter(found)) == "last" else ", last round"
        found |= {name: f"{called}{ended}" for name, called in of_clients.items()}
        known = {name: called for name, called in found.items() if self.runs[name].notna().any()}
        return known or dict([next(iter(found.items()))])

    @property
    def compared(self) -> str:
        """The measure whose differences are shown."""
        return next(iter(self.measures))

    def values(self, measure: str) -> dict[str, pd.Series]:
        """The values of each method, by partition and seed."""
        return {method: group[measure] for method, group in self.methods.items()}

    @property
    def alike(self) -> list[str]:
        """Methods with the baseline's kind of metric, including the baseline."""
        kind = kind_of(self.metrics[self.baseline])
        return [method for method, metric in self.metrics.items() if kind_of(metric) == kind]

    def cells(self, measure: str, method: str, other: str) -> Cells:
        """Differences between two methods, by partition and seed, where both have a run."""
        return cells_of((self.methods[method][measure] - self.methods[other][measure]).dropna())

    def differences(self, measure: str) -> dict[str, Estimate]:
        """Differences to the baseline, for each method with the same kind of metric."""
        others = [method for method in self.alike if method != self.baseline]
        return {method: estimate(self.cells(measure, method, self.baseline)) for method in others}

    @property
    def partitions(self) -> list[int]:
        """Seeds of the partitions."""
        return sorted(map(int, self.runs["partition"].unique()))

    @property
    def seeds(self) -> list[int]:
        return sorted(map(int, self.runs["seed"].unique()))

    @property
    def same_clients(self) -> bool:
        """Whether all partitions have the clients of the data, divided into training and test examples in other ways."""
        return "natural_clients" in self.runs and bool(self.runs["natural_clients"].all())

    @property
    def crossed(self) -> bool:
        """Whether partitions have their own seeds; otherwise each seed determines the partition and everything else."""
        return not self.runs["partition"].equals(self.runs["seed"])


def comparisons(runs: pd.DataFrame, options: ReportOptions, of_sweeps: Collection[str] = ()) -> list[Comparison]:
    """A comparison per setting.

    Args:
        runs: as returned by :func:`.load_runs`, or its CSV file. Unfinished runs are left out.
        options: what to show. Without a baseline, or where it has no finished run: local training (``Standalone``) if it is there,
            else the first method.
        of_sweeps: methods of sweeps, which are known even if no run of theirs has finished a round.

    Raises:
        FederationError: if the baseline or a reference of ``between`` does not exist, no run is finished, or the runs were loaded
            without what is to be shown.
    """
    methods = dict.fromkeys((*runs["method"], *of_sweeps))
    for name, role in ((options.baseline, "to be the baseline"), *((name, "to leave a gap") for name in options.between or ())):
        if name is not None and name not in methods:
            raise FederationError(f"There is no method {name!r} {role}; there are {', '.join(methods)}.")
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
    records = [CellFolder(Path(folder).parent).result for folder in rest["folder"]]
    whys = [f": {record.error.rstrip('.')}" if record is not None and record.error else "" for record in records]
    return [
        f"Left out: {row.folder} has finished {row.rounds} of {row.planned} rounds{why}."
        for row, why in zip(rest.itertuples(), whys, strict=True)
    ]


def baseline_of(runs: pd.DataFrame, baseline: str | None) -> str:
    """The reference method of differences: the given one, if it has a run; otherwise one whose metric has come to a number."""
    methods = list(runs["method"].unique())
    if baseline not in methods and runs["last"].notna().any():
        runs = runs[runs["last"].notna()]
    alone = list(runs.loc[runs["model"] == "Standalone", "method"])
    return str(baseline if baseline in methods else [*alone, *runs["method"]][0])
