"""Numbers for the report."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import lightning_fed.federation.meters
from lightning_fed.core.messages import PRIVATE_SHARE, Broadcast, ClientUpdate
from lightning_fed.federation.meters import (
    BestRound,
    Stopwatch,
    Target,
    TrafficMeter,
    private_shares,
    running_totals,
    spread,
    spread_all,
    training_means,
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that is set by hand."""
    now = [0.0]
    monkeypatch.setattr(lightning_fed.federation.meters, "perf_counter", lambda: now[0])
    return now


def test_a_stage_inside_another_is_not_counted_twice(clock: list[float]) -> None:
    watch = Stopwatch()
    with watch("outer"):
        clock[0] += 1
        with watch("inner"):
            clock[0] += 10
            with watch("innermost"):
                clock[0] += 100
        clock[0] += 1
        with watch("inner"):
            clock[0] += 20
    assert watch.collect() == {"seconds/outer": 2, "seconds/inner": 30, "seconds/innermost": 100}
    assert watch.collect() == {}


def test_items_are_timed_as_they_arrive_and_not_as_they_are_used(clock: list[float]) -> None:
    def slow() -> Iterator[int]:
        for number in range(3):
            clock[0] += 5
            yield number

    watch, seen = Stopwatch(), []
    with watch("use"):
        for item in watch.each("wait", slow()):
            clock[0] += 1
            seen.append(item)
    assert seen == [0, 1, 2]
    assert watch.collect() == {"seconds/wait": 15, "seconds/use": 3}


def test_time_is_noted_also_when_a_stage_fails(clock: list[float]) -> None:
    watch = Stopwatch()

    @watch("stage")
    def fail() -> None:
        clock[0] += 2
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert watch.collect() == {"seconds/stage": 2}


def test_traffic_counts_floats_as_parameters_and_everything_as_bytes() -> None:
    floats = {"w": torch.zeros(10, 3), "half": torch.zeros(4, dtype=torch.float16)}
    state = floats | {"counter": torch.tensor(1), "mask": torch.ones(5, dtype=torch.bool)}
    meter = TrafficMeter()
    meter.down(0, Broadcast(state))
    meter.down(0, Broadcast(state))
    meter.up(ClientUpdate(0, 1, {"w": torch.zeros(2)}))
    assert meter.collect() == {
        "traffic/down_parameters": 2 * (30 + 4),
        "traffic/down_bytes": 2 * (4 * 30 + 2 * 4 + 8 + 5),
        "traffic/up_parameters": 2,
        "traffic/up_bytes": 8,
    }
    assert set(meter.collect().values()) == {0}


def test_spread_is_that_of_numpy() -> None:
    values = np.random.default_rng(0).normal(size=7)
    found = spread("x", values.tolist())
    assert found == pytest.approx(
        {
            "x/mean": values.mean(),
            "x/min": values.min(),
            "x/q25": np.percentile(values, 25),
            "x/median": np.median(values),
            "x/q75": np.percentile(values, 75),
            "x/max": values.max(),
        }
    )
    assert set(spread("x", [0.5]).values()) == {0.5}
    assert list(spread("x", [1.0, 3.0, math.inf, math.inf, math.inf]).values()) == [math.inf, 1, 3, *[math.inf] * 3]


def test_spread_of_every_measured_metric() -> None:
    found = spread_all("after", [{"test/accuracy": 0.0, "flops": 3.0}, {"test/accuracy": 1.0, "val/accuracy": 0.25}])
    assert found["after/test_accuracy/mean"] == 0.5
    assert found["after/val_accuracy/mean"] == 0.25
    assert len(found) == 12


def test_training_means_weight_by_examples() -> None:
    updates = [ClientUpdate(0, 100, {}, {"train/a": 1.0, "flops": 9.0}), ClientUpdate(1, 300, {}, {"train/a": 2.0, "train/b": 5.0})]
    assert training_means(updates) == {"train/a": (100 * 1 + 300 * 2) / 400, "train/b": 5.0}


def test_running_totals_add_up() -> None:
    row = {"compute/flops": 7.0} | {f"traffic/{way}_{unit}": 1.0 for way in ("down", "up") for unit in ("parameters", "bytes")}
    history: list[dict[str, float]] = []
    for _ in range(3):
        history.append(row | running_totals(history[-1] if history else {}, row))
    assert history[-1]["traffic/total_parameters"] == history[-1]["traffic/total_bytes"] == 6
    assert history[-1]["compute/total_flops"] == 21
    assert "fine_tune/total_flops" not in history[-1]


