"""The verb ``report``, called as a function."""

import subprocess
import sys
from pathlib import Path

import pytest
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


@pytest.mark.parametrize(("format", "start"), [("md", "| | last round (%) |"), ("tex", "% after/"), ("csv", "method,setting,seed")])
def test_formats(format: str, start: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["report", "sweep", "--format", format, "--target", "0.7", "--pooled", "--baseline", "FedAvg"])
    said = capsys.readouterr().out
    assert said.startswith(start)
    assert "Standalone" in said


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere"], "No run below nowhere"),
        ([], "the following arguments are required: FOLDER"),
        (["sweep", "--form", "md"], "unrecognized arguments: --form md; see lightning-fed report --help"),
        (["sweep", "other"], "differ in model.mu (None and 0.5), which was not to vary"),
    ],
)
def test_what_is_wrong_is_one_line(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (5, 6):
        write_run(Path(f"other/{seed}"), [0.5, 0.5], seed=seed, **({"mu": 0.5} if seed == 6 else {}))
    with pytest.raises(SystemExit) as error:
        main(["report", *args])
    said = capsys.readouterr().err
    assert error.value.code == 2
    assert message in said
    assert said.count("\n") == 1
