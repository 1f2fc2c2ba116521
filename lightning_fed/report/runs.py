"""What runs found, as tables: a row per run, a row per round, a row per client."""

import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from lightning_fed.errors import FederationError
from lightning_fed.report.folders import RunFolder, run_folders

LOWER_IS_BETTER = {"loss", "perplexity", "ter"}


def load_runs(
    *folders: Path | str, metric: str | None = None, target: float | None = None, vary: Collection[str] = ()
) -> pd.DataFrame:
    """A row per run below some folders.

    Args:
        folders: folders of runs, of sweeps, or above them.
        metric: column of ``metrics.csv``, with or without ``/mean``; None: the clients' mean after aggregation of the measure that
            the runs select by, ``after/test_accuracy/mean`` for classification.
        target: value of the metric of which to find when it was first reached.
        vary: see :func:`lightning_fed.report.folders.run_folders`.

    Returns:
        Columns: ``method``, ``setting``, ``seed``; ``model``, the method's class; ``rounds`` that were played, ``planned`` ones,
        ``epochs`` per round as the method's options have them; ``metric``; ``last``, its value when last measured; ``selected``,
        its value at the round ``selected_round`` that is best on validation data; over the clients as last measured,
        ``worst_tenth``, the mean of the worst tenth of them, ``pooled``, each weighted by its test examples, and ``majority``, the
        accuracy of each client's most frequent label; ``bytes``, ``flops`` and ``seconds`` (training, aggregation and measuring) of
        the whole run; ``target_round``, ``target_bytes``, ``target_flops``; ``folder``. What is not known is NaN.

    Raises:
        FederationError: if there is no run, or if they differ in what was not to vary.
    """
    runs = run_folders(folders, vary)
    metric = metric_of(runs, metric)
    return pd.DataFrame([_row(run, metric, target) for run in runs])


def read_runs(path: Path | str) -> pd.DataFrame:
    """The rows of :func:`load_runs` from the CSV file that they were written to."""
    texts = ("method", "setting", "epochs")
    return pd.read_csv(path, dtype=dict.fromkeys(texts, str)).fillna(dict.fromkeys(texts, ""))


def load_rounds(*folders: Path | str, vary: Collection[str] = ()) -> pd.DataFrame:
    """A row per run and round: ``method``, ``setting``, ``seed``, and all of ``metrics.csv``."""
    return _stacked(run_folders(folders, vary), "metrics.csv")


def load_clients(*folders: Path | str, vary: Collection[str] = ()) -> pd.DataFrame:
    """A row per run and client as last measured: ``method``, ``setting``, ``seed``, and all of ``clients.csv``."""
    return _stacked([run for run in run_folders(folders, vary) if (run.path / "clients.csv").is_file()], "clients.csv")


def metric_of(runs: Collection[RunFolder], metric: str | None) -> str:
    """The column that is meant. Raises :class:`FederationError` if no run has it."""
    columns = list(dict.fromkeys(column for run in runs for column in pd.read_csv(run.path / "metrics.csv", nrows=0)))
    chosen = [match[1] for column in columns if (match := re.fullmatch(r"selected/test_(\w+)", column))]
    found = [match[1] for column in columns if (match := re.fullmatch(r"after/test_(\w+)/mean", column))]
    measures = [name for name in (*chosen, *found) if name != "loss"] or found
    if metric is None and measures:
        metric = f"after/test_{measures[0]}/mean"
    for candidate in (metric, f"{metric}/mean"):
        if candidate in columns:
            return str(candidate)
    measured = [column for column in columns if "test_" in column and column.endswith("/mean")]
    raise FederationError(f"No run has {metric or 'any measure on test data'}; there are {', '.join(measured) or 'none'}.")


def measure_of(metric: str) -> str:
    """The name of what a column measures: ``accuracy`` of ``after/test_accuracy/mean``."""
    match = re.search(r"(?:test|val)[_/](\w+)", metric)
    return match[1] if match else metric


