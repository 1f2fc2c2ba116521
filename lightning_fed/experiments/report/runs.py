"""Results of runs as tables: a row per run, per round, or per client."""

import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lightning_fed.errors import FederationError
from lightning_fed.experiments.renames import METRICS, hint
from lightning_fed.experiments.report.files import AS_WRITTEN, read_clients, read_crossed, read_rounds
from lightning_fed.experiments.report.folders import RunFolder, run_folders
from lightning_fed.experiments.report.views import (
    COSTS,
    Cost,
    View,
    in_percent,
    kind_of,
    lower_is_better,
    measure_of,
    measured_in,
    up_to,
)
from lightning_fed.experiments.sweep.run_files import refuse_cut_clients

KEY = ("method", "setting", "partition", "seed")
"""Columns that identify the run of a row."""

READ = {"metrics.csv": read_rounds, "clients.csv": read_clients, "cross.csv": read_crossed}
"""How the tables of a run are read."""

UNSEEN = "as_received", "personalized", "fine_tuned"
"""How clients are evaluated that never take part in training."""

MONITOR = "monitor"
"""Stands for each method's own monitored metric."""


def load_runs(
    *folders: Path | str,
    metric: str | None = None,
    target: float | None = None,
    vary: Collection[str] = (),
    at: str = "last",
    equal: Cost | None = None,
) -> pd.DataFrame:
    """A row per run below some folders.

    Args:
        folders: folders of runs, of sweeps, or parents of these.
        metric: column of ``metrics.csv``, with or without ``/mean``; ``monitor``: each method's own monitored metric. None: the
            same, unless methods report different measures, or some the clients' mean and others a global model; then what all of
            them have, the clients' mean after aggregation of the measure that the runs select by, ``after/test_accuracy/mean`` for
            classification.
        target: value of the metric; the row says when it was first reached.
        vary: see :func:`lightning_fed.experiments.report.folders.run_folders`.
        at: the reported round; see :class:`.View`.
        equal: compare at equal cost: the value with the most rounds, bytes or FLOPs that all finished runs of a setting have spent.
            Runs that send nothing do not count for bytes.

    Returns:
        Unknown values are NaN. The columns are

        - ``method``, ``setting``, the seeds ``partition`` and ``seed`` (of everything else), ``equal_partitions``, the seeds that
          make the same partition, if there are several, of which ``partition`` is the first; ``natural_clients``: whether clients
          are those of the data, whatever the seed; ``model`` (the method's class);
        - ``rounds`` that were run, ``planned`` ones, ``epochs`` per round, phase by phase;
        - ``metric``, ``monitor`` (the monitored metric of the method), ``lower_is_better`` of the metric;
        - the metric's ``last`` value, ``selected``, at the round ``selected_round`` that is best on validation data, ``best``, at
          the round ``best_round`` that is best on test data, and with ``at="mean10"``, for example, ``mean10``; with
          ``equal="flops"``, for example, ``equal_flops`` (its value at the round ``at``, among those that count) and
          ``equal_flops_budget``, and ``equal_flops_reached``, the share of it at the last measurement that counts;
        - over the clients at their last evaluation: ``worst_tenth``, the mean of the worst tenth of them, ``pooled``, their mean
          weighted by test examples, and ``majority``, the accuracy of each client's most frequent label; ``unseen_<stage>`` of
          clients that never take part in training, if there are any, in the last round;
        - of the whole run: ``bytes``, ``flops`` of the clients' training, ``server_flops`` of the server's own training and
          predictions, ``seconds`` (training, aggregation and evaluation); ``target_round``, ``target_bytes``, ``target_flops``;
          ``made_with``, versions and commit, if a sweep has recorded them; ``folder``.

    Raises:
        FederationError: if there is no run, or if they differ in something that is not meant to vary.
    """
    return table_of(run_folders(folders, vary), metric, target, at, equal)


def table_of(runs: Sequence[RunFolder], metric: str | None, target: float | None, at: str, equal: Cost | None) -> pd.DataFrame:
    """The table of :func:`load_runs`, of runs that have been found."""
    metrics, view = metrics_of(runs, metric), View(at)
    if target is not None and target > 1 and any(map(in_percent, metrics)):
        raise FederationError(f"target is {target:g}, but accuracies are shares of 1: give {target / 100:g} for {target:g} %.")
    rounds = [read_rounds(run.path) for run in runs]
    table = pd.DataFrame([_row(*of_run, view, target) for of_run in zip(runs, rounds, metrics, strict=True)])
    if equal is not None:
        _compare_at(table, rounds, equal, view)
    return table


