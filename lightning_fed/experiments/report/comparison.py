"""What can be said of the difference between two methods: pairs of runs with the same seed, and an interval."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """The mean difference over pairs of runs.

    Args:
        mean: of the differences.
        half_width: of the interval around it; NaN with less than two pairs.
        pairs: how many there are.
    """

    mean: float
    half_width: float
    pairs: int

    @property
    def separated(self) -> bool:
        """Whether 0 lies outside the interval. Of one pair nothing can be said."""
        return abs(self.mean) > self.half_width  # False for NaN


def difference(one: pd.Series, other: pd.Series) -> Difference:
    """Mean of ``one - other`` over the seeds that both have, with Student's interval (95 %).

    A seed decides the partition, and so most of what two runs of one method differ in: differences by seed vary less than the
    methods do.

    Args:
        one: values by seed.
        other: values by seed.
    """
    apart = (one - other).dropna().to_numpy()
    if len(apart) < 2:
        return Difference(float(apart.mean()) if len(apart) else np.nan, np.nan, len(apart))
    half_width = stats.t.ppf((1 + CONFIDENCE) / 2, len(apart) - 1) * stats.sem(apart)
    return Difference(float(apart.mean()), float(half_width), len(apart))


def best_group(values: dict[str, pd.Series], lower: bool = False) -> set[str]:
    """The one with the best mean and those that are not separated from it; nobody where no two methods share two seeds.

    Args:
        values: of each method, by seed.
        lower: small values are good.
    """
    known = {name: series.dropna() for name, series in values.items() if series.notna().any()}
    if not known:
        return set()
    best = (min if lower else max)(known, key=lambda name: known[name].mean())
    apart = {name: difference(known[best], series) for name, series in known.items() if name != best}
    if all(one.pairs < 2 for one in apart.values()):
        return set()
    return {best, *(name for name, one in apart.items() if not one.separated)}