def lower_is_better(metric: str) -> bool:
    """Whether small values of a column are good ones."""
    return measure_of(metric) in LOWER_IS_BETTER


def _row(run: RunFolder, metric: str, target: float | None) -> dict[str, Any]:
    rounds = pd.read_csv(run.path / "metrics.csv")
    best = "idxmin" if lower_is_better(metric) else "idxmax"
    measured = rounds[rounds[metric].notna()] if metric in rounds else rounds[:0]
    validation = measured.get(metric.replace("test_", "val_"), pd.Series(dtype=float)).dropna()
    chosen = measured.loc[getattr(validation, best)()] if len(validation) else None
    seconds = rounds[[column for column in rounds if column.startswith("seconds/")]].sum().sum()
    row = {
        **{"method": run.method, "setting": run.setting, "seed": run.seed},
        "model": str(run.settings["model.class_path"]).rpartition(".")[2],
        "rounds": int(rounds["round"].iloc[-1]),
        "planned": int(run.settings["federation.rounds"]),
        "epochs": epochs_of(run.settings),
        "metric": metric,
        "last": measured[metric].iloc[-1] if len(measured) else math.nan,
        "selected": chosen[metric] if chosen is not None else math.nan,
        "selected_round": chosen["round"] if chosen is not None else math.nan,
        **_of_clients(run, metric),
        "bytes": rounds["traffic/total_bytes"].iloc[-1],
        "flops": rounds["compute/total_flops"].iloc[-1],
        "seconds": round(seconds, 1),
    }
    if target is not None and metric in rounds:
        row |= _to_target(measured, metric, target)
    return row | {"folder": str(run.path)}


def epochs_of(settings: Mapping[str, Any]) -> str:
    """How much a client trains per round, as its method's options say: ``1``, or ``epochs 1, head_epochs 4``."""
    options = {key.rpartition(".")[2]: value for key, value in settings.items() if re.fullmatch(r"model\.(?!adapt_)\w+", key)}
    given = {k: v for k, v in options.items() if re.fullmatch(r"(\w+_)?(epochs|steps)", k) and v is not None}
    if given.keys() == {"epochs"}:
        return str(given["epochs"])
    return ", ".join(f"{name} {value}" for name, value in given.items())


def _of_clients(run: RunFolder, metric: str) -> dict[str, float]:
    """What the spread over clients comes to; it is known for the clients' own models after aggregation."""
    path, column = run.path / "clients.csv", f"test/{measure_of(metric)}"
    unknown = dict.fromkeys(("worst_tenth", "pooled", "majority"), math.nan)
    if not path.is_file() or not metric.startswith("after/test_"):
        return unknown
    clients = pd.read_csv(path)
    if column not in clients:
        return unknown
    measured = clients.dropna(subset=[column])
    count = math.ceil(len(measured) / 10)
    worst = measured[column].nlargest(count) if lower_is_better(metric) else measured[column].nsmallest(count)
    return {
        "worst_tenth": worst.mean(),
        "pooled": (measured[column] * measured["test"]).sum() / measured["test"].sum(),
        "majority": clients["majority_accuracy"].mean() if "majority_accuracy" in clients else math.nan,
    }


def _to_target(measured: pd.DataFrame, metric: str, target: float) -> dict[str, float]:
    """Round and costs at which a run first was as good as the target."""
    good = measured[metric] <= target if lower_is_better(metric) else measured[metric] >= target
    reached = measured[good]
    sources = {"round": "round", "bytes": "traffic/total_bytes", "flops": "compute/total_flops"}
    return {f"target_{name}": reached[column].iloc[0] if len(reached) else math.nan for name, column in sources.items()}


def _stacked(runs: Collection[RunFolder], file: str) -> pd.DataFrame:
    tables = []
    for run in runs:
        table = pd.read_csv(run.path / file)
        for place, name in enumerate(("method", "setting", "seed")):
            table.insert(place, name, getattr(run, name))
        tables.append(table)
    return pd.concat(tables, ignore_index=True)