def read_runs(path: Path | str) -> pd.DataFrame:
    """The rows of :func:`load_runs` from the CSV file that they were written to."""
    texts = ("method", "setting", "epochs", "monitor", "equal_partitions", "made_with")
    table = pd.read_csv(path, **AS_WRITTEN | {"dtype": dict.fromkeys(texts, str)}).fillna(dict.fromkeys(texts, ""))
    if "partition" not in table:  # in files of earlier versions
        table.insert(table.columns.get_loc("seed"), "partition", table["seed"])
    return table


def load_rounds(*folders: Path | str, vary: Collection[str] = ()) -> pd.DataFrame:
    """A row per run and round: ``method``, ``setting``, ``partition``, ``seed``, and all of ``metrics.csv``."""
    return stacked(run_folders(folders, vary), "metrics.csv")


def load_clients(*folders: Path | str, vary: Collection[str] = ()) -> pd.DataFrame:
    """A row per run and client, from its last evaluation: ``method``, ``setting``, ``partition``, ``seed``, and all of
    ``clients.csv``.
    """
    return stacked(run_folders(folders, vary), "clients.csv")


def load_crossed(*folders: Path | str, vary: Collection[str] = ()) -> pd.DataFrame:
    """A row per run, trained client and tested client: ``method``, ``setting``, ``partition``, ``seed``, all of ``cross.csv``, and
    the ``name`` of the trained client.
    """
    return stacked(run_folders(folders, vary), "cross.csv")


def metrics_of(runs: Sequence[RunFolder], metric: str | None) -> list[str]:
    """The column of each run that ``metric`` refers to; see :func:`load_runs`. Raises :class:`FederationError` if no run has it."""
    monitored = [run.monitor for run in runs]
    if metric == MONITOR or (metric is None and len(set(map(kind_of, monitored))) == 1):
        return monitored
    return [_column(runs, metric)] * len(runs)


def _column(runs: Collection[RunFolder], metric: str | None) -> str:
    """The column that ``metric`` refers to for all runs."""
    of_runs = [list(read_rounds(run.path)) for run in runs]
    columns = list(dict.fromkeys(itertools.chain(*of_runs)))
    chosen = [match[1] for column in columns if (match := re.fullmatch(r"selected/test_(\w+)", column))]
    found = [match[1] for column in columns if (match := re.fullmatch(r"after/test_(\w+)/mean", column))]
    known = [name for name in (*chosen, *found) if name != "loss"] or found
    measured = [of for of in of_runs if any("test_" in column for column in of)]  # others have begun only
    measures = [name for name in known if all(f"after/test_{name}/mean" in of for of in measured)] or known
    if metric is None and measures:
        metric = f"after/test_{measures[0]}/mean"
    for candidate in (metric, f"{metric}/mean"):
        if candidate in columns:
            return str(candidate)
    offered = [column for column in columns if "test_" in column and column.endswith("/mean")]
    offered += [column for column in columns if column.startswith("global/test_")]
    wanted = f"{metric}{hint(metric, METRICS)}" if metric else "any measure on test data"
    raise FederationError(f"No run has {wanted}; there are {', '.join(offered) or 'none'}.")


def _row(run: RunFolder, rounds: pd.DataFrame, metric: str, view: View, target: float | None) -> dict[str, Any]:
    seconds = rounds[[column for column in rounds if column.startswith("seconds/")]].sum().sum()
    lower = lower_is_better(metric, run.facts)
    row = {
        **{"method": run.method, "setting": run.setting, "partition": run.partition, "seed": run.seed},
        "equal_partitions": ", ".join(map(str, run.equal)),
        "natural_clients": bool(run.facts.get("natural_clients")),
        "model": str(run.settings["model.class_path"]).rpartition(".")[2],
        "rounds": int(rounds["round"].iloc[-1]),
        "planned": run.planned_rounds,
        "epochs": work_of(run.facts),
        **{"metric": metric, "monitor": run.monitor, "lower_is_better": lower},
        **_views(rounds, metric, view, lower),
        **_of_clients(run, metric, lower, rounds["round"].iloc[-1] >= run.planned_rounds),
        **_of_unseen(rounds, metric),
        "bytes": rounds["traffic/total_bytes"].iloc[-1],
        "flops": rounds["compute/total_flops"].iloc[-1],
        "server_flops": rounds["server/total_flops"].iloc[-1] if "server/total_flops" in rounds else 0.0,
        "seconds": round(seconds, 1),
    }
    if target is not None and metric in rounds:
        row |= _to_target(measured_in(rounds, metric), metric, target, lower)
    return row | {"made_with": run.made_with, "folder": str(run.path)}


