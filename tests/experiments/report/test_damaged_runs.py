"""Files that no run has written are refused by name, whatever is wrong with them."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from written_runs import add_facts, write_run, write_sweep

from lightning_fed.errors import FederationError
from lightning_fed.experiments.report import load_clients, load_rounds, load_runs
from lightning_fed.experiments.report.report import report_on
from lightning_fed.experiments.sweep.folder import CellFolder, CellRecord

HEADER = "round,traffic/total_bytes,compute/total_flops,after/test_accuracy/mean\n"
ALIASES = "a: &a {x: *a}\nseed_everything: 0\n"
FACTS = {"monitor": "a", "higher_is_better": True, "training": [], "fine_tuning": []}
WRITTEN: list[tuple[str, bytes | str, str]] = [
    *(("metrics.csv", text, "metrics.csv is not a table") for text in ("", b"\xff\xfe\x00\x01", "a,b\n1,2,3\n1,2,3,4\n")),
    ("metrics.csv", HEADER, "has no rows"),
    ("metrics.csv", 'round,client\n"1', "metrics.csv is not a table"),
    ("metrics.csv", "round,other\n1,2\n", "has no column 'traffic/total_bytes'"),
    ("metrics.csv", f"{HEADER}1,2,3,high\n", "has 'high' in column 'after/test_accuracy/mean' of row 1"),
    ("metrics.csv", f"{HEADER}1,2,3,0.5\nx,2,3,0.5\n", "has 'x' in column 'round' of row 2"),
    ("metrics.csv", f"{HEADER}1,2,3,0.5\n2,,\n", "without a number in column 'traffic/total_bytes'"),
    *(("metrics.csv", f"{HEADER}{a},2,3,0.5\n{b},2,3,0.5\n", "not in order") for a, b in ((2, 1), (-1, 1), (0, 1))),
    ("clients.csv", "client,test,test/accuracy\n0,10,high\n", "has 'high' in column 'test/accuracy' of row 1"),
    ("clients.csv", "other\n1\n", "has no column 'client'"),
    *(("run.json", text, "does not say what a run writes") for text in ("", "[]", "{}", "null", "NaN", "[" * 100_000, b"\xff")),
    *(
        ("run.json", json.dumps(FACTS | of), "does not say")
        for of in ({"monitor": 3}, {"training": [3]}, {"data": []}, {"rounds": "x"})
    ),
    ("run.json", json.dumps(FACTS | {"training": [{"phase": "a", "epochs": "1"}]}), "does not say"),
    *(("config.yaml", text, "config.yaml") for text in ("", "[]", "a: [", b"\xff\xfe\x00", "- " * 3000 + "a", ALIASES)),
    ("config.yaml", "seed_everything: zero\n", "has seed_everything = 'zero', expected int"),
    ("config.yaml", "seed_everything: 0\nfederation: {rounds: many}\n", "has federation.rounds = 'many', expected int"),
    ("config.yaml", "seed_everything: 0\nfederation: {rounds: 3}\nmodel: 3\n", "has model.class_path = 'None', expected str"),
    ("config.yaml", "model: {}\nmodel: {}\n", "'model' is given twice"),
    ("config.yaml", "!!python/object/apply:os.system ['touch imported']", "is not YAML"),
]


@pytest.mark.parametrize(("name", "content", "message"), WRITTEN, ids=lambda value: repr(value)[:24])
def test_a_file_that_no_run_has_written_is_refused_by_name(name: str, content: bytes | str, message: str) -> None:
    run = write_run(Path("runs/version_0"), [0.5, 0.6])
    (run / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(FederationError, match=re.escape(message)) as caught:
        load_runs("runs")
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert not Path("imported").exists()


@pytest.mark.parametrize("lines", [0, 2])
def test_clients_that_are_missing_are_not_left_out_of_the_worst_tenth(lines: int) -> None:
    run = write_run(Path("runs/version_0"), [0.5])
    add_facts(run, clients=2)
    load_runs("runs")
    table = run / "clients.csv"
    table.write_text("".join(table.read_text().splitlines(keepends=True)[:lines]))
    if not lines:
        table.unlink()
    with pytest.raises(FederationError, match=rf"clients.csv has {lines // 2} clients of a run with 2: it was cut"):
        load_runs("runs")
    cell = CellFolder(Path("runs"))
    cell.record(CellRecord("finished"))
    with pytest.raises(FederationError, match=r"it was cut\. Remove runs to run it again"):
        cell.refuse_cut()


@pytest.mark.parametrize("load", [load_rounds, load_clients])
def test_stacked_tables_are_checked_too(load: Callable[[str], object]) -> None:
    run = write_run(Path("runs/version_0"), [0.5])
    for name in ("metrics.csv", "clients.csv"):
        (run / name).write_text("other\n1\n")
    with pytest.raises(FederationError, match="has no column"):
        load("runs")


def test_nothing_that_a_configuration_names_is_imported() -> None:
    Path("evil.py").write_text("from pathlib import Path\nPath('imported').touch()\n")
    run = write_run(Path("runs/version_0"), [0.5])
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("lightning_fed.methods.FedAvg", "evil.Method"))
    assert load_runs("runs")["model"].tolist() == ["Method"]
    assert not Path("imported").exists()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "3", '{"seconds": 1}', '{"status": "failed", "rounds": "x"}', '{"status": 3}', "[" * 100_000]
)
def test_a_cell_that_no_sweep_has_written_is_refused(text: str) -> None:
    Path("cell.json").write_text(text)
    with pytest.raises(FederationError, match=r"cell\.json is damaged.*: .*\. Remove it to run the cell again\.$"):
        _ = CellFolder(Path()).result


def test_the_commands_of_a_sweep_are_checked_too() -> None:
    sweep = write_sweep(Path("sweep"), {"FedAvg": [0.8]})
    (sweep / "cells.csv").write_text("")
    with pytest.raises(FederationError, match=r"sweep/cells\.csv is not a table"):
        report_on([sweep])


def test_what_another_version_writes_of_a_cell_besides_is_passed_over() -> None:
    Path("cell.json").write_text('{"status": "finished", "later": 1}')
    assert CellFolder(Path()).result == CellRecord("finished")


def test_copies_of_runs_in_a_cell_are_left_alone() -> None:
    Path("cell.json").write_text('{"status": "finished"}')
    write_run(Path("version_2"), [0.5])
    write_run(Path("version_2_copy"), [0.5, 0.6])
    assert (CellFolder(Path()).run, CellFolder(Path()).rounds) == (Path("version_2"), 1)
    assert load_runs(Path())["folder"].tolist() == ["version_2"]
