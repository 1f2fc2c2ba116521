"""Tables on disk are whole at every moment, and a round adds its line and no more."""

import csv
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from often import mostly_slow
from tiny import Stop, new_data, new_federation, new_method, without_seconds

from lightning_fed.callbacks import MetricsTable
from lightning_fed.callbacks.table import append_row, write_table
from lightning_fed.federation.federation import Federation

TABLE = Path("metrics.csv")


class Written:
    """Notes what is written to tables, by whatever way: characters, where a number is one, and which way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.characters: list[int] = []
        self.ways: list[str] = []
        for owner, name in ((os, "write"), (Path, "write_text"), (Path, "write_bytes")):
            monkeypatch.setattr(owner, name, self._noted(getattr(owner, name), name))

    def _noted(self, function: Any, name: str) -> Any:
        def noted(target: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
            text = data if isinstance(data, str) else data.decode()
            self.characters.append(len(re.sub(r"[0-9]+", "0", text)))
            self.ways.append(name)
            return function(target, data, *args, **kwargs)

        return noted


def played(table: MetricsTable, rounds: int, measured: int | None = None) -> Iterator[int]:
    """Lets a table follow rounds of which one is measured."""
    run: Any = SimpleNamespace(folder=Path(), history=[], monitored=lambda kind: "nothing")
    table.on_fit_start(run)
    for round in range(1, rounds + 1):
        run.history.append({"round": float(round), "loss": 0.5 * round} | ({"accuracy": 0.25} if round == measured else {}))
        table.on_round_end(run)
        yield round


def test_what_a_round_writes_does_not_grow_with_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    written = Written(monkeypatch)
    for _ in played(MetricsTable(), 301):
        pass
    assert len(written.characters) == 301  # one write each
    assert written.characters[300] == written.characters[30] == written.characters[3]
    assert set(written.ways[1:]) == {"write"}
    assert len(TABLE.read_text().splitlines()) == 302


def test_the_table_is_whole_after_every_round() -> None:
    for round in played(MetricsTable(), 9, measured=5):
        with TABLE.open(newline="") as file:
            text = file.read()
        header, *rows = csv.reader(text.splitlines())
        assert text.count("\r\n") == round + 1
        assert text.endswith("\r\n")
        assert header == (["round", "loss"] if round < 5 else ["round", "loss", "accuracy"])
        assert [row[:2] for row in rows] == [[str(float(k)), str(0.5 * k)] for k in range(1, round + 1)]
        assert [row[2:] for row in rows] == [[] if round < 5 else ["0.25" if k == 5 else ""] for k in range(1, round + 1)]


def test_only_new_columns_have_the_table_written_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    written = Written(monkeypatch)
    for _ in played(MetricsTable(), 6, measured=4):
        pass
    assert written.ways == ["write_text", "write", "write", "write_text", "write", "write"]


def test_an_appended_row_is_as_if_written_with_the_others() -> None:
    rows = [{"a": 1, "b": "x,y"}, {"b": 'a "word"'}, {"a": 0.1 + 0.2}]
    write_table(Path("at once.csv"), rows)
    write_table(TABLE, rows[:1])
    for row in rows[1:]:
        append_row(TABLE, row, ["a", "b"])
    assert TABLE.read_bytes() == Path("at once.csv").read_bytes()


class DiskFullError(OSError):
    pass


@pytest.mark.parametrize("name", ["write_text", "replace"])
def test_a_table_that_cannot_be_written_is_as_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(TABLE, [{"a": 1}])

    def fail(path: Path, *args: Any, **kwargs: Any) -> None:
        if name == "write_text":
            with path.open("w") as file:
                file.write("half")
        raise DiskFullError

    with monkeypatch.context() as patch:
        patch.setattr(Path, name, fail)
        with pytest.raises(DiskFullError):
            write_table(TABLE, [{"a": 1}, {"a": 2}])
    assert TABLE.read_text().split() == ["a", "1"]
    write_table(TABLE, [{"a": 3}])
    assert TABLE.read_text().split() == ["a", "3"]


def fit(run_dir: str, rounds: int = 5, ckpt_path: str | None = None, **options: Any) -> Federation:
    """Rounds of which every third is measured, and the last."""
    federation = new_federation(rounds, run_dir, participation=0.5, evaluate_every=3, **options)
    federation.fit(new_method("FedAvg"), new_data(), ckpt_path)
    return federation


def read(run_dir: str) -> list[list[tuple[str, str]]]:
    """The rows with their columns in order, without what they took."""
    with Path(run_dir, "version_0/metrics.csv").open(newline="") as file:
        return [[(name, value) for name, value in row.items() if not name.startswith("seconds/")] for row in csv.DictReader(file)]


@pytest.mark.parametrize("stopped", mostly_slow([2, 3, 4, 5], often={3}))
def test_a_continued_run_has_the_table_of_an_uninterrupted_one(stopped: int) -> None:
    whole = fit("whole")
    with pytest.raises(KeyboardInterrupt):
        fit("stopped", callbacks=[Stop(stopped)])
    assert len(read("stopped")) == stopped
    fit("stopped", ckpt_path="last")
    assert read("stopped") == read("whole")
    found = [{name: float(value) for name, value in row if value} for row in read("stopped")]
    assert found == without_seconds(whole.run.history)


def test_a_continued_run_begins_with_the_table_of_its_checkpoint() -> None:
    """What a killed run had reported of rounds that are now played again is not there twice, whenever one looks."""
    with pytest.raises(KeyboardInterrupt):
        fit("runs", callbacks=[Stop(4)])
    with pytest.raises(KeyboardInterrupt):
        fit("runs", ckpt_path="last", callbacks=[Stop(4)])
    assert [dict(row)["round"] for row in read("runs")] == ["1.0", "2.0", "3.0", "4.0"]


def test_a_federation_that_fits_twice_begins_a_table_each_time() -> None:
    federation = fit("runs", rounds=2)
    federation.fit(new_method("FedAvg"), new_data())
    tables = [Path(f"runs/version_{version}/metrics.csv").read_text().splitlines() for version in (0, 1)]
    assert [len(table) for table in tables] == [3, 3]
    assert tables[0][0] == tables[1][0]
