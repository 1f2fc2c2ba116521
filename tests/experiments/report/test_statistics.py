"""Intervals, shares, flips and power: against SciPy's tests, by hand, and by simulation with variances that are known."""

import math
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from lightning_fed.experiments.report.statistics import (
    Components,
    complete,
    components,
    error_of,
    estimate,
    flips,
    holm,
    mean_squares,
    of_methods,
    partitions_needed,
)

SETTINGS = {"partition": (1.0, 0.0, 0.3), "training": (0.0, 1.0, 0.3), "both": (1.0, 1.0, 0.3), "interaction": (0.3, 0.3, 1.0)}
"""Standard deviations of partition, training seed and their interaction."""

P, T = 5, 3


@cache
def sweeps(partition: float, training: float, rest: float, count: int = 2000) -> NDArray[np.float64]:
    """Differences of as many sweeps whose true mean is 0, shape (count, P, T)."""
    rng = np.random.default_rng(0)
    a, b, e = (rng.normal(size=(count, *shape)) for shape in ((P, 1), (1, T), (P, T)))
    return partition * a + training * b + rest * e


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_interval_holds_for_new_partitions_and_training_seeds(setting: str) -> None:
    found = [estimate(cells) for cells in sweeps(*SETTINGS[setting])]
    covered = np.mean([abs(one.mean) <= one.half_width for one in found])
    assert 0.94 <= covered <= 0.98
    rejected = np.mean([one.p_value < 0.05 for one in found])
    assert rejected == pytest.approx(1 - covered, abs=1e-9)


@pytest.mark.parametrize("setting", SETTINGS)
def test_variances_are_recovered(setting: str) -> None:
    """The mean over many sweeps lies within four standard errors of what was put in."""
    found = np.array([(one.partition, one.training, one.rest) for one in map(components, sweeps(*SETTINGS[setting]))])
    assert np.all(abs(found.mean(0) - np.square(SETTINGS[setting])) < 4 * stats.sem(found))


def test_variances_of_methods_results_are_recovered() -> None:
    rng, M, truth = (
        np.random.default_rng(1),
        4,
        dict(zip(("p", "t", "pt", "mp", "mt", "e"), (3, 1, 0.5, 0.8, 0.4, 0.6), strict=True)),
    )
    shapes = {"p": (1, P, 1), "t": (1, 1, T), "pt": (1, P, T), "mp": (M, P, 1), "mt": (M, 1, T), "e": (M, P, T)}
    mean = np.arange(M)[:, None, None]
    draws = [mean + sum(truth[k] ** 0.5 * rng.normal(size=shape) for k, shape in shapes.items()) for _ in range(2000)]
    found = np.array([list(of_methods(values).values()) for values in draws])
    assert np.all(abs(found.mean(0) - list(truth.values())) < 4 * stats.sem(found))


def test_the_mean_squares_are_those_of_an_analysis_of_variance() -> None:
    """By hand: row means 2, 4, 6; column means 3, 5; nothing is left of the cells, or what is added."""
    cells = np.array([[1.0, 3.0], [3.0, 5.0], [5.0, 7.0]])
    assert mean_squares(cells) == pytest.approx((2 * (4 + 0 + 4) / 2, 3 * (1 + 1) / 1, 0))
    assert mean_squares(cells + np.array([[1, -1], [0, 0], [-1, 1]])) == pytest.approx((8, 6, 4 / 2))
    both = estimate(cells)
    assert (both.mean, both.error**2) == pytest.approx((4, (8 + 6) / 6))
    assert both.df == pytest.approx(14**2 / (8**2 / 2 + 6**2 / 1))


def test_a_variance_below_0_is_taken_as_0() -> None:
    variance = {"ms_p": 1.0, "ms_t": 1.0, "ms_e": 2.0, "partitions": P, "seeds": T}
    assert error_of(**variance) == pytest.approx(((4 * 1 + 2 * 1 + 8 * 2) / 14 / 15, 14))  # all cells alike
    assert error_of(**variance | {"ms_p": 6.0}) == pytest.approx((6 / 15, 4))
    assert error_of(**variance | {"ms_t": 6.0}) == pytest.approx((6 / 15, 2))


