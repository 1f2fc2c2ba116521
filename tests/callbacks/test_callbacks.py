"""What a run leaves to be looked at."""

import csv
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import CLASSES, Net, Stop, new_data, new_federation, new_method, new_trainer

from lightning_fed.callbacks import FederationCallback, RunView
from lightning_fed.callbacks.base import majority_baseline
from lightning_fed.callbacks.measured_table import measured_table
from lightning_fed.callbacks.tensorboard import label_figure, spread_figure
from lightning_fed.core.messages import ClientUpdate
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import FedAvg
from lightning_fed.storage.manifest import Metrics

PROMISED = [
    "train/local_loss",
    *(f"{stage}/test_accuracy/{name}" for stage in ("before", "after") for name in ("mean", "min", "q25", "median", "q75", "max")),
    "selected/test_accuracy",
    "traffic/up_parameters",
    "traffic/down_bytes",
    "traffic/total_parameters",
    "traffic/total_bytes",
    "compute/flops",
    "compute/total_flops",
    "seconds/fit",
    "seconds/evaluate",
    "seconds/aggregate",
]


def fit(rounds: int, ckpt_path: str | None = None, **options: object) -> Federation:
    federation = new_federation(rounds, "runs", logger=True, participation=0.5, evaluate_every=1, trainer=new_trainer, **options)
    federation.fit(new_method("PFedLoRA"), new_data(), ckpt_path)
    return federation


def read_csv(path: str) -> list[dict[str, str]]:
    with Path("runs/version_0", path).open(newline="") as file:
        return list(csv.DictReader(file))


def events() -> EventAccumulator:
    accumulator = EventAccumulator("runs/version_0", size_guidance={"scalars": 0, "images": 0}, purge_orphaned_data=True)
    return accumulator.Reload()


def scalars(found: EventAccumulator, name: str) -> dict[float, float]:
    """Values by round. The monitored metric is there once more, beside the hyperparameters."""
    return {event.step: event.value for event in found.Scalars(name)}


def test_metrics_csv_has_a_row_per_round_with_everything() -> None:
    federation = fit(3)
    rows = read_csv("metrics.csv")
    assert [row["round"] for row in rows] == ["1.0", "2.0", "3.0"]
    for row, metrics in zip(rows, federation.run.history, strict=True):
        assert {name: float(value) for name, value in row.items() if value} == metrics
    assert set(PROMISED) <= rows[0].keys()


def test_clients_csv_has_a_row_per_client() -> None:
    federation = fit(1)
    rows = read_csv("clients.csv")
    assert [int(row["client"]) for row in rows] == [0, 1, 2, 3]
    majority = federation.run.data.majority_accuracy().tolist()
    for row, client in zip(rows, federation.run.clients, strict=True):
        assert (int(row["train"]), int(row["val"]), int(row["test"])) == (client.num_train, client.num_val, client.num_test)
        assert float(row["majority_accuracy"]) == majority[client.id]
        assert float(row["test/accuracy"]) == federation.run.results[client.id]["test/accuracy"]
        assert "val/accuracy" in row


def test_the_trivial_baseline_is_that_of_the_clients_that_are_measured() -> None:
    """Not of those that never take part, of whom one could have another majority."""
    federation = fit(1, unseen=[3])
    majority = federation.run.data.majority_accuracy()[:3]
    baseline = majority_baseline(federation.run)
    assert torch.equal(baseline, majority)
    rows = [list(column.cells) for column in measured_table(federation.run, "test", federation.run.history[-1], "").columns]
    assert rows[1][-1] == f"{100 * majority.mean():.2f} %"


def test_tensorboard_has_scalars_figures_and_hyperparameters() -> None:
    federation = fit(3)
    found = events()
    assert set(PROMISED) <= set(found.Tags()["scalars"])
    for name in PROMISED:
        assert scalars(found, name) == pytest.approx({row["round"]: row[name] for row in federation.run.history})
    assert [image.step for image in found.Images("clients/labels")] == [0]
    assert [image.step for image in found.Images("clients/accuracy")] == [3]
    assert "_hparams_/session_start_info" in found.summary_metadata
    assert "hidden_dim: 60" in Path("runs/version_0/hparams.yaml").read_text()


def test_a_continued_run_shows_each_round_once() -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(4, callbacks=[Stop(3)])
    time.sleep(1 - time.time() % 1)  # of one second, TensorBoard reads its tenth file before its ninth
    federation = fit(4, ckpt_path="last")
    name = "after/test_accuracy/mean"
    assert scalars(events(), name) == pytest.approx({row["round"]: row[name] for row in federation.run.history})
    for other in ("train/local_loss", "traffic/total_bytes"):
        assert [event.step for event in events().Scalars(other)] == [1, 2, 3, 4]
    assert len(read_csv("metrics.csv")) == 4


def nothing_is_cut(figure: Figure) -> bool:
    """Whether all texts are within a figure."""
    found, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    return bool(found.x0 >= 0 and found.y0 >= 0 and found.x1 <= width and found.y1 <= height)


