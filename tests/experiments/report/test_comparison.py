"""Differences between methods: against scipy's paired test, and by hand."""

import math
import warnings

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from lightning_fed.experiments.report.comparison import best_group, difference


@pytest.mark.parametrize("pairs", [2, 3, 10])
def test_the_interval_is_that_of_the_paired_t_test(pairs: int) -> None:
    rng = np.random.default_rng(pairs)
    one, other = rng.normal(size=pairs), rng.normal(size=pairs)
    ours = difference(pd.Series(one), pd.Series(other))
    theirs = stats.ttest_rel(one, other)
    low, high = theirs.confidence_interval(0.95)
    assert (ours.mean - ours.half_width, ours.mean + ours.half_width) == pytest.approx((low, high))
    assert ours.separated == (theirs.pvalue < 0.05)


def test_pairs_are_seeds_that_both_have() -> None:
    apart = difference(pd.Series({0: 5.0, 1: 6.0, 2: 9.0}), pd.Series({2: 1.0, 1: 4.0, 7: 0.0}))
    assert (apart.mean, apart.pairs) == (5.0, 2)
    assert not apart.separated


def test_pairing_finds_what_the_spread_over_seeds_hides() -> None:
    partition = pd.Series([0.0, 10.0, 20.0, 30.0])
    apart = difference(partition + pd.Series([1.0, 1.1, 0.9, 1.0]), partition)
    assert apart.separated
    assert apart.mean == pytest.approx(1.0)


def test_equal_differences_and_too_few_pairs() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert difference(pd.Series([2.0, 3.0]), pd.Series([1.0, 2.0])).separated
        assert not difference(pd.Series([2.0, 3.0]), pd.Series([2.0, 3.0])).separated
        one = difference(pd.Series([2.0]), pd.Series([1.0]))
        none = difference(pd.Series({0: 2.0}), pd.Series({1: 1.0}))
    assert (one.mean, one.separated) == (1.0, False)
    assert math.isnan(none.mean)


def test_the_best_and_what_is_not_separated_from_it() -> None:
    values = {
        "best": pd.Series([0.90, 0.80, 0.70]),
        "as good": pd.Series([0.91, 0.75, 0.72]),
        "worse": pd.Series([0.80, 0.70, 0.61]),
        "not measured": pd.Series([math.nan] * 3),
    }
    assert best_group(values) == {"best", "as good"}
    assert best_group({name: -series for name, series in values.items()}, lower=True) == {"best", "as good"}
    assert best_group({"one": pd.Series([1.0]), "two": pd.Series([0.0])}) == set()
    assert best_group({"not measured": pd.Series([math.nan])}) == set()
