"""The verb ``sweep``: what it checks before the first run, and real runs."""

import csv
import errno
import json
import logging
import os
import re
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Thread

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
import yaml
from pandas.testing import assert_frame_equal
from tiny import TINY_BERT, TINY_VIT
from tiny_commands import refused
from tiny_files import write_idx
from written_runs import FACTS

from lightning_fed.__main__ import main
from lightning_fed.cli import dry_run
from lightning_fed.cli.dry_run import check_start, errors_of, read
from lightning_fed.cli.sweep import gets_more_rounds, unless_changed
from lightning_fed.data import IID, Digits, InMemory
from lightning_fed.errors import FederationError
from lightning_fed.experiments.report import load_clients, load_runs
from lightning_fed.experiments.sweep import processes
from lightning_fed.experiments.sweep.folder import CellFolder, CellRecord
from lightning_fed.experiments.sweep.plan import Cell, arguments
from lightning_fed.experiments.sweep.settings import Settings, flat, plain, read_json, read_yaml
from lightning_fed.experiments.sweep.sweep_file import read_sweep
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import FedAvg
from lightning_fed.models import SoftmaxMLP, TransformerClassifier, VisionTransformer
from lightning_fed.system.signals import Preempted, Terminated

ROOT = Path(__file__).parents[2]
SWEEPS = sorted((ROOT / "configs").rglob("*.sweep.yaml"))
assert SWEEPS

BASE = """
data:
  class_path: Digits
  init_args: {num_clients: 3, batch_size: 256, partition: {class_path: DirichletPerClass, init_args: {alpha: 1.0}}}
model: {class_path: FedAvg, init_args: {backbone: CNN5}}
federation: {rounds: 1, logger: false}
trainer: {accelerator: cpu}
"""
SWEEP = {
    "base": "base.yaml",
    "folder": "compared",
    "seeds": [3],
    "methods": {"FedAvg": {}, "local only": {"model": "Standalone"}},
}


@pytest.fixture(autouse=True)
def base() -> None:
    Path("base.yaml").write_text(BASE)


