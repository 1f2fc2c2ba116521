"""Positions of methods between two references, as shares of their difference."""

from collections.abc import Sequence
from math import isnan

import pandas as pd

from lightning_fed.experiments.report.comparison import Comparison
from lightning_fed.experiments.report.layout import Column, Entry
from lightning_fed.experiments.report.pairing import difference
from lightning_fed.experiments.report.statistics import Estimate
from lightning_fed.experiments.report.views import kind_of


def gap_closed(values: pd.Series, low: pd.Series, high: pd.Series, lower_is_better: bool = False) -> Estimate:
    r""":math:`(x - x_{low}) / (x_{high} - x_{low})`, run by run, with an interval as for differences; a share above 1 is beyond
    the upper reference.

    Args:
        values: values of a method, by partition and seed.
        low: values of the lower reference.
        high: values of the upper reference.
        lower_is_better: whether smaller values are better, as of losses.

    Returns:
        NaN unless the upper reference is the better one in all runs that the three have.
    """
    parts = pd.DataFrame({"values": values, "low": low, "high": high}).dropna()
    gap = parts["high"] - parts["low"]
    if not ((gap < 0) if lower_is_better else (gap > 0)).all():
        return difference(values * float("nan"), values)
    shares = (parts["values"] - parts["low"]) / gap
    return difference(shares, 0 * shares)


def gap_column(comparison: Comparison, between: Sequence[str]) -> tuple[Column, str]:
    """A column with the position of each method, and a note that explains it."""
    values, nothing = comparison.values(comparison.compared), pd.Series(dtype=float)
    low, high = (values.get(name, nothing) for name in between)

    def entry(method: str) -> Entry:
        kinds = {kind_of(comparison.metrics[name]) for name in (method, *between) if name in values}
        return Entry(_said(gap_closed(values[method], low, high, comparison.lower)) if len(kinds) == 1 else "another measure")

    note = f"Gap closed: 0 is {between[0]}, 1 is {between[1]}, run by run, with a 95 % interval as of differences."
    return Column("gap closed", entry), note


def _said(share: Estimate) -> str:
    if isnan(share.mean):
        return "no gap"
    said = f"{share.mean:.2f}" + (f" ± {share.half_width:.2f}" if share.half_width > 0 else "")
    return said.replace("-", "−")
