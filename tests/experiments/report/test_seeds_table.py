"""What is said of partitions and training seeds."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from written_runs import add_facts, write_crossed, write_run, write_sweep

from lightning_fed.experiments.report import load_runs
from lightning_fed.experiments.report.comparison import comparisons
from lightning_fed.experiments.report.layout import Layout
from lightning_fed.experiments.report.methods_table import tables
from lightning_fed.experiments.report.pairing import best_group, cells_of, difference
from lightning_fed.experiments.report.seeds_table import seed_tables
from lightning_fed.experiments.sweep.plan import ReportOptions

BASE = np.array([[0.5, 0.5], [0.6, 0.6], [0.7, 0.7], [0.4, 0.4], [0.5, 0.5]])
APART = np.array([0.06, -0.02, 0.05, 0.04, -0.01])[:, None]
CROSSED = {"FedAvg": (BASE + APART).tolist(), "Standalone": BASE.tolist()}


def blocks(folder: Path) -> list[Layout]:
    [comparison] = comparisons(load_runs(folder), ReportOptions())
    return seed_tables(comparison)


def first_row(table: Layout) -> dict[str, str]:
    return {column: entry.text for column, entry in zip(table.columns, table.rows[0], strict=True)}


def test_shares_flips_and_power_of_a_difference() -> None:
    """Only the partition matters: 0.024 ± 2.776 · 0.0365 / √5."""
    [table] = blocks(write_crossed(Path("sweep"), CROSSED))
    assert first_row(table) == {
        **{"": "FedAvg", "minus Standalone": "+2.40 ± 4.53, not separated"},
        **{"from the partition": "100%", "from training": "0%", "from both": "0%"},
        **{"other order on": "2 of 5", "partitions needed": "21"},
    }
    assert table.groups[0] == "last round"
    assert "With one partition you would have concluded the opposite of FedAvg and Standalone in 2 of 5 cases." in table.notes
    assert "FedAvg, first on average, is first on 3 of 5 partitions." in table.notes
    [shares] = [note for note in table.notes if note.startswith("Variance of a method's result")]
    assert shares.startswith(
        "Variance of a method's result from run to run: partition 95%, training 0%, both 0%, method × partition 5%"
    )


def test_variances_and_shares_are_of_equal_measures() -> None:
    """A loss of a global model has no part in what is said of accuracies."""
    folder = write_crossed(Path("sweep"), CROSSED | {"FedPer": BASE.tolist()})
    losses = "global/test_loss"
    for table in (folder / "FedPer").rglob("metrics.csv"):
        rounds = pd.read_csv(table)
        rounds.assign(**{losses: 100 * rounds["after/test_accuracy/mean"] ** 2}).to_csv(table, index=False)
    add_facts(folder / "FedPer", monitor=losses, higher_is_better=False)
    runs, options = load_runs(folder, metric="monitor"), ReportOptions(between=("Standalone", "FedAvg"))
    [comparison] = comparisons(runs, options)
    notes = seed_tables(comparison)[0].notes
    assert any("to run: partition 95%, training 0%, both 0%, method × partition 5%" in note for note in notes)
    shares = {row[0].text: row[-1].text for row in tables(runs, options)[0].rows}
    assert shares == {"FedAvg": "no gap", "Standalone": "no gap", "FedPer": "another measure"}


def test_of_equal_methods_none_is_first() -> None:
    [table] = blocks(write_crossed(Path("sweep"), {"FedAvg": BASE.tolist(), "Standalone": BASE.tolist()}))
    assert not any("first on" in note for note in table.notes)


def test_every_measure_has_its_rows() -> None:
    [table] = blocks(write_crossed(Path("sweep"), CROSSED))
    assert list(table.groups.values()) == ["last round", "best on validation", "worst tenth of clients"]
    assert len(table.rows) == 3


def test_seeds_that_draw_a_partition_each_have_no_shares() -> None:
    [table] = blocks(write_sweep(Path("sweep"), {"FedAvg": [0.6, 0.4, 0.7], "Standalone": [0.5, 0.5, 0.5]}))
    assert table.columns == ["", "minus Standalone", "other order on", "partitions needed"]
    assert first_row(table)["other order on"] == "1 of 3"
    assert not any("Variance of" in note for note in table.notes)


def test_each_pair_has_its_number_of_partitions() -> None:
    more = CROSSED | {"FedPer": (BASE + 2 * APART.mean()).tolist()}
    _, pairs = blocks(write_crossed(Path("sweep"), more))
    assert pairs.columns == ["", "Standalone", "FedPer"]
    assert [[entry.text for entry in row] for row in pairs.rows] == [["FedAvg", "21", "21"], ["Standalone", "", "2"]]


def test_of_one_partition_nothing_is_said_of_others() -> None:
    folder = write_crossed(Path("sweep"), {name: values[:1] for name, values in CROSSED.items()})
    assert blocks(folder) == []
    [table] = tables(load_runs(folder))
    assert "All runs use partition 0; the results say nothing about other partitions." in table.notes
    assert any("valid for this partition" in note for note in table.notes)


@pytest.mark.parametrize("crossed", [True, False])
def test_equal_partitions_are_one(crossed: bool) -> None:
    """Whatever the seed of the partition changes nothing in says nothing of other partitions."""
    if crossed:
        folder = write_crossed(Path("sweep"), {"FedAvg": [[0.8, 0.7]] * 2, "Standalone": [[0.6, 0.5]] * 2})
    else:
        folder = write_sweep(Path("sweep"), {"FedAvg": [0.8, 0.7], "Standalone": [0.6, 0.5]})
    add_facts(folder, data="0a")
    assert blocks(folder) == []
    [table] = tables(load_runs(folder))
    assert "Partitions 0, 1 count as one: the partition's seed changes nothing in these data." in table.notes
    assert "All runs use partition 0; the results say nothing about other partitions." in table.notes
    assert table.rows[0][1].text == "75.00 ± 7.07"
    assert any("paired by training seed" in note for note in table.notes)


def test_partitions_of_natural_clients_divide_their_data() -> None:
    add_facts(folder := write_crossed(Path("sweep"), CROSSED), natural_clients=True)
    [table] = tables(load_runs(folder))
    assert any("valid for new splits of the same clients' data and training seeds" in note for note in table.notes)


def test_a_missing_run_is_said_and_its_partition_left_out() -> None:
    values = np.array(CROSSED["FedAvg"])
    values[1, 1] = math.nan
    folder = write_crossed(Path("sweep"), CROSSED | {"FedAvg": values.tolist()})
    [table] = tables(load_runs(folder))
    entry = dict(zip(table.columns, table.rows[0], strict=True))
    assert entry[""].text == "FedAvg (9 of 10 runs)"
    assert entry["last, minus Standalone"].text.startswith("+3.50")  # without the second of them
    assert entry["last, minus Standalone"].note == "Over the 4 partitions × 2 training seeds for which no run is missing."
    assert first_row(blocks(folder)[0])["other order on"] == "1 of 4"


@pytest.mark.parametrize(
    ("there", "note"),
    [
        ((0, slice(None)), "Valid for this partition alone."),
        ((slice(None), 1), "It says nothing about other training seeds."),
    ],
)
def test_an_interval_over_one_of_the_two_alone_says_so(there: Any, note: str) -> None:
    values, known = np.full((5, 2), math.nan), np.array(CROSSED["FedAvg"])
    values[there] = known[there]
    [table] = tables(load_runs(write_crossed(Path("sweep"), CROSSED | {"FedAvg": values.tolist()})))
    entry = dict(zip(table.columns, table.rows[0], strict=True))["last, minus Standalone"]
    assert "±" in entry.text
    assert entry.note == note


def test_power_is_that_of_the_training_seeds_that_are_there() -> None:
    values = np.array(CROSSED["FedAvg"])
    values[:4, 1] = math.nan
    [table] = blocks(write_crossed(Path("sweep"), CROSSED | {"FedAvg": values.tolist()}))
    assert table.rows[0][-1].note == "With 1 training seed, for which no run is missing."


def test_runs_from_the_command_line_pair_by_their_seeds_too() -> None:
    for partition in (0, 1):
        for seed in (0, 1):
            write_run(Path(f"runs/a{partition}{seed}"), [0.6 + partition / 10], "FedAvg", seed, partition)
            write_run(Path(f"runs/b{partition}{seed}"), [0.5 + partition / 10], "Standalone", seed, partition)
    [table] = tables(load_runs("runs"))
    assert table.notes[0].endswith("mean ± standard deviation over partitions 0, 1 × training seeds 0, 1.")
    assert table.rows[0][-5].text == "+10.00 ± 0.00"


def by_draw(values: dict[tuple[int, int], float]) -> pd.Series:
    return pd.Series(values.values(), pd.MultiIndex.from_tuples(values, names=["partition", "seed"]), dtype=float)


def test_pairs_are_runs_that_both_have() -> None:
    one, other = by_draw({(0, 0): 5, (1, 1): 6, (2, 2): 9}), by_draw({(2, 2): 1, (1, 1): 4, (7, 7): 0})
    apart = difference(one, other)
    assert (apart.mean, apart.partitions, apart.seeds) == (5.0, 2, 1)
    assert not apart.separated
    assert math.isnan(difference(one, by_draw({(9, 9): 0})).mean)
    assert cells_of(by_draw({(0, 0): 1, (0, 1): 2, (1, 0): 3, (1, 1): 4})).tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("lower", [False, True])
def test_the_best_and_what_is_not_separated_from_it(lower: bool) -> None:
    values = {"best": [0.90, 0.80, 0.70], "as good": [0.91, 0.75, 0.72], "worse": [0.80, 0.70, 0.61], "unknown": [math.nan] * 3}
    found = {name: (-1 if lower else 1) * by_draw({(k, k): v for k, v in enumerate(of)}) for name, of in values.items()}
    assert best_group(found, lower) == {"best", "as good"}
    assert best_group(found | {"run once": found["worse"][:1]}, lower) == {"best", "as good"}
    assert best_group({"one": by_draw({(0, 0): 1}), "two": by_draw({(0, 0): 0})}) == set()
    assert best_group({"unknown": by_draw({(0, 0): math.nan})}) == set()