@pytest.mark.parametrize("shape", [(2, 1), (7, 1), (1, 3)])
def test_with_one_training_seed_or_one_partition_it_is_the_t_test(shape: tuple[int, int]) -> None:
    cells = np.random.default_rng(0).normal(size=shape)
    ours, theirs = estimate(cells), stats.ttest_1samp(cells.ravel(), 0)
    low, high = theirs.confidence_interval(0.95)
    assert (ours.mean - ours.half_width, ours.mean + ours.half_width) == pytest.approx((low, high))
    assert ours.p_value == pytest.approx(theirs.pvalue)


def test_of_one_cell_and_of_equal_ones() -> None:
    one, none = estimate(np.array([[2.0]])), estimate(np.empty((0, 1)))
    assert (one.mean, math.isnan(one.half_width), one.p_value) == (2.0, True, 1.0)
    assert (math.isnan(none.mean), none.p_value) == (True, 1.0)
    for shape in ((3, 1), (3, 2)):
        assert (estimate(np.ones(shape)).half_width, estimate(np.ones(shape)).p_value) == (0, 0)
        assert estimate(np.zeros(shape)).p_value == 1
    assert math.isnan(components(np.ones((1, 3))).partition)
    assert components(np.array([[1.0], [3.0]])).partition == 2


def test_of_a_table_with_gaps_the_largest_part_without_stays() -> None:
    cells, nan = np.arange(15.0).reshape(5, 3), math.nan
    gap = cells.copy()
    gap[1, 2] = nan
    assert np.array_equal(complete(gap), cells[[0, 2, 3, 4]])  # a partition goes, not a training seed of five
    assert np.array_equal(complete(gap[:2, 1:]), cells[:2, 1:2])  # a training seed of two, not a partition of two
    gap[:3, 2] = nan
    assert np.array_equal(complete(gap), cells[:, :2])
    assert np.array_equal(complete(cells), cells)
    own = np.where(np.eye(3) > 0, 1.0, nan)  # each seed with a partition of its own
    assert complete(own).tolist() == [[1.0]] * 3
    assert complete(np.full((2, 2), nan)).shape == (0, 1)


def test_flips_are_partitions_on_the_other_side() -> None:
    assert flips(np.array([[3.0, 1.0], [-2.0, 1.0], [4.0, 4.0], [0.0, 0.0]])) == 1
    assert flips(np.array([[-3.0], [2.0], [-9.0]])) == 1


@pytest.mark.parametrize(
    ("mean", "truth", "seeds"),
    [
        (1.2, Components(1.0, math.nan, math.nan), 1),
        (1.2, Components(1.0, 0.05, 0.3), 3),
        (0.8, Components(1.0, 0.0, 0.5), 2),
        (0.8, Components(0.3, 0.0, 1.0), 3),
    ],
)
def test_so_many_partitions_separate_in_four_of_five_sweeps(mean: float, truth: Components, seeds: int) -> None:
    """Sweeps of that size are played: 80 % of them find the difference, and fewer do with two partitions less."""
    needed, rng = partitions_needed(mean, truth, seeds), np.random.default_rng(3)
    assert needed is not None

    def found(partitions: int) -> float:
        shapes = ((partitions, 1), (1, seeds), (partitions, seeds))
        scales = [math.sqrt(value) if value > 0 else 0 for value in (truth.partition, truth.training, truth.rest)]
        cells = (mean + sum(s * rng.normal(size=shape) for s, shape in zip(scales, shapes, strict=True)) for _ in range(2000))
        return float(np.mean([estimate(of).p_value < 0.05 for of in cells]))

    assert found(needed) > 0.77
    assert found(needed - 2) < 0.8


def test_what_no_number_of_partitions_separates() -> None:
    assert partitions_needed(0.0, Components(1.0, math.nan, math.nan), 1) is None
    assert partitions_needed(0.0, Components(0.0, math.nan, math.nan), 1) is None
    assert partitions_needed(0.0, Components(0.0, 0.0, 0.0), 3) is None
    assert partitions_needed(0.1, Components(0.0, 1.0, 0.1), 3) is None  # it takes more training seeds
    assert partitions_needed(100.0, Components(1.0, math.nan, math.nan), 1) == 2
    assert partitions_needed(65.1, Components(5.6**2, math.nan, math.nan), 1) == 2  # where SciPy has no number for the other tail
    assert partitions_needed(1.0, Components(0.0, math.nan, math.nan), 1) == 2


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []
