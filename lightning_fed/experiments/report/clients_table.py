"""A block of a report for clients that have names: sites, or those of a natural partition."""

import pandas as pd

from lightning_fed.experiments.report.comparison import Comparison
from lightning_fed.experiments.report.layout import Column, Entry, Layout
from lightning_fed.experiments.report.methods_table import spread
from lightning_fed.experiments.report.runs import KEY
from lightning_fed.experiments.report.views import measure_of

MOST_CLIENTS = 30
"""More of them are a picture."""


def clients_tables(comparison: Comparison, clients: pd.DataFrame) -> list[Layout]:
    """What each client came to with each method, as last measured. None where clients have no names, or where they are many.

    Args:
        comparison: of a setting.
        clients: as :func:`.load_clients` gives them.
    """
    [metric, *others], column = dict.fromkeys(comparison.metrics.values()), ""
    if metric.startswith("after/test_") and not others:
        column = f"test/{measure_of(metric)}"
    if not {"name", column} <= set(clients.columns):
        return []
    known = clients.merge(comparison.runs[list(KEY)], on=list(KEY)).dropna(subset=["name"])
    names = [str(name) for name in known["name"].unique()]
    if not 0 < len(names) <= MOST_CLIENTS:
        return []
    values = {key: group[column] * comparison.scale for key, group in known.groupby([known["name"].astype(str), "method"])}
    tests = known.groupby(known["name"].astype(str))["test"].mean()
    columns = [Column("test examples", lambda name: Entry(f"{tests[name]:.0f}"))]
    columns += [_of_method(method, values) for method in comparison.methods]
    title = ", ".join(filter(None, (comparison.setting, "each client")))
    note = f"test/{measure_of(metric)} of each client when last measured: mean ± standard deviation over runs."
    return [Layout.of(title, {name: Entry(name) for name in names}, columns, [note])]


def _of_method(method: str, values: dict[tuple[str, str], pd.Series]) -> Column:
    return Column(method, lambda name: Entry(spread(values.get((name, method), pd.Series(dtype=float)))))