@pytest.fixture
def no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run would leave a file."""
    monkeypatch.setattr(processes, "PROGRAM", (sys.executable, "-S", "-c", "open('played', 'w')"))


def sweep(*args: str, **changes: object) -> None:
    Path("my.sweep.yaml").write_text(yaml.safe_dump(SWEEP | changes, sort_keys=False))
    main(["sweep", "--config", "my.sweep.yaml", *args])


@pytest.mark.slow
def test_runs_in_their_processes_become_a_table(capfd: pytest.CaptureFixture[str]) -> None:
    sweep("--workers", "2")
    said = capfd.readouterr().out
    assert "2 of 2 runs are finished." in said
    assert "lightning-fed report compared --output report" in said
    with Path("compared/cells.csv").open(newline="") as file:
        cells = list(csv.DictReader(file))
    assert [(row["method"], row["status"]) for row in cells] == [("FedAvg", "finished"), ("local only", "finished")]
    assert cells[1]["command"] == (
        "OMP_NUM_THREADS=1 lightning-fed fit --config base.yaml --model=Standalone --seed_everything=3 "
        "--federation.run_dir=compared/local_only/seed_3"
    )
    assert all("torch " in row["versions"] and float(row["seconds"]) > 0 for row in cells)
    runs = load_runs("compared")
    assert runs[["method", "model", "seed", "rounds"]].to_numpy().tolist() == [
        *(["FedAvg", "FedAvg", 3, 1], ["local only", "Standalone", 3, 1]),
    ]
    log = Path("compared/FedAvg/seed_3/log.txt").read_text()
    assert log.startswith(
        "Starting compared/FedAvg/seed_3/version_0: FedAvg with CNN5 on Digits, 3 clients, 1 round, InProcess, 1 thread."
    )

    # One seed, one partition.
    [one, other] = [group for _, group in load_clients("compared").groupby("method")]
    assert one[["train", "test"]].to_numpy().tolist() == other[["train", "test"]].to_numpy().tolist()
    manifests = [json.loads(path.read_text())["body"] for path in Path("compared").rglob("manifest.json")]
    data = {json.loads(body)["identity"]["data"] for body in manifests}
    assert (len(manifests), len(data)) == (2, 1)

    # One partition's seed, one partition, whatever the training's.
    sweep(folder="crossed", methods={"FedAvg": {}}, seeds={"partition": [3, 7], "training": [3, 4]})
    of_partition: dict[int, set[str]] = {}
    for path in Path("crossed").rglob("manifest.json"):
        facts = json.loads((path.parents[2] / "run.json").read_text())
        body = json.loads(json.loads(path.read_text())["body"])
        of_partition.setdefault(facts["partition_seed"], set()).add(body["identity"]["data"])
    assert {seed: len(found) for seed, found in of_partition.items()} == {3: 1, 7: 1}
    assert of_partition[3] == data != of_partition[7]
    assert len({*load_runs("crossed")["last"]}) == 4

    # What is finished is not played again; another configuration is not taken for it.
    before = Path("compared/FedAvg/seed_3/cell.json").read_text()
    sweep()
    assert Path("compared/FedAvg/seed_3/cell.json").read_text() == before
    with pytest.raises(SystemExit):
        sweep(methods={"FedAvg": {"federation.participation": 0.5}})
    assert "was run with federation.participation = 1.0, the sweep has 0.5" in capfd.readouterr().err


@pytest.mark.usefixtures("no_run")
def test_every_run_that_was_played_otherwise_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    for seed in (3, 4):
        run = Path(f"compared/FedAvg/seed_{seed}/version_0")
        run.mkdir(parents=True)
        (run / "metrics.csv").write_text("round\n1\n")
        played = read("FedAvg", ["fit", "--config=base.yaml", f"--seed_everything={seed}", "--federation.participation=0.5"])
        (run / "config.yaml").write_text(yaml.safe_dump(played))
    with pytest.raises(SystemExit) as error:
        sweep("--isolate", seeds=[3, 4, 5])
    said = [line for line in capfd.readouterr().err.splitlines() if "was run with" in line]
    assert (error.value.code, len(said), Path("played").exists()) == (2, 2, False)
    for seed, line in zip((3, 4), said, strict=True):
        assert line.startswith(f"lightning-fed: error: FedAvg/seed_{seed}: It was run with federation.participation = 0.5")


@pytest.mark.usefixtures("no_run")
def test_a_finished_run_of_other_data_is_refused_before_more_are_run(capsys: pytest.CaptureFixture[str]) -> None:
    cell = CellFolder(Path("compared/FedAvg/seed_3"))
    run = cell.path / "version_0"
    run.mkdir(parents=True)
    cell.record(CellRecord("finished"))
    (run / "metrics.csv").write_text("round\n1\n")
    (run / "config.yaml").write_text(yaml.safe_dump(read("FedAvg", ["fit", "--config=base.yaml", "--seed_everything=3"])))
    (run / "run.json").write_text(json.dumps(FACTS | {"data": "0123abcd"}))
    check = partial(sweep, "--dry_run", methods={"FedAvg": {}}, seeds=[4, 3])
    said = refused(capsys, start=check)
    [now] = re.findall(r"FedAvg/seed_3: It was run with other data \(checksum 0123abcd, now (\w+)\): give the sweep", said)
    (run / "run.json").write_text(json.dumps(FACTS | {"data": now}))
    check()


@pytest.mark.slow
def test_more_rounds_continue_finished_runs_and_end_as_if_they_had_been_asked_for_at_first() -> None:
    Path("base.yaml").write_text(BASE.replace("rounds: 1", "rounds: 1, evaluate_every: 1"))
    longer = {"methods": {name: of | {"federation.rounds": 3} for name, of in SWEEP["methods"].items()}}
    sweep()
    stopped = CellFolder(Path("compared/local_only/seed_3"))
    stopped.reopen(3)
    first = [pd.read_csv(path) for path in sorted(Path("compared").rglob("metrics.csv"))]
    sweep(**longer)
    last = [pd.read_csv(path) for path in sorted(Path("compared").rglob("metrics.csv"))]
    assert [len(run) for run in last] == [3, 3]
    for one, other in zip(first, last, strict=True):
        assert_frame_equal(one, other[one.columns][:1], check_exact=True)  # its seconds, too: it was not repeated
    sweep(**longer, folder="at_once")
    for cell in ("FedAvg/seed_3", "local_only/seed_3"):
        one, other = (pd.read_csv(Path(folder, cell, "version_0/metrics.csv")) for folder in ("compared", "at_once"))
        compared = [name for name in one if "seconds" not in name]
        assert_frame_equal(one[compared], other[compared], check_exact=True)
    before = stopped.result
    sweep(**longer)
    assert stopped.result == before


@pytest.fixture
def finished() -> CellFolder:
    """The cell of a run of two rounds, measured after each."""
    cell = CellFolder(Path("compared/FedAvg/seed_3"))
    run = cell.path / "version_0"
    (run / "checkpoints/round_000002").mkdir(parents=True)
    cell.record(CellRecord("finished"))
    (run / "metrics.csv").write_text("round\n1\n2\n")
    (run / "run.json").write_text(json.dumps(FACTS | {"evaluate_every": 1}))
    played = read("FedAvg", ["fit", "--config=base.yaml", "--seed_everything=3", "--federation.rounds=2"])
    (run / "config.yaml").write_text(yaml.safe_dump(played))
    return cell


@pytest.mark.usefixtures("no_run")
def test_a_finished_run_whose_files_are_not_whole_is_refused(capsys: pytest.CaptureFixture[str], finished: CellFolder) -> None:
    """A report leaves out such a run, and tuning would choose among the others. A removed one is run again."""
    check = partial(sweep, "--dry_run", methods={"FedAvg": {"federation.rounds": 2}})
    check()
    run = finished.path / "version_0"
    (run / "run.json").write_text(json.dumps(FACTS | {"evaluate_every": 1, "rounds": 2}))
    check()
    (run / "metrics.csv").write_text("round\n1\n")
    said = refused(capsys, start=check)
    assert said.endswith("has 1 rounds of a run that finished 2: it was cut. Remove compared/FedAvg/seed_3 to run it again.\n")
    (run / "metrics.csv").write_text("")
    assert "has 0 rounds of a run that finished 2" in refused(capsys, start=check)
    (run / "run.json").unlink()
    assert "run.json does not say what a run writes" in refused(capsys, start=check)
    (run / "config.yaml").unlink()
    assert "has no config.yaml, which its run wrote. Remove compared/FedAvg/seed_3" in refused(capsys, start=check)
    (run / "metrics.csv").unlink()
    capsys.readouterr()
    check()
    assert "FedAvg/seed_3: waiting" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.json", "{}", "does not say what a run writes there"),
        ("run.json", json.dumps(FACTS | {"rounds": "2"}), "does not say what a run writes there"),
        ("config.yaml", "seed_everything: 3\n", "has federation.rounds = 'None', expected int"),
    ],
)
@pytest.mark.usefixtures("no_run")
def test_a_finished_run_whose_files_are_damaged_is_refused(
    name: str, content: str, message: str, capsys: pytest.CaptureFixture[str], finished: CellFolder
) -> None:
    (finished.path / "version_0" / name).write_text(content)
    said = refused(capsys, start=partial(sweep, "--dry_run", methods={"FedAvg": {"federation.rounds": 2}}))
    assert message in said
    assert said.endswith("Remove compared/FedAvg/seed_3 to run it again.\n")


@pytest.mark.usefixtures("no_run")
def test_one_cell_is_refused_if_others_were_run_with_another_base(capsys: pytest.CaptureFixture[str], finished: CellFolder) -> None:
    methods = {"FedAvg": {"federation.rounds": 2}, "Standalone": {"model": "Standalone", "federation.rounds": 2}}
    Path("base.yaml").write_text(BASE.replace("logger: false", "logger: false, participation: 0.5"))
    said = refused(capsys, start=partial(sweep, "--cell", "1", methods=methods))
    assert "FedAvg/seed_3: It was run with federation.participation = 1.0, the sweep has 0.5" in said
    assert not Path("played").exists()


def test_no_run_starts_from_a_base_that_has_changed_since_it_was_checked() -> None:
    started = list[Sequence[str]]()
    start = unless_changed(Path("base.yaml"), lambda args, *_: started.append(args))  # type: ignore[arg-type,return-value]
    Path("base.yaml").write_text(f"# changed\n{BASE}")
    start(["fit"], Path("log.txt"), 0, {})
    Path("base.yaml").write_text(BASE.replace("rounds: 1", "rounds: 2"))
    with pytest.raises(FederationError, match=r"base\.yaml has changed since the runs were checked: give the same command again"):
        start(["fit"], Path("log.txt"), 0, {})
    Path("base.yaml").unlink()
    with pytest.raises(FederationError, match=r"There is no file base\.yaml"):
        start(["fit"], Path("log.txt"), 0, {})
    assert started == [["fit"]]


@pytest.mark.usefixtures("no_run")
def test_more_rounds_continue_a_finished_run(capsys: pytest.CaptureFixture[str], finished: CellFolder) -> None:
    sweep("--dry_run", methods={"FedAvg": {"federation.rounds": 3}})
    assert "FedAvg/seed_3: to continue after round 2\n" in capsys.readouterr().out
    assert finished.status == "finished"
    finished.reopen(2)  # another process has played them
    assert finished.status == "finished"
    finished.reopen(3)
    assert finished.result == CellRecord("interrupted", rounds=3)
    less = partial(sweep, "--dry_run", methods={"FedAvg": {}})
    assert "federation.rounds = 2, the sweep has 1" in refused(capsys, start=less)


@pytest.mark.parametrize(
    ("made_with", "why"),
    [
        ({"checkpoints": "none"}, "has no checkpoint"),
        ({"evaluate_every": 3}, "measured after the last, as a longer run would not be"),
        ({"evaluate_every": 0}, "measured after the last, as a longer run would not be"),
        ({"model.fine_tuning.when": "last"}, "measured after the last, as a longer run would not be"),
        ({"federation.privacy.epsilon": 8.0}, "the noise for these"),
    ],
    ids=str,
)
def test_a_run_is_not_continued_that_would_end_otherwise_than_a_longer_one(
    finished: CellFolder, made_with: dict[str, object], why: str
) -> None:
    run = finished.path / "version_0"
    if "checkpoints" in made_with:
        (run / "checkpoints/round_000002").rmdir()
    if "evaluate_every" in made_with:
        (run / "run.json").write_text(json.dumps(FACTS | made_with))
    settings = flat(read_yaml(run / "config.yaml")) | {key: value for key, value in made_with.items() if "." in key}
    (run / "config.yaml").write_text(json.dumps(settings))
    with pytest.raises(FederationError, match=rf"federation.rounds = 2 and {why}, the sweep has 3"):
        gets_more_rounds(finished, run, settings | {"federation.rounds": 3})


WRONG: dict[str, tuple[dict[str, object], str]] = {
    "accelerator": ({"trainer.accelerator": "gpus"}, "trainer.accelerator is 'gpus', with which"),
    "backbones": ({"model.init_args.backbone": ["CNN1", "CNN5"]}, "FedAvg got 2 different backbones"),
    "batches": ({"trainer.limit_train_batches": -1}, "trainer.limit_train_batches"),
    "clients": ({"data.init_args.num_clients": 9999}, "9999 clients cannot share 1797 examples"),
    "devices": ({"trainer.precision": "64-true", "trainer.devices": 0}, "trainer.devices is '0', with which"),
    "epochs": ({"trainer.max_epochs": 3}, "trainer.max_epochs is set"),
    "name": ({"model": "FedProxx"}, "model: there is no 'FedProxx' (did you mean FedProx?)"),
    "option": ({"federation.round": 1}, "unrecognized arguments: --federation.round=1"),
}
"""Overrides that cannot be, and what is said."""


@pytest.mark.usefixtures("no_run")
def test_all_that_is_wrong_is_told_in_a_line_each_before_the_first_run(capsys: pytest.CaptureFixture[str]) -> None:
    methods = {name: overrides for name, (overrides, _) in WRONG.items()}
    with pytest.raises(SystemExit) as error:
        sweep("--isolate", methods={"right": {}, **methods, "again": methods["accelerator"]}, seeds=[0, 1])
    lines = capsys.readouterr().err.splitlines()
    assert error.value.code == 2
    for line, (name, (_, message)) in zip(lines, WRONG.items(), strict=True):
        more = " and 1 more" if name == "accelerator" else ""
        assert line.startswith(f"lightning-fed: error: {name}/seed_0{more}: {message}")
    assert not Path("played").exists()
    assert not Path("compared").exists()


@pytest.mark.usefixtures("no_run")
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("data.init_args.val_share", 0, "of which no client has any: set the data's val_share"),
        ("trainer.limit_val_batches", 0, "of which trainer.limit_val_batches = 0 leaves none"),
    ],
)
def test_tuning_without_validation_data_is_refused(
    option: str, value: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tune = {"FedAvg": {"model.init_args.epochs": [1, 2]}}
    said = refused(capsys, start=partial(sweep, "--dry_run", tune=tune, methods={"FedAvg": {option: value}}))
    assert f"FedAvg/epochs=1/seed_3 and 1 more: tune chooses on validation data, {message}" in said


@pytest.mark.usefixtures("no_run")
def test_a_sweep_without_its_base_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, start=partial(sweep, base="nowhere.yaml"))
    assert "my.sweep.yaml: there is no base nowhere.yaml" in said


@pytest.mark.usefixtures("no_run")
def test_a_dry_run_prints_commands_and_plays_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tried = list[str]()
    monkeypatch.setattr(dry_run, "check_start", lambda name, args, **_: tried.append(name) or check_start(name, args))  # type: ignore[func-returns-value]
    sweep("--dry_run", grid={"data.init_args.partition.init_args.alpha": [0.1, 5]}, seeds=[3, 4, 5])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "# 0 alpha=0.1/FedAvg/seed_3: waiting"
    assert re.fullmatch(r"OMP_NUM_THREADS=1 lightning-fed fit --config base.yaml .*alpha=0\.1 .*run_dir=\S+", lines[1])
    assert len(lines) == 2 * 12
    assert [name.split("/")[-1] for name in tried] == ["seed_3"] * 4  # what differs by its seed alone is read once
    sweep("--dry_run", seeds={"partition": [3, 4], "training": [0, 1]})
    assert capsys.readouterr().out.count(" --seed_everything=1 --data.init_args.partition_seed=4 ") == 2
    assert len(tried) == 4 + 2
    assert not Path("played").exists()


@pytest.mark.parametrize("end", [Preempted, Terminated])
def test_a_signal_while_runs_are_checked_is_no_mistake_in_them(end: type[SystemExit], monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> None:
        raise end

    monkeypatch.setattr(Federation, "dry_run", stopped)
    with pytest.raises(end):
        sweep("--dry_run")


def test_data_that_are_configured_alike_are_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = []
    monkeypatch.setattr(Digits, "load", lambda data, load=Digits.load: loads.append(data) or load(data))
    sweep("--dry_run", grid={"data.init_args.partition.init_args.alpha": [0.1, 5]}, seeds=[3])
    assert len(loads) == 2


def test_a_run_that_fails_is_named_and_the_exit_code_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processes, "PROGRAM", (sys.executable, "-S", "-c", "raise SystemExit('lightning-fed: error: no luck')"))
    with pytest.raises(SystemExit) as error:
        sweep("--isolate")
    assert error.value.code == 1
    said = capsys.readouterr()
    assert "0 of 2 runs are finished." in said.out
    assert "FedAvg/seed_3 failed: no luck; its whole output is in compared/FedAvg/seed_3/log.txt." in said.err
    assert "Try the rest again with: lightning-fed sweep --config my.sweep.yaml --isolate" in said.err


def files(folder: str) -> dict[str, object]:
    """What all runs have written, but for seconds and what is told from them."""
    found: dict[str, object] = {}
    for path in Path(folder).rglob("*"):
        name = str(path.relative_to(folder))
        if path.name == "metrics.csv":
            with path.open(newline="") as file:
                found[name] = [{k: v for k, v in row.items() if not k.startswith("seconds/")} for row in csv.DictReader(file)]
        elif path.name == "manifest.json":
            body = json.loads(json.loads(path.read_text())["body"])
            found[name] = {key: value for key, value in body.items() if key != "rows"}  # which has seconds
        elif path.name == "log.txt":
            found[name] = re.sub(r"\d+:\d\d:\d\d|\d+\.\d+ s|\d+\.\d (?= )|seconds .*", "", path.read_text()).replace(folder, "")
        elif path.is_file() and path.name not in ("cell.json", "cells.csv", "sweep.yaml") and "tfevents" not in path.name:
            found[name] = path.read_bytes().replace(folder.encode(), b"")
    return found


@pytest.mark.slow
def test_forks_find_what_processes_of_their_own_find() -> None:
    given = {"seeds": [3, 4], "methods": {"FedAvg": {}, "adapted": {"model": "FedAvgFT"}}}
    sweep("--workers", "2", folder="forked", **given)
    sweep("--workers", "2", "--isolate", folder="alone_", **given)
    forked, alone = files("forked"), files("alone_")
    assert len(forked) > 4 * 5
    assert forked.keys() == alone.keys()
    assert {name for name in forked if forked[name] != alone[name]} == set()


TUNED = """
import json, sys
from pathlib import Path
given = dict(argument[2:].split("=", 1) for argument in sys.argv[1:] if "=" in argument)
epochs = int(given.get("model.init_args.epochs", 0))
if epochs > 5:
    sys.exit("lightning-fed: error: it diverged")
