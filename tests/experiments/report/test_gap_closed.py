"""Where methods stand between two references."""

from pathlib import Path

import pandas as pd
import pytest
from written_runs import write_sweep

from lightning_fed.errors import FederationError
from lightning_fed.experiments.report import load_runs
from lightning_fed.experiments.report.gap_closed import gap_closed
from lightning_fed.experiments.report.layout import Layout
from lightning_fed.experiments.report.methods_table import tables
from lightning_fed.experiments.sweep.plan import ReportOptions


def by_seed(values: list[float], seeds: tuple[int, ...] = (0, 1, 2)) -> pd.Series:
    return pd.Series(
        values, pd.MultiIndex.from_tuples([(seed, seed) for seed in seeds[: len(values)]], names=["partition", "seed"])
    )


LOW, HIGH = by_seed([0.5, 0.4, 0.6]), by_seed([0.7, 0.6, 0.7])
VALUES = {"FedAvg": list(HIGH), "FedPer": [0.6, 0.45, 0.675], "Standalone": list(LOW)}


def test_the_share_is_taken_seed_by_seed() -> None:
    """0.5, 0.25 and 0.75: 0.5 with a standard deviation of 0.25, times 4.303 / √3."""
    share = gap_closed(by_seed(VALUES["FedPer"]), LOW, HIGH)
    assert share.mean == pytest.approx(0.5)
    assert share.half_width == pytest.approx(4.3027 * 0.25 / 3**0.5, rel=1e-4)
    assert share.partitions == 3


def test_the_references_are_0_and_1_and_there_is_more_on_either_side() -> None:
    assert (gap_closed(LOW, LOW, HIGH).mean, gap_closed(HIGH, LOW, HIGH).mean) == pytest.approx((0, 1))
    assert gap_closed(LOW - (HIGH - LOW), LOW, HIGH).mean == pytest.approx(-1)
    assert gap_closed(2 * HIGH - LOW, LOW, HIGH).mean == pytest.approx(2)


def test_of_losses_small_ones_are_the_upper_end() -> None:
    assert gap_closed(-by_seed(VALUES["FedPer"]), -LOW, -HIGH, lower_is_better=True).mean == pytest.approx(0.5)


def test_only_seeds_that_all_three_have_count() -> None:
    share = gap_closed(by_seed([0.6, 9.0], (0, 7)), LOW, HIGH)
    assert (share.mean, share.partitions) == (pytest.approx(0.5), 1)


@pytest.mark.parametrize("high", [LOW, by_seed([0.7, 0.3, 0.7]), LOW - 0.1], ids=["equal", "another order", "below"])
def test_references_that_leave_no_room_say_so(high: pd.Series) -> None:
    assert pd.isna(gap_closed(LOW, LOW, high).mean)


def rows_of(layout: Layout) -> dict[str, str]:
    return {row[0].text: row[-1].text for row in layout.rows}


def test_a_table_has_it_as_its_last_column() -> None:
    [layout] = tables(load_runs(write_sweep(Path("sweep"), VALUES)), ReportOptions(between=("Standalone", "FedAvg")))
    assert layout.columns[-1] == "gap closed"
    assert rows_of(layout) == {"FedAvg": "1.00", "FedPer": "0.50 ± 0.62", "Standalone": "0.00", "majority label": ""}
    assert layout.notes[-1] == "Gap closed: 0 is Standalone, 1 is FedAvg, run by run, with a 95 % interval as of differences."


def test_without_room_the_table_says_so_and_an_unknown_reference_is_refused() -> None:
    runs = load_runs(write_sweep(Path("sweep"), VALUES))
    for between in (("FedPer", "FedPer"), ("FedAvg", "Standalone")):
        assert set(rows_of(tables(runs, ReportOptions(between=between))[0]).values()) == {"no gap", ""}
    with pytest.raises(FederationError, match="There is no method 'FedProx' to leave a gap; there are FedAvg, FedPer, Standalone"):
        tables(runs, ReportOptions(between=("FedProx", "FedAvg")))
