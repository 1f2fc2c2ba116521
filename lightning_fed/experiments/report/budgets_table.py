"""What methods reach within budgets of bytes: a column per budget."""

from collections.abc import Sequence
from math import isnan

import pandas as pd

from lightning_fed.experiments.report.comparison import Comparison
from lightning_fed.experiments.report.layout import Entry, Layout
from lightning_fed.experiments.report.pairing import DRAW
from lightning_fed.experiments.report.views import View, up_to


def budget_tables(comparison: Comparison, rounds: pd.DataFrame, budgets: Sequence[float] | None) -> list[Layout]:
    """A row per method of a setting; empty without budgets, which are in MiB, up and down together. The rounds are those of
    :func:`.load_rounds`.
    """
    if not budgets:
        return []
    view, of_setting = View(comparison.options.at), rounds[rounds["setting"] == comparison.setting]
    rows = []
    for method, metric in comparison.metrics.items():
        of_method, finished = of_setting[of_setting["method"] == method], comparison.methods[method].index
        runs = [run for draw, run in of_method.groupby(DRAW) if draw in finished]
        lower = bool(comparison.methods[method]["lower_is_better"].iloc[0])
        reached = [
            pd.Series([view.value(up_to(run, "bytes", budget * 2**20), metric, lower) for run in runs]).mean(skipna=False)
            for budget in budgets
        ]
        named = [Entry(method), Entry(metric)] if comparison.mixed else [Entry(method)]
        said = ["–" if isnan(value) else f"{comparison.scale * value:.{comparison.digits}f}" for value in reached]
        rows.append([*named, *map(Entry, said)])
    note = "What a method had reached when it had sent no more than so much, up and down: the mean of its runs."
    title = "At a budget" + (f": {comparison.setting}" if comparison.setting else "")
    columns = ["", *(["measured"] if comparison.mixed else []), *(f"{budget:g} MiB" for budget in budgets)]
    return [Layout(title, columns, rows, [note])]