run = Path(given["federation.run_dir"], "version_0")
run.mkdir(parents=True)
(run / "metrics.csv").write_text(f"round,after/val_accuracy/mean\\n1,{0.9 if epochs == 2 else 0.5}\\n")
phases = {"training": [{"phase": "local", "epochs": epochs}], "fine_tuning": []}
(run / "run.json").write_text(json.dumps({"monitor": "after/test_accuracy/mean", "higher_is_better": True, **phases}))
known = {"seed_everything": int(given["seed_everything"]), "data": {"partition_seed": int(given["data.init_args.partition_seed"])}}
(run / "config.yaml").write_text(json.dumps({"federation": {"rounds": 1}, "model": {"class_path": "FedAvg"}, **known}))
"""


TUNING: dict[str, object] = {
    "tune": {"FedAvg": {"model.init_args.epochs": [1, 2, 9]}},
    "seeds": {"partition": [5, 6], "training": [0]},
}


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small program stands for a run, and nothing is checked before."""
    for check in ("check_start", "read"):
        monkeypatch.setattr(dry_run, check, lambda name, args, **_: {"federation.rounds": 1, "model.class_path": "FedAvg"})
    Path("run.py").write_text(TUNED)
    monkeypatch.setattr(processes, "PROGRAM", (sys.executable, "-S", str(Path("run.py").absolute())))


