"""Effects of partitions and training seeds: shares of the variance, changed rankings, and how many partitions are needed."""

import numpy as np
import pandas as pd

from lightning_fed.experiments.report.comparison import Comparison
from lightning_fed.experiments.report.layout import BLANK, Entry, Layout
from lightning_fed.experiments.report.methods_table import difference_text
from lightning_fed.experiments.report.statistics import (
    MOST_PARTITIONS,
    Cells,
    Components,
    components,
    flips,
    of_methods,
    partitions_needed,
)
from lightning_fed.formatting import counted


def seed_tables(comparison: Comparison) -> list[Layout]:
    """For each measure, the sources of differences, and how many partitions separate each pair of methods. Empty without a second
    method, or a second partition.
    """
    rows, groups = list[list[Entry]](), dict[int, str]()
    for measure, called in comparison.measures.items():
        if added := _rows(comparison, measure):
            groups[len(rows)] = called
            rows += added
    if not rows:
        return []
    shares = ["from the partition", "from training", "from both"] if _has_shares(comparison) else []
    columns = ["", f"minus {comparison.baseline}", *shares, "other order on", "partitions needed"]
    over = Layout(_titled("From partition to partition", comparison), columns, rows, _notes(comparison), groups)
    return [over, _pairs(comparison)] if len(comparison.alike) > 2 else [over]


def _rows(comparison: Comparison, measure: str) -> list[list[Entry]]:
    """For each difference to the baseline: its interval, shares of its variance, flips, and the partitions needed."""
    rows = []
    for method, apart in comparison.differences(measure).items():
        cells = comparison.cells(measure, method, comparison.baseline)
        if len(cells) > 1:
            known = bool(np.isfinite(cells).all())
            shares = (_shares(components(cells)) if known else ["–"] * 3) if _has_shares(comparison) else []
            said = difference_text(apart, comparison.scale, comparison.digits)
            row = [method, said, *shares, f"{flips(cells)} of {len(cells)}" if known else "–"]
            rows.append([*map(Entry, row), _needed(cells, comparison)])
    return rows


def _pairs(comparison: Comparison) -> Layout:
    """How many partitions are needed to separate each pair."""
    names, rows = comparison.alike, []
    for place, one in enumerate(names[:-1]):
        needed = [_needed(comparison.cells(comparison.compared, one, other), comparison) for other in names[place + 1 :]]
        rows.append([Entry(one), *[BLANK] * place, *needed])
    title = _titled(f"Partitions needed to separate two methods, {comparison.measures[comparison.compared]}", comparison)
    return Layout(title, ["", *names[1:]], rows)


def _has_shares(comparison: Comparison) -> bool:
    """Whether the effects of partitions and of training can be separated."""
    return comparison.crossed and len(comparison.seeds) > 1


def _notes(comparison: Comparison) -> list[str]:
    """Notes: results of single partitions, sources of variance, and how to read the table."""
    notes = []
    for method in comparison.alike:
        cells = comparison.cells(comparison.compared, method, comparison.baseline)
        if len(cells) > 1 and np.isfinite(cells).all() and (other := flips(cells)):
            notes.append(
                f"With one partition you would have concluded the opposite of {method} and {comparison.baseline} in {other} of "
                f"{len(cells)} cases."
            )
    notes += _first(comparison)
    if _has_shares(comparison):
        notes += _of_results(comparison)
        notes.append("From the partition, from training, from both: shares of the variance that a difference has from run to run.")
    seeds = _seeds_each(comparison)
    return [
        *notes,
        "Other order on: partitions on which the difference is on the other side of 0.",
        f"Partitions needed: to separate the two in 80 of 100 sweeps with {counted(seeds, 'training seed')} on each "
        "partition, if difference and variances are as they were found here, without Holm's correction.",
    ]


def _first(comparison: Comparison) -> list[str]:
    """On how many partitions the best method is the best one."""
    if comparison.mixed:
        return []
    means = pd.DataFrame(comparison.values(comparison.compared)).dropna().groupby("partition").mean()
    if len(means) < 2:
        return []
    means = -means if comparison.lower else means
    best = means.mean().idxmax()
    if (means.mean() == means.mean()[best]).sum() > 1:
        return []
    first = means[best] > means.drop(columns=best).max(axis=1)
    return [f"{best}, first on average, is first on {int(first.sum())} of {len(means)} partitions."]


def _of_results(comparison: Comparison) -> list[str]:
    """Sources of the variance of the results themselves, of methods with the baseline's kind of metric, if all runs are there."""
    values = pd.DataFrame(comparison.values(comparison.compared))[comparison.alike]
    tables = np.array([values[method].unstack("seed").to_numpy(float) for method in values])
    if not np.isfinite(tables).all() or min(tables.shape) < 2:
        return []
    found = {name: max(value, 0.0) for name, value in of_methods(tables).items()}
    total = sum(found.values())
    said = ", ".join(f"{name} {value / total:.0%}" for name, value in found.items()) if total else "none"
    return [f"Variance of a method's result from run to run: {said}."]


def _shares(of: Components) -> list[str]:
    known = [max(value, 0.0) for value in (of.partition, of.training, of.rest)]
    total = sum(known)
    return [f"{value / total:.0%}" if total > 0 else "–" for value in known]


def _needed(cells: Cells, comparison: Comparison) -> Entry:
    """How many partitions are needed, with a note if they are computed for fewer training seeds than the table says."""
    P, T = cells.shape
    if P < 2 or not np.isfinite(cells).all():
        return Entry("–")
    needed = partitions_needed(float(cells.mean()), components(cells), T)
    note = "" if _seeds_each(comparison) == T else f"With {counted(T, 'training seed')}, for which no run is missing."
    return Entry(f"> {MOST_PARTITIONS}" if needed is None else str(needed), note=note)


def _seeds_each(comparison: Comparison) -> int:
    """Training seeds on each partition."""
    return len(comparison.seeds) if comparison.crossed else 1


def _titled(what: str, comparison: Comparison) -> str:
    return f"{comparison.setting}: {what[0].lower()}{what[1:]}" if comparison.setting else what
