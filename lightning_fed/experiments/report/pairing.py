"""Pairs of runs: results of two methods on the same partitions with the same training seeds."""

import math
from collections.abc import Mapping

import pandas as pd

from lightning_fed.experiments.report.statistics import Cells, Estimate, complete, estimate

DRAW = ["partition", "seed"]
"""What distinguishes a method's runs in a setting."""


def cells_of(values: pd.Series) -> Cells:
    """The values of a method by :data:`DRAW`, NaN where unknown, as a table without gaps; see :func:`.complete`."""
    return complete(values.unstack("seed").to_numpy(float) if len(values) else values.to_numpy(float)[:, None])


def difference(one: pd.Series, other: pd.Series) -> Estimate:
    """The mean of ``one - other``, run by run, over the runs that both have. Arguments are those of :func:`cells_of`."""
    return estimate(cells_of((one - other).dropna()))


def best_group(values: Mapping[str, pd.Series], lower: bool = False) -> set[str]:
    """The method with the best mean and those that are not separated from it, from the values of each method, see :func:`cells_of`;
    empty if no difference has an interval. Methods whose difference has none, because of a single run, are not among them.
    """
    known = {name: series.dropna() for name, series in values.items() if math.isfinite(series.mean())}
    if not known:
        return set()
    best = (min if lower else max)(known, key=lambda name: known[name].mean())
    apart = {name: difference(known[best], series) for name, series in known.items() if name != best}
    if all(math.isnan(one.error) for one in apart.values()):
        return set()
    return {best, *(name for name, one in apart.items() if abs(one.mean) <= one.half_width)}