@pytest.mark.usefixtures("tuned")
def test_a_run_is_played_by_its_number(capsys: pytest.CaptureFixture[str]) -> None:
    def status() -> dict[str, str]:
        with Path("compared/cells.csv").open(newline="") as file:
            return {row["folder"].removeprefix("compared/"): row["status"] for row in csv.DictReader(file)}

    played = partial(sweep, **TUNING)
    played("--dry_run")
    assert re.findall("^# (.*):", capsys.readouterr().out, re.MULTILINE) == [
        *(f"{number} FedAvg/epochs={value}/partition_5_seed_0" for number, value in enumerate((1, 2, 9))),
        *("4 local_only/partition_5_seed_0", "6 local_only/partition_6_seed_0"),
    ]
    for number, said in {
        5: "Run 5 is one of FedAvg with its best value, which is not known before",
        7: "There is no run 7",
    }.items():
        assert said in refused(capsys, start=partial(played, "--cell", str(number)))
    assert not Path("compared").exists()
    played("--cell", "1")
    assert "FedAvg/epochs=2/partition_5_seed_0: finished" in capsys.readouterr().out
    assert [state for state in status().values() if state != "waiting"] == ["finished"]
    played("--cell", "0")
    with pytest.raises(SystemExit) as error:
        played("--cell", "2")
    assert error.value.code == 1
    assert "Try the rest again with: lightning-fed sweep --config my.sweep.yaml --cell 2" in capsys.readouterr().err
    played("--cell", "3")
    assert "FedAvg/epochs=2/partition_5_seed_0: finished before" in capsys.readouterr().out
    played("--cell", "5")
    capsys.readouterr()
    played("--dry_run")  # the best trial is one line, and is also the run with number 3
    assert re.findall("^# (.*):", capsys.readouterr().out, re.MULTILINE) == [
        *(f"{number} FedAvg/epochs={value}/partition_5_seed_0" for number, value in enumerate((1, 2, 9))),
        *("4 local_only/partition_5_seed_0", "5 FedAvg/epochs=2/partition_6_seed_0", "6 local_only/partition_6_seed_0"),
    ]
    assert status() == {
        **{f"FedAvg/epochs={value}/partition_5_seed_0": "failed" if value == 9 else "finished" for value in (1, 2, 9)},
        **{"local_only/partition_5_seed_0": "waiting", "FedAvg/epochs=2/partition_6_seed_0": "finished"},
        "local_only/partition_6_seed_0": "waiting",
    }