@pytest.mark.parametrize("stage", ["fine_tune", "server"])
def test_a_stage_that_not_every_round_has_has_a_total_from_its_first_round_on(stage: str) -> None:
    """A round that measures nobody adapts nobody; where nobody has sent anything the server learns nothing."""
    row = {"compute/flops": 7.0} | {f"traffic/{way}_{unit}": 1.0 for way in ("down", "up") for unit in ("parameters", "bytes")}
    history: list[dict[str, float]] = []
    for costs in ({}, {f"{stage}/flops": 5.0}, {}, {f"{stage}/flops": 5.0}):
        history.append(row | costs | running_totals(history[-1] if history else {}, row | costs))
    assert [entry.get(f"{stage}/total_flops") for entry in history] == [None, 5, 5, 10]


def test_private_shares_are_means_over_clients_of_each_layer_and_over_layers() -> None:
    """Over layers with equal weight, however many clients have them."""
    a, b, c = (f"{PRIVATE_SHARE}{layer}" for layer in "abc")
    found = private_shares([{a: 0.0, b: 0.5, c: 0.125}, {a: 1.0, b: 0.75, "test/accuracy": 3.0}])
    assert found == {
        f"adapter/{a}": 0.5,
        f"adapter/{b}": 0.625,
        f"adapter/{c}": 0.125,
        f"adapter/{PRIVATE_SHARE}mean": (0.5 + 0.625 + 0.125) / 3,
    }
    assert private_shares([{"test/accuracy": 3.0}]) == {}


def row(round: int, val: float, test: float) -> dict[str, float]:
    return {"round": float(round), "after/val_accuracy/mean": val, "after/test_accuracy/mean": test}


def monitor(kind: str) -> str:
    return f"after/{kind}_accuracy/mean"


def selected(rows: list[dict[str, float]]) -> dict[str, float]:
    best = BestRound(monitor, "accuracy")
    return [best.update(row) for row in rows][-1]


def reached(rows: list[dict[str, float]], target: float) -> dict[str, float]:
    meter = Target("accuracy", target)
    return [meter.update(row) for row in rows][-1]


def test_a_round_is_selected_by_validation_and_never_by_test() -> None:
    rows = [row(1, 0.5, 0.6), {"round": 2.0}, row(3, 0.8, 0.7), row(4, 0.6, 0.9)]
    assert selected(rows) == {"selected/test_accuracy": 0.7, "selected/round": 3}


def test_of_equally_good_rounds_the_first_is_selected() -> None:
    assert selected([row(1, 0.5, 0.1), row(2, 0.5, 0.9)])["selected/round"] == 1


def test_without_test_data_the_best_round_is_known_all_the_same() -> None:
    only_val = {"round": 2.0, "after/val_accuracy/mean": 0.9}
    assert selected([row(1, 0.5, 0.6), only_val, {"round": 3.0}]) == {"selected/round": 2}


def test_without_validation_data_nothing_is_selected() -> None:
    assert selected([{"round": 1.0, "after/test_accuracy/mean": 0.9}]) == {}


def test_the_costs_of_a_target_are_those_of_the_first_round_that_reached_it() -> None:
    rows = [
        {
            "round": k,
            "accuracy": value,
            "traffic/total_parameters": 10 * k,
            "traffic/total_bytes": 40 * k,
            "compute/total_flops": 7 * k,
        }
        for k, value in ((1.0, 0.5), (2.0, 0.8), (3.0, 0.7), (4.0, 0.9))
    ]
    del rows[0]["accuracy"]  # a round that was not measured
    assert reached(rows, 0.8) == {
        "target/parameters": 20,
        "target/bytes": 80,
        "target/flops": 14,
        "target/round": 2,
    }
    assert reached(rows, 0.85)["target/round"] == 4
    assert reached(rows, 0.95) == {}


def test_a_client_without_a_number_does_not_count() -> None:
    results = [{"test/c_index": 0.5}, {"test/c_index": math.nan}, {"test/c_index": 1.0}]
    columns = spread_all("after", results)
    assert columns["after/test_c_index/mean"] == 0.75
    assert columns["after/test_c_index/min"] == 0.5
    assert math.isnan(spread("after/test_c_index", [math.nan])["after/test_c_index/mean"])
