"""The verb ``report``, called as a function."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_commands import refused
from written_runs import write_run, write_sweep

from lightning_fed.__main__ import main


@pytest.fixture(autouse=True)
def sweep() -> None:
    write_sweep(Path("sweep"), {"FedAvg": [0.80, 0.82], "Standalone": [0.50, 0.51]})


def test_it_waits_for_no_torch() -> None:
    code = (
        "import sys; from lightning_fed.__main__ import main; main(['report', 'sweep', '--output', 'out'])\n"
        "assert not {'torch', 'lightning', 'transformers'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "81.00 ± 1.41" in done.stdout
    assert Path("out/report.html").is_file()


@pytest.mark.parametrize(
    ("format", "start"), [("md", "| | last round (%) |"), ("tex", r"\begin{table}"), ("csv", "method,setting,partition,seed")]
)
def test_formats(format: str, start: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["report", "sweep", "--format", format, "--target", "0.7", "--pooled", "--baseline", "FedAvg"])
    said = capsys.readouterr().out
    assert said.startswith(start)
    assert "Standalone" in said


def test_options_go_before_what_the_sweep_says(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("sweep/sweep.yaml")
    path.write_text(path.read_text() + "report: {at: best, equal: bytes}\n")
    main(["report", "sweep", "--format", "md"])
    best = "best measured round, chosen on test data"
    assert f"| at equal bytes sent (200 B), {best} (%) | {best} (%) | last round (%) |" in capsys.readouterr().out
    main(["report", "sweep", "--format", "md", "--at", "mean2", "--equal", "rounds"])
    mean = "mean of the last 2 measured rounds"
    assert f"| at equal rounds (2), {mean} (%) | {mean} (%) | last round (%) |" in capsys.readouterr().out
    write_sweep(Path("other"), {"FedPer": [0.7, 0.7]}, report={"at": "selected"})
    assert "sweep reports at 'best', another one 'selected': say which, as an option" in refused(capsys, "report", "sweep", "other")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere"], "No run below nowhere"),
        (["sweep", "--at", "first"], "at is 'first', expected last, selected, best or, say, mean10"),
        (["sweep", "--budgets", "-3"], "argument --budgets: '-3' is not a number above 0"),
        ([], "the following arguments are required: FOLDER"),
        (["sweep", "--form", "md"], "unrecognized arguments: --form md (did you mean --format?); see lightning-fed report --help"),
        (
            ["sweep", "--room", "a", "b"],
            "--room a b (it is called between now); see lightning-fed",
        ),
        (["sweep", "other"], "differ in model.mu (None and 0.5), which was not to vary"),
    ],
)
def test_what_is_wrong_is_one_line(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (5, 6):
        write_run(Path(f"other/{seed}"), [0.5, 0.5], seed=seed, **({"mu": 0.5} if seed == 6 else {}))
    assert message in refused(capsys, "report", *args)


def test_files_are_written_also_if_nobody_reads_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with ``| head``."""
    reader, writer = os.pipe()
    os.close(reader)
    with monkeypatch.context() as patched, os.fdopen(writer, "w") as pipe:
        patched.setattr(sys, "stdout", pipe)
        with pytest.raises(SystemExit):
            main(["report", "sweep", "--output", "out"])
    assert Path("out/report.html").is_file()


def test_an_output_that_is_a_file_is_left_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    Path("taken").write_text("mine")
    assert "error: taken: File exists. Give another output.\n" in refused(capsys, "report", "sweep", "--output", "taken")
    assert Path("taken").read_text() == "mine"


def test_lines_in_a_pipe_are_not_folded(capsys: pytest.CaptureFixture[str]) -> None:
    main(["report", "sweep", "--pooled"])
    said = capsys.readouterr().out
    assert any(line.startswith("│ FedAvg ") and line.count("│") > 6 for line in said.splitlines())
