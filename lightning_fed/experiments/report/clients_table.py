"""Tables for named clients (sites, or those of a natural partition), and for their models on each other's data."""

from collections.abc import Mapping
from functools import partial

import pandas as pd

from lightning_fed.experiments.report.comparison import Comparison
from lightning_fed.experiments.report.layout import Column, Entry, Layout
from lightning_fed.experiments.report.methods_table import spread
from lightning_fed.experiments.report.runs import KEY
from lightning_fed.experiments.report.views import measure_of

MOST_CLIENTS = 30
"""Maximum number of clients of a table; more become a picture."""

EVERYBODY = -1
"""The client number in ``cross.csv`` that stands for the pooled test data."""


def clients_tables(comparison: Comparison, clients: pd.DataFrame) -> list[Layout]:
    """Each client's last metrics, as returned by :func:`.load_clients`, with each method of a setting. Empty if clients have no
    names, or there are many.
    """
    column = measured(comparison)
    if not {"name", column} <= set(clients.columns):
        return []
    known = clients.merge(comparison.runs[list(KEY)], on=list(KEY)).dropna(subset=["name"])
    names = list(known["name"].unique())
    if not 0 < len(names) <= MOST_CLIENTS:
        return []
    sizes = {f"{part} examples": known.groupby("name")[part].mean() for part in ("train", "test") if part in known}
    columns = [Column(title, partial(_count, of)) for title, of in sizes.items()]
    for method in comparison.methods:
        own = known[known["method"] == method].groupby("name")[column]
        columns.append(_column(comparison, method, {str(name): values for name, values in own}))
    note = f"{column} of each client when last measured: mean ± standard deviation over runs."
    return [Layout.of(_titled(comparison, "each client"), {name: Entry(name) for name in names}, columns, [note])]


def cross_tables(comparison: Comparison, crossed: pd.DataFrame) -> list[Layout]:
    """Metrics of each client's model (row) on each client's data (column), as returned by :func:`.load_crossed`: a table for each
    method of a setting with personal models. Empty if no run has stored them, or there are many clients.
    """
    column, tables = measured(comparison), list[Layout]()
    if not {"trained", column} <= set(crossed.columns):
        return []
    known = crossed.merge(comparison.runs[list(KEY)], on=list(KEY))
    for method in comparison.methods:
        own = known[known["method"] == method]
        alike = own.groupby([*KEY, "tested"])[column].nunique().max() < 2
        names = dict(own[["trained", "name"]].drop_duplicates("trained").to_numpy())
        if alike or not 0 < len(names) <= MOST_CLIENTS:
            continue
        tested = {f"on {name}": client for client, name in names.items()} | {"on all clients' data": EVERYBODY}
        columns = []
        for title, client in tested.items():
            rows = own[own["tested"] == client].groupby("trained")[column]
            columns.append(_column(comparison, title, {names[trained]: values for trained, values in rows}))
        note = f"{column} after the last round: mean ± standard deviation over runs."
        title = _titled(comparison, f"{method}: each client's model on each one's data")
        tables.append(Layout.of(title, {name: Entry(f"trained on {name}") for name in names.values()}, columns, [note]))
    return tables


def measured(comparison: Comparison) -> str:
    """The column of ``clients.csv`` for the metric of a comparison; empty if there is none."""
    [metric, *others] = dict.fromkeys(comparison.metrics.values())
    return f"test/{measure_of(metric)}" if metric.startswith("after/test_") and not others else ""


def _titled(comparison: Comparison, what: str) -> str:
    return ", ".join(filter(None, (comparison.setting, what)))


def _count(of: pd.Series, name: str) -> Entry:
    return Entry(f"{of[name]:.0f}")


def _column(comparison: Comparison, title: str, of: Mapping[str, pd.Series]) -> Column:
    """A column of values by row."""

    def entry(name: str) -> Entry:
        return Entry(spread(of.get(name, pd.Series(dtype=float)) * comparison.scale, comparison.digits))

    return Column(title, entry)