def _views(rounds: pd.DataFrame, metric: str, view: View, lower: bool) -> dict[str, float]:
    """The numbers of a run: those that a table shows, and the requested one."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(("last", "selected", "best", view.at)):
        found[name] = View(name).value(rounds, metric, lower)
        if name in ("selected", "best"):
            row = View(name).row(rounds, metric, lower)
            found[f"{name}_round"] = math.nan if row is None else row["round"]
    return found


def _compare_at(table: pd.DataFrame, rounds: Sequence[pd.DataFrame], cost: Cost, view: View) -> None:
    """Add what each run had reached at a cost that all finished runs of its setting have spent."""
    finished = table["rounds"] >= table["planned"]
    spent = pd.Series([of_run[COSTS[cost]].iloc[-1] for of_run in rounds], table.index)
    budgets = spent[finished & (spent > 0)].groupby(table["setting"]).min()
    table[f"equal_{cost}_budget"] = table["setting"].map(budgets)
    values, reached = [], []
    for of_run, row in zip(rounds, table.assign(budget=table[f"equal_{cost}_budget"]).itertuples(), strict=True):
        affordable = up_to(of_run, cost, math.inf if math.isnan(row.budget) else row.budget)
        measured = measured_in(affordable, row.metric)
        values.append(view.value(affordable, row.metric, row.lower_is_better))
        reached.append(measured[COSTS[cost]].max() / row.budget)
    table[f"equal_{cost}"] = values
    table[f"equal_{cost}_reached"] = pd.Series(reached, table.index).where(spent > 0)


def work_of(facts: Mapping[str, Any]) -> str:
    """A client's work in a round, from ``run.json``: ``1``, ``2 on low_rank + 3 on full_rank``, ``10 steps``; and fine-tuning."""
    said = _lengths(facts["training"]) or "0"
    if not facts["fine_tuning"]:
        return said
    at_the_end = " at the end" if facts.get("fine_tuning_when") == "last" else ""  # missing in files of earlier versions
    return f"{said}, fine-tuned {_lengths(facts['fine_tuning'])}{at_the_end}"


def _lengths(phases: Sequence[Mapping[str, Any]]) -> str:
    lengths = [str(phase["epochs"]) if "epochs" in phase else f"{phase['steps']} steps" for phase in phases]
    if len(phases) == 1:
        return lengths[0]
    return " + ".join(f"{length} on {phase['phase']}" for length, phase in zip(lengths, phases, strict=True))


def _of_clients(run: RunFolder, metric: str, lower: bool, finished: bool) -> dict[str, float]:
    """Statistics over clients; they are known for the clients' own models after aggregation. A finished run has its table."""
    if finished:
        refuse_cut_clients(run.path)
    path, column = run.path / "clients.csv", f"test/{measure_of(metric)}"
    unknown = dict.fromkeys(("worst_tenth", "pooled", "majority"), math.nan)
    if not path.is_file() or not (metric.startswith("after/test_") and metric.endswith("/mean")):
        return unknown
    clients = read_clients(run.path)
    if column not in clients:
        return unknown
    measured = clients.dropna(subset=[column])
    count = math.ceil(len(measured) / 10)
    worst = measured[column].nlargest(count) if lower else measured[column].nsmallest(count)
    return {
        "worst_tenth": worst.mean(),
        "pooled": (measured[column] * measured["test"]).sum() / measured["test"].sum(),
        "majority": measured["majority_accuracy"].mean() if "majority_accuracy" in clients else math.nan,
    }


def _of_unseen(rounds: pd.DataFrame, metric: str) -> dict[str, float]:
    """Results in the last round of clients that never take part in training, if there are any."""
    columns = {stage: f"unseen/{stage}/test_{measure_of(metric)}/mean" for stage in UNSEEN}
    return {f"unseen_{stage}": View("last").value(rounds, name) for stage, name in columns.items() if name in rounds}


def _to_target(measured: pd.DataFrame, metric: str, target: float, lower: bool) -> dict[str, float]:
    """Round and costs at which a run first reached the target."""
    good = measured[metric] <= target if lower else measured[metric] >= target
    reached = measured[good]
    sources = {"round": "round", "bytes": "traffic/total_bytes", "flops": "compute/total_flops"}
    return {f"target_{name}": reached[column].iloc[0] if len(reached) else math.nan for name, column in sources.items()}


def stacked(runs: Collection[RunFolder], file: str) -> pd.DataFrame:
    """A file of :data:`READ` of all runs that have it, below each other, with the columns of :data:`KEY` first."""
    tables = []
    for run in (run for run in runs if (run.path / file).is_file()):
        table = READ[file](run.path).copy()  # defragmented: otherwise pandas warns about each inserted column
        for place, name in enumerate(KEY):
            table.insert(place, name, getattr(run, name))
        tables.append(table)
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=list(KEY))