@pytest.mark.parametrize(("clients", "classes"), [(10, 10), (50, 100), (1, 2), (3, 1)])
def test_label_figure(clients: int, classes: int) -> None:
    counts = np.random.default_rng(0).integers(0, 3, (clients, classes))
    counts[0, 0] = 7
    figure = label_figure(counts, [f"site {k}" for k in range(clients)], ["no", "yes"])
    axes = figure.axes[0]
    figure.canvas.draw()
    assert nothing_is_cut(figure)
    named = [[label.get_text() for label in labels()] for labels in (axes.get_xticklabels, axes.get_yticklabels)]
    assert named[0] == [f"site {k}" for k in range(clients)]
    assert (named[1] == ["no", "yes"]) == (classes == 2)
    assert "." not in "".join(named[1])  # no fractions of a class
    assert max(figure.get_size_inches()) <= 16
    bubbles = figure.axes[0].collections[0]
    assert len(bubbles.get_offsets()) == np.count_nonzero(counts)
    assert bubbles.get_sizes().max() / bubbles.get_sizes().min() == pytest.approx(7 / counts[counts > 0].min())
    assert "largest: 7" in figure.axes[0].get_title()


@pytest.mark.filterwarnings("error")
def test_names_beside_a_figure_are_not_read_as_formulas_and_numbers_stand_for_what_the_font_lacks() -> None:
    names = ["$1_$", "ill", "日本語", "an_identifier_of_30_characters"]
    figure = label_figure(np.eye(4), None, names)
    figure.canvas.draw()
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["$1_$", "ill", "2", "an_identifier_of_30…"]


def test_there_is_room_for_the_longest_names() -> None:
    long = ["W" * 30, *map(str, range(14))]
    assert nothing_is_cut(label_figure(np.eye(15), long, long))
    small = label_figure(np.eye(1), long[:1], long[:1])  # its axes are kept, and what is outside is cut
    small.canvas.draw()
    assert small.axes[0].bbox.height > 0


@pytest.mark.parametrize("majority", [torch.tensor([0.2, 0.3, 0.4]), None])
def test_spread_figure(majority: torch.Tensor | None) -> None:
    values = np.array([0.5, 0.7, 0.9])
    axes = spread_figure(np.array([0.5, np.nan, 0.7, 0.9]), majority, "accuracy").axes[0]
    columns = [values] if majority is None else [values, majority.numpy()]
    dots = [line.get_ydata() for line in axes.lines if line.get_marker() == "o"]
    assert all(np.array_equal(found, column) for found, column in zip(dots, columns, strict=True))
    assert [label.get_text() for label in axes.get_xticklabels()] == ["model", "majority label"][: len(columns)]
    assert axes.lines[0].get_ydata().max() == 0.8  # the upper quartile
    assert axes.get_title() == "3 clients"
    assert nothing_is_cut(spread_figure(np.array([1e5, 9e5]), majority, "perplexity"))
    spread_figure(np.array([np.nan]), None, "auroc")


class Adding(FederationCallback):
    """Adds a column."""

    def round_metrics(self, run: RunView) -> Metrics:
        return {"mine/rounds_left": run.rounds - run.round}


class Silent(FederationCallback):
    """Only looks at rounds."""

    def round_metrics(self, run: RunView) -> Metrics:
        return None  # type: ignore[return-value]


class Logging(FedAvg):
    """Logs as a LightningModule does."""

    def client_loss(self, batch: Any) -> torch.Tensor:
        self.log("train/mine", float(self.client.id))
        return super().client_loss(batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        super().test_step(batch, batch_idx)
        self.log("test/mine", 2.0)


def test_what_a_callback_or_a_method_adds_is_logged() -> None:
    federation = new_federation(2, "runs", logger=True, evaluate_every=1, callbacks=[Silent(), Adding()])
    federation.fit(Logging(Net, CLASSES), data := new_data(2))
    weights = [client.num_train for client in data.clients]
    added = {"mine/rounds_left": [1, 0], "train/mine": [weights[1] / sum(weights)] * 2, "after/test_mine/mean": [2, 2]}
    for name, values in added.items():
        assert [float(row[name]) for row in read_csv("metrics.csv")] == pytest.approx(values)
        assert scalars(events(), name) == pytest.approx({1: values[0], 2: values[1]})
    assert [row["test/mine"] for row in read_csv("clients.csv")] == ["2.0", "2.0"]


class Noting(FederationCallback):
    """Writes down which hook was called in which round."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def on_fit_start(self, run: RunView) -> None:
        self.calls.append(("fit_start", run.round))

    def on_turn_end(self, run: RunView, update: ClientUpdate) -> None:
        self.calls.append((f"turn_end {update.client}", run.round))

    def on_round_end(self, run: RunView) -> None:
        assert run.history[-1]["round"] == run.round
        self.calls.append(("round_end", run.round))

    def on_fit_end(self, run: RunView) -> None:
        self.calls.append(("fit_end", run.round))

    def on_measure_end(self, run: RunView, metrics: Metrics) -> None:
        self.calls.append(("measure_end", run.round))

    def teardown(self, run: RunView) -> None:
        self.calls.append(("teardown", run.round))


def test_hooks_are_called_in_order() -> None:
    callback = Noting()
    federation = new_federation(2, "runs", callbacks=[callback])
    federation.fit(new_method("FedAvg"), new_data(2))
    federation.test(new_method("FedAvg"), new_data(2))
    rounds = [[("turn_end 0", round), ("turn_end 1", round), ("round_end", round)] for round in (1, 2)]
    assert callback.calls == [("fit_start", 0), *rounds[0], *rounds[1], ("fit_end", 2), ("teardown", 2), ("measure_end", 2)]


def test_teardown_comes_also_when_a_run_fails() -> None:
    callback = Noting()
    with pytest.raises(KeyboardInterrupt):
        fit(4, callbacks=[callback, Stop(3)])
    assert callback.calls[-1] == ("teardown", 3)
