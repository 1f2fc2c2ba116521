"""TensorBoard over a sweep."""

import csv
import json
import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from written_runs import FACTS

from lightning_fed.errors import FederationError
from lightning_fed.experiments.sweep.board import BOARD, LOWER, MEAN, UPPER, write_board
from lightning_fed.experiments.sweep.folder import CellFolder
from lightning_fed.experiments.sweep.plan import Cell

SWEEP = Path("sweep")


def run(method: str, seed: int, measured: dict[int, float], setting: str = "") -> tuple[Cell, CellFolder]:
    """A run of three rounds; what was not measured is an empty field."""
    cell = Cell(method, setting, seed, {})
    place = CellFolder(SWEEP / cell.name)
    folder = place.path / "version_0"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(FACTS | {"monitor": "score"}))
    with (folder / "metrics.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerows([["round", "score"], *([float(step), measured.get(step, "")] for step in (1, 2, 3))])
    return cell, place


def curves(folder: Path) -> dict[str, dict[int, float]]:
    events = EventAccumulator(str(folder)).Reload()
    return {tag: {point.step: point.value for point in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_a_line_and_a_band_for_each_method() -> None:
    write_board(SWEEP, [run("A", 0, {1: 1, 3: 2}), run("A", 1, {1: 3, 2: 9, 3: 6}), run("B, twice", 0, {3: 7}, "alpha=0.1")])
    found = curves(SWEEP / BOARD / "A")
    assert found[MEAN] == {1: 2, 3: 4}  # round 2 was not measured by both
    assert found[LOWER] == pytest.approx({1: 2 - 2**0.5, 3: 4 - 8**0.5})
    assert found[UPPER] == pytest.approx({1: 2 + 2**0.5, 3: 4 + 8**0.5})
    [other] = (SWEEP / BOARD).glob("alpha*/B*")
    assert curves(other) == {tag: {3: 7} for tag in (MEAN, LOWER, UPPER)}


def test_rounds_without_a_number_are_left_out() -> None:
    write_board(SWEEP, [run("A", 0, {1: math.nan, 2: 1, 3: 2}), run("A", 1, {1: 3, 2: math.inf, 3: 6})])
    assert curves(SWEEP / BOARD / "A")[MEAN] == {3: 4}


def test_what_was_written_before_is_replaced() -> None:
    first, second = run("A", 0, {1: 1, 3: 2}), run("A", 1, {1: 3, 3: 6})
    write_board(SWEEP, [first])
    write_board(SWEEP, [first, second])
    [events] = (SWEEP / BOARD).rglob("events.*")
    assert curves(events.parent)[MEAN] == {1: 2, 3: 4}


@pytest.mark.parametrize(("name", "content"), [("run.json", "{}"), ("metrics.csv", "round,score\n1,high\n")])
def test_damaged_files_are_named(name: str, content: str) -> None:
    cell, place = run("A", 0, {1: 1})
    (place.path / "version_0" / name).write_text(content)
    with pytest.raises(FederationError, match=rf"{name} .* Remove sweep/A/seed_0 to run it again\."):
        write_board(SWEEP, [(cell, place)])
