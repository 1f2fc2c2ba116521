r"""Inference from a comparison to new partitions and training seeds: arrays in, numbers out.

A difference between two methods is known for partitions :math:`p = 1 \dots P` and training seeds :math:`t = 1 \dots T`. Both are
random, and crossed: :math:`x_{pt} = \mu + a_p + b_t + e_{pt}`, with variances :math:`\sigma_a^2`, :math:`\sigma_b^2` and
:math:`\sigma_e^2`. An interval for :math:`\mu` holds for a new partition and a new training seed. Neither SciPy nor statsmodels has
it for so few.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.special import ndtr
from statsmodels.stats.multitest import multipletests

Cells = NDArray[np.float64]
"""Shape (P, T): a row per partition, a column per training seed."""

CONFIDENCE, POWER = 0.95, 0.8

MOST_PARTITIONS = 1000
"""Maximum number of partitions to try."""

SIMULATED = 4000
"""Number of sweeps from which power is computed."""


@dataclass(frozen=True)
class Estimate:
    """A mean and its uncertainty.

    Args:
        mean: mean over the cells.
        error: its standard error; NaN if it is unknown.
        df: degrees of freedom of the error.
        partitions: number of partitions.
        seeds: number of training seeds for each partition.
    """

    mean: float
    error: float
    df: float
    partitions: int
    seeds: int

    @property
    def half_width(self) -> float:
        """Half the width of the 95 % interval around the mean."""
        return float(stats.t.ppf((1 + CONFIDENCE) / 2, self.df) * self.error)

    @property
    def separated(self) -> bool:
        """Whether 0 lies outside the interval."""
        return abs(self.mean) > self.half_width  # False for NaN

    @property
    def p_value(self) -> float:
        """P-value of the two-sided test for a mean of 0; 1 if it is unknown."""
        if math.isnan(self.error) or not self.error:
            return float(math.isnan(self.error) or not self.mean)
        return float(2 * stats.t.sf(abs(self.mean) / self.error, self.df))


@dataclass(frozen=True)
class Components:
    r"""Unbiased variance components of a cell; small ones may be estimated below 0.

    Args:
        partition: :math:`\sigma_a^2`; with one training seed, or another one for each partition, it includes the others.
        training: :math:`\sigma_b^2`; NaN if it cannot be separated.
        rest: :math:`\sigma_e^2`, the effect of a training seed on one partition only; NaN if it cannot be separated.
    """

    partition: float
    training: float
    rest: float


def complete(cells: Cells) -> Cells:
    """The cells without gaps (NaN): while one is missing, the partition or training seed with the largest share of missing cells is
    removed, of equal ones the training seed, since an interval is for new partitions first of all. If no two cells have either in
    common, each is a partition with its own training seed: shape (N, 1).
    """
    known = ~np.isnan(cells)
    if max(known.sum(0).max(initial=0), known.sum(1).max(initial=0)) <= 1:
        return cells[known][:, None]
    while not known.all():
        lacking = [1 - known.mean(axis) for axis in (1, 0)]
        axis = int(lacking[1].max() >= lacking[0].max())
        cells, known = (np.delete(of, int(lacking[axis].argmax()), axis) for of in (cells, known))
    return cells


def mean_squares(cells: Cells) -> tuple[float, float, float]:
    r"""Mean squares of partitions, :math:`MS_P = \frac{T}{P-1} \sum_p (\bar x_{p\cdot} - \bar x)^2`, of training seeds,
    :math:`MS_T` likewise, and of their interaction, :math:`MS_E`, with :math:`(P-1)(T-1)` degrees of freedom.

    Args:
        cells: at least two partitions and training seeds.
    """
    (P, T), mean = cells.shape, cells.mean()
    rows, columns = cells.mean(1, keepdims=True), cells.mean(0, keepdims=True)
    left = ((cells - rows - columns + mean) ** 2).sum() / ((P - 1) * (T - 1))
    return T * ((rows - mean) ** 2).sum() / (P - 1), P * ((columns - mean) ** 2).sum() / (T - 1), left


def error_of(ms_p: Any, ms_t: Any, ms_e: Any, partitions: Any, seeds: int) -> tuple[Any, Any]:
    r"""Variance of the mean of P x T cells, and its degrees of freedom.

    :math:`PT \cdot Var(\bar x) = T \sigma_a^2 + P \sigma_b^2 + \sigma_e^2 = E[MS_P + MS_T - MS_E]`. Satterthwaite's degrees of
    freedom are the combination's square over :math:`MS_P^2/(P-1) + MS_T^2/(T-1) + MS_E^2/((P-1)(T-1))`. A variance that is
    estimated below 0 is taken as 0: without that of partitions the combination is :math:`MS_T`, with T - 1 degrees of freedom;
    without that of training it is :math:`MS_P`; without both it is the variance over all cells, with PT - 1.
    """
    of_p, of_t = partitions - 1, seeds - 1
    of_e = of_p * of_t
    all_cells = (of_p * ms_p + of_t * ms_t + of_e * ms_e) / (of_p + of_t + of_e)
    both = ms_p + ms_t - ms_e
    squares = ms_p**2 / of_p + ms_t**2 / of_t + ms_e**2 / of_e
    without_p, without_t = ms_p <= ms_e, ms_t <= ms_e
    cases = [without_p & without_t, without_p, without_t]
    square = np.select(cases, [all_cells, ms_t, ms_p], both)
    df = np.select(cases, [of_p + of_t + of_e, of_t, of_p], both**2 / np.where(squares > 0, squares, 1.0))
    return square / (partitions * seeds), df


def estimate(cells: Cells) -> Estimate:
    """The mean of cells without gaps, and its error for new partitions and training seeds. With one training seed the interval is
    Student's, over partitions; with one partition it is Student's, over training seeds, and only holds for this partition.
    """
    P, T = cells.shape
    if not np.isfinite(cells).all() or not cells.size:
        return Estimate(math.nan, math.nan, math.nan, P if cells.size else 0, T)
    if min(P, T) > 1:
        variance, df = error_of(*mean_squares(cells), P, T)
    elif cells.size > 1:
        variance, df = cells.var(ddof=1) / cells.size, cells.size - 1
    else:
        variance, df = math.nan, math.nan
    return Estimate(float(cells.mean()), float(np.sqrt(variance)), float(df), P, T)


def components(cells: Cells) -> Components:
    """Variance components of cells without gaps by the expected mean squares. With one partition all are NaN."""
    P, T = cells.shape
    if P < 2:
        return Components(math.nan, math.nan, math.nan)
    if T < 2:
        return Components(float(cells.var(ddof=1)), math.nan, math.nan)
    ms_p, ms_t, ms_e = mean_squares(cells)
    return Components((ms_p - ms_e) / T, (ms_t - ms_e) / P, ms_e)


def of_methods(values: NDArray[np.float64]) -> dict[str, float]:
    r"""Unbiased variance components of several methods' results:
    :math:`x_{mpt} = \mu_m + P_p + T_t + (PT)_{pt} + (mP)_{mp} + (mT)_{mt} + e_{mpt}`. They follow from the table of
    means over the methods and from the differences between methods.

    Args:
        values: shape (M, P, T), at least two of each.

    Returns:
        ``partition``, ``training``, ``both`` (their interaction), the methods' interactions with them, ``method × partition`` and
        ``method × training``, and the ``rest``.
    """
    M, P, T = values.shape
    together = values.mean(0)
    ms_p, ms_t, ms_pt = (M * square for square in mean_squares(together))
    own = [mean_squares(of - together) for of in values]
    ms_mp, ms_mt, ms_e = (sum(squares) / (M - 1) for squares in zip(*own, strict=True))
    return {
        "partition": (ms_p - ms_pt - ms_mp + ms_e) / (M * T),
        "training": (ms_t - ms_pt - ms_mt + ms_e) / (M * P),
        "both": (ms_pt - ms_e) / M,
        "method × partition": (ms_mp - ms_e) / T,
        "method × training": (ms_mt - ms_e) / P,
        "rest": ms_e,
    }


def flips(cells: Cells) -> int:
    """Number of partitions in which the mean difference has the opposite sign of the overall mean."""
    return int((cells.mean(1) * cells.mean() < 0).sum())


def partitions_needed(mean: float, of: Components, seeds: int) -> int | None:
    """Number of partitions with which a difference is found (two-sided, at 5 %) in 80 of 100 sweeps, if it and its variances are as
    estimated. None: more than :data:`MOST_PARTITIONS`.
    """
    found = bisect_left(range(MOST_PARTITIONS + 1), POWER, lo=2, key=lambda partitions: power(mean, of, partitions, seeds))
    return found if found <= MOST_PARTITIONS else None


def power(mean: float, of: Components, partitions: int, seeds: int) -> float:
    """Share of sweeps whose 95 % interval does not contain 0, for a true mean and true variances, of which those below 0 are taken
    as 0. With one training seed, or another one for each partition, it is that of Student's test. Otherwise it is the mean over
    :data:`SIMULATED` draws of the three mean squares, since an interval depends on which variances a sweep estimates below 0.
    """
    P, T = partitions, seeds
    with np.errstate(divide="ignore", invalid="ignore"):
        if math.isnan(of.training):
            away = np.minimum(abs(mean) / np.sqrt(of.partition / P), 30.0)  # beyond, SciPy's distribution fails, and power is 1
            critical = stats.t.ppf((1 + CONFIDENCE) / 2, P - 1)
            sides = stats.nct.sf(critical, P - 1, away), stats.nct.cdf(-critical, P - 1, away)
            return float(np.nan_to_num(sides).sum())  # NaN in SciPy where it is next to nothing
        ms_p, ms_t = of.rest + T * max(of.partition, 0.0), of.rest + P * max(of.training, 0.0)
        rng = np.random.default_rng(0)
        drawn_p, drawn_t, drawn_e = (rng.chisquare(df, SIMULATED) / df for df in (P - 1, T - 1, (P - 1) * (T - 1)))
        variance, df = error_of(ms_p * drawn_p, ms_t * drawn_t, of.rest * drawn_e, P, T)
        half_width = np.exp(np.interp(np.log(df), *_critical_values())) * np.sqrt(variance)
        deviation = np.sqrt((ms_p + ms_t - of.rest) / (P * T))
        found = ndtr((abs(mean) - half_width) / deviation) + ndtr((-abs(mean) - half_width) / deviation)
    return float(np.nan_to_num(found).mean())


@cache
def _critical_values() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Logarithms of degrees of freedom and of Student's critical values, to interpolate: SciPy takes microseconds for each."""
    df = np.geomspace(0.2, 1e6, 500)
    return np.log(df), np.log(stats.t.ppf((1 + CONFIDENCE) / 2, df))


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values with Holm's correction for their number."""
    return list(map(float, multipletests(p_values, method="holm")[1])) if p_values else []
