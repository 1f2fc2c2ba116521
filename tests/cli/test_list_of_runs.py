"""The verb ``runs``: what it says of runs, whole or not, without believing them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import new_data, new_federation, new_method
from tiny_commands import refused
from written_runs import write_run

from lightning_fed.__main__ import main
from lightning_fed.cli.runs import PlayedRun, run_folders
from lightning_fed.experiments.report import load_runs

HOSTILE = "!!python/object/apply:os.system [touch believed]"


def listed(capsys: pytest.CaptureFixture[str], *args: str) -> list[list[str]]:
    capsys.readouterr()
    main(["runs", *args])
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_runs_are_listed_with_what_they_came_to(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {}
    for method in ("FedAvg", "PFedLoRA"):
        federation = new_federation(2, "runs")
        rows[method] = federation.fit(new_method(method), new_data(2))[-1]
    head, *lines, total = listed(capsys)
    assert head == ["method", "seed", "round", "monitor", "size", "folder"]
    assert [(line[0], line[1], line[2], line[-1]) for line in lines] == [
        *(("FedAvg", "0", "2/2", "runs/version_0"), ("PFedLoRA", "0", "2/2", "runs/version_1")),
    ]
    for line in lines:
        assert line[3:5] == ["accuracy", f"{rows[line[0]]['after/test_accuracy/mean']:.4f}"]
    files = [path for path in Path("runs/version_1").rglob("*") if path.is_file()]
    assert PlayedRun(Path("runs/version_1")).size == sum(path.stat().st_size for path in files)
    assert total[:2] == ["2", "runs,"]


def test_it_waits_for_nothing_and_believes_nothing() -> None:
    """What a file names is neither imported nor run, and what it says moves no cursor."""
    for number, (name, text) in enumerate(
        [
            ("config.yaml", HOSTILE),
            ("config.yaml", f"model: {HOSTILE}"),
            ("config.yaml", "model: {class_path: os.Evil}\nseed_everything: 3\nfederation: {rounds: 9}"),
            ("run.json", '{"method": "\\u001b[2Jgone", "seed": [], "monitor": 3}'),
            ("run.json", "[" * 100000),
            ("metrics.csv", "round,after/test_accuracy/mean\nmany,much\n"),
            ("metrics.csv", "\0\xff"),
        ]
    ):
        folder = Path(f"runs/version_{number}")
        folder.mkdir(parents=True)
        (folder / name).write_text(text)
    code = "import sys; from lightning_fed.__main__ import main; main(['runs']); assert not {'torch', 'pandas'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == ["?", "?", "Evil", "?[2Jgone", "?", "?", "?"]
    assert lines[3].split()[1:3] == ["3", "0/9"]
    assert not Path("believed").exists()


def test_a_run_of_which_only_the_tables_stayed(capsys: pytest.CaptureFixture[str]) -> None:
    new_federation(1, "runs", keep="none").fit(new_method("FedAvg"), new_data(2))
    before = json.loads(Path("runs/version_0/run.json").read_text())
    assert listed(capsys, "runs")[1][:3] == ["FedAvg", "0", "1/1"]
    assert json.loads(Path("runs/version_0/run.json").read_text()) == before


def test_a_checkpoint_that_disappears_while_it_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run deletes it, once its folder is listed."""
    run = write_run(Path("runs/version_0"), [0.5])
    scandir = os.scandir

    class Late:
        """The entries of a folder; by the time that they are read, one has gone."""

        def __init__(self, path: str | Path) -> None:
            self.entries = iter(list(scandir(path)))
            if Path(path).name == "checkpoints":
                Path(path, "round_1").rmdir()

        def __enter__(self) -> Iterator[Any]:
            return self.entries

        def __next__(self) -> Any:
            return next(self.entries)

        def __iter__(self) -> Iterator[Any]:
            return self.entries

        def __exit__(self, *error: object) -> None: ...

    (checkpoint := run / "checkpoints" / "round_1").mkdir(parents=True)
    monkeypatch.setattr(os, "scandir", Late)
    assert run_folders([Path("runs")]) == [run]
    checkpoint.mkdir()
    assert len(load_runs("runs")) == 1
    checkpoint.mkdir()
    assert PlayedRun(run).size > 0
    assert not checkpoint.exists()


def test_where_there_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "runs", "nowhere") == "lightning-fed: error: No run below nowhere: give folders that have some.\n"