@pytest.mark.usefixtures("tuned")
def test_a_value_that_was_chosen_after_fewer_rounds_is_not_yet_the_best(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tune = TUNING | {"tune": {"FedAvg": {"model.init_args.epochs": [1, 2]}}}
    sweep("--isolate", **tune)
    for run in Path("compared").rglob("version_0"):
        (run / "checkpoints/round_000001").mkdir(parents=True)
        (run / "run.json").write_text(json.dumps(read_json(run / "run.json") | {"evaluate_every": 1}))
    for check in ("check_start", "read"):
        monkeypatch.setattr(dry_run, check, lambda name, args, **_: {"federation.rounds": 2, "model.class_path": "FedAvg"})
    assert "Run 4 is one of FedAvg with its best value, which is not known" in refused(
        capsys, start=partial(sweep, "--cell", "4", **tune)
    )
    sweep("--dry_run", **tune)
    said = capsys.readouterr().out
    assert said.count("to continue after round 1") == 4
    assert "# 1 more of FedAvg, with the best of 2 values" in said


@pytest.mark.usefixtures("tuned")
def test_all_seeds_are_played_with_the_value_that_was_best(capsys: pytest.CaptureFixture[str]) -> None:
    changes = TUNING
    sweep("--dry_run", **changes)
    assert "# 1 more of FedAvg, with the best of 3 values" in capsys.readouterr().out
    assert not Path("compared").exists()
    for _ in range(2):
        sweep("--isolate", **changes)
        assert "4 of 4 runs are finished." in capsys.readouterr().out
        with Path("compared/cells.csv").open(newline="") as file:
            cells = {(row["method"], row["value"], row["partition"]): row["status"] for row in csv.DictReader(file)}
        of_fedavg = [("epochs=1", "5", "finished"), ("epochs=2", "5", "finished"), ("epochs=9", "5", "failed")]
        assert cells == {
            **{("FedAvg", value, partition): status for value, partition, status in (*of_fedavg, ("epochs=2", "6", "finished"))},
            **{("local only", "", partition): "finished" for partition in ("5", "6")},
        }
    log = Path("compared/FedAvg/epochs=9/partition_5_seed_0/log.txt").read_text()
    assert log.count("diverged") == 2  # tried again
    with pytest.raises(SystemExit) as error:
        sweep("--isolate", folder="other", **changes | {"tune": {"FedAvg": {"model.init_args.epochs": [9, 10]}}})
    said = capsys.readouterr()
    assert error.value.code == 1
    assert "FedAvg/epochs=9/partition_5_seed_0 failed: it diverged" in said.err
    assert "2 of 4 runs are finished." in said.out  # the other method was played


@pytest.mark.usefixtures("tuned")
def test_values_without_a_number_on_validation_data_are_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.py").write_text(TUNED.replace("0.9 if epochs == 2 else 0.5", "'nan'"))
    tune = {"tune": {"FedAvg": {"model.init_args.epochs": [1]}}}
    said = refused(capsys, start=partial(sweep, "--isolate", **TUNING | tune))
    assert "FedAvg/epochs=1/partition_5_seed_0 came to no number on validation data, so that no value was chosen" in said


@pytest.mark.usefixtures("tuned")
def test_curves_that_cannot_be_drawn_stop_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    Path("compared").mkdir()
    Path("compared/curves").touch()
    sweep("--isolate", **TUNING)
    said = capsys.readouterr().out
    assert "4 of 4 runs are finished." in said
    assert said.count("compared/cells.csv and curves are not up to date: ") == 1


@pytest.mark.usefixtures("tuned")
def test_a_disk_without_room_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    Path("my.sweep.yaml").write_bytes(yaml.safe_dump(SWEEP | TUNING, sort_keys=False).encode())
    said = refused(capsys, "sweep", "--config", "my.sweep.yaml", "--isolate")
    assert "compared/sweep.yaml: No space left on device. Runs continue" in said
    assert not [path for path in Path("compared").rglob("*") if path.is_file()]


@pytest.mark.usefixtures("tuned")
def test_a_value_that_another_sweep_tries_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    with ExitStack() as held:
        held.enter_context(CellFolder(Path("compared/FedAvg/epochs=2/partition_5_seed_0")).locked())

        def leave() -> None:
            while not Path("compared/FedAvg/epochs=9/partition_5_seed_0/log.txt").exists():
                time.sleep(0.01)
            content = yaml.safe_load(Path("compared/sweep.yaml").read_text())
            Path("compared/sweep.yaml").write_text(yaml.safe_dump(content | {"threads": 2}))  # as a sweep begun later
            held.close()

        Thread(target=leave).start()
        sweep("--isolate", **TUNING)
    assert "4 of 4 runs are finished." in capsys.readouterr().out
    assert CellFolder(Path("compared/FedAvg/epochs=2/partition_6_seed_0")).status == "finished"
    assert read_sweep(Path("compared/sweep.yaml")).threads == 2


def write_grey(root: Path, name: str) -> None:
    """Black images in torchvision's folder, of all classes alike and enough for every shipped partition."""
    raw = root / name / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", 24_000), ("t10k", 10_000)):
        write_idx(raw / f"{part}-images-idx3-ubyte", np.zeros((count, 28, 28)))
        write_idx(raw / f"{part}-labels-idx1-ubyte", np.arange(count) % 10)


def train_what_others_begin_with() -> None:
    """The run of FedAvg from which LG-FedAvg goes on, where its sweep puts it."""
    of_fedavg = read_sweep(Path("configs/peers/lg_fedavg_mnist.sweep.yaml"))
    [folder] = {of_fedavg.folder / cell.name for cell in of_fedavg.cells if cell.method == "FedAvg, 300 rounds" and cell.seed == 0}
    network = partial(SoftmaxMLP, inputs=784, hidden=[512, 256, 256, 128])
    data = InMemory(torch.zeros(20, 784), torch.arange(20) % 10, num_clients=1, partition=IID())
    Federation(rounds=1, run_dir=folder, logger=False, progress=False).fit(FedAvg(network, epochs=0), data)


def options_of(config: Settings) -> set[tuple[object, ...]]:
    """What a configuration sets, and of which method or data."""
    whose = {block: config[f"{block}.class_path"] for block in ("model", "data")}
    return {(whose.get(option.split(".")[0]), option.removesuffix(".class_path")) for option in config}


def kinds_of_runs() -> dict[Path, list[Cell]]:
    """Of each sweep those runs of the first seed that set an option, of a method or of data, which no configuration has and no run
    before them.
    """
    configs = [path for path in (ROOT / "configs").rglob("*.yaml") if path not in SWEEPS]
    known, found = set[tuple[object, ...]](), dict[Path, list[Cell]]()
    for path in configs:
        known |= options_of(flat(read_yaml(path)))
    for path in SWEEPS:
        plan = read_sweep(path)
        base = flat(read_yaml(ROOT / plan.base))
        for cell in plan.cells:
            given = {name: cell.overrides.get(name, base[f"{name}.class_path"]) for name in ("model", "data")}
            classes = {f"{name}.class_path": class_name for name, class_name in given.items()}
            options = options_of(flat({plain(option): value for option, value in cell.overrides.items()}) | classes)
            if (cell.partition, cell.seed) == plan.draws[0] and not options <= known:
                found.setdefault(path, []).append(cell)
            known |= options
    return found


KINDS = kinds_of_runs()
each_sweep = pytest.mark.parametrize("path", SWEEPS, ids=lambda path: str(path.relative_to(ROOT / "configs")))


class TestSweep:
    @each_sweep
    def test_begins_with_the_command_that_plays_it(self, path: Path) -> None:
        assert path.read_text().splitlines()[0] == f"# lightning-fed sweep --config {path.relative_to(ROOT)}"
        assert (ROOT / read_sweep(path).base).is_file()

    @pytest.mark.often(8)
    @pytest.mark.parametrize("path", KINDS, ids=lambda path: str(path.relative_to(ROOT / "configs")))
    def test_its_kinds_of_runs_are_understood(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(ROOT)
        plan = read_sweep(path)
        for cell in KINDS[path]:
            read(cell.name, arguments(plan, cell, Path("runs")))

    @pytest.mark.slow
    @each_sweep
    def test_its_runs_are_understood(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(ROOT)
        plan = read_sweep(path)
        first, *_ = cells = [cell for cell in plan.cells if cell.draw == plan.cells[0].draw]
        for cell in cells:  # each method and each point of the grid; not each of their pairs
            if cell.method == first.method or cell.setting == first.setting:
                read(cell.name, arguments(plan, cell, Path("runs")))


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in SWEEPS if path.parent.name == "peers"], ids=lambda path: path.stem)
def test_all_runs_of_a_seed_can_begin(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("configs").symlink_to(ROOT / "configs")
    write_grey(Path("data/mnist"), "MNIST")
    write_grey(Path("data/fashion-mnist"), "FashionMNIST")
    if "_from_" in path.name:
        train_what_others_begin_with()
    content = yaml.safe_load(path.read_text())
    Path("one_seed.sweep.yaml").write_text(yaml.safe_dump(content | {"seeds": content["seeds"][:1]}, sort_keys=False))
    main(["sweep", "--config", "one_seed.sweep.yaml", "--dry_run"])
    assert capsys.readouterr().out.count("lightning-fed fit") == len(read_sweep(path).cells) / len(content["seeds"])


def test_what_pretrained_files_lack_is_said_by_a_run_and_not_by_the_check_before_it(tmp_path: Path) -> None:
    """Else a comparison of many runs begins with as many reports of transformers, each of ten lines. What is told to be quiet must
    not be what makes it speak: transformers reports how it would divide networks among machines when a level is set.
    """
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    transformers.BertForMaskedLM(transformers.BertConfig(**TINY_BERT)).save_pretrained(tmp_path / "bert")
    transformers.ViTForImageClassification(transformers.ViTConfig(**TINY_VIT)).save_pretrained(tmp_path / "vit")
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        with errors_of("a run"):
            TransformerClassifier(2, str(tmp_path / "bert"))
            VisionTransformer(2, str(tmp_path / "vit"))
        assert not said
        TransformerClassifier(2, str(tmp_path / "bert"))
        assert "classifier.weight" in "".join(said)
    finally:
        logger.removeHandler(handler)


@pytest.mark.slow
def test_all_runs_of_the_first_comparison_can_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    main(["sweep", "--config", "configs/quickstart.sweep.yaml", "--dry_run"])


@pytest.mark.slow
def test_the_example_of_the_documentation(capfd: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "comparisons.md").read_text()
    [content] = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    Path("my.sweep.yaml").write_text(content)
    Path("configs").symlink_to(ROOT / "configs")
    [commands, *_] = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)  # the others play what others have published
    for line in commands.splitlines():
        main(line.removeprefix("lightning-fed ").split())
    assert Path("report/report.html").is_file()
    [program] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(program, "comparisons.md", "exec"), {})
    assert "Standalone" in capfd.readouterr().out
