"""The verb ``configs``, and configurations by name where verbs take one."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tiny_commands import printed, refused

from lightning_fed.__main__ import main
from lightning_fed.experiments.configs import about, shipped


def said(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    main(list(args))
    return capsys.readouterr().out


def test_they_are_listed_with_what_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "configs").splitlines()
    assert [line.split()[0] for line in lines] == list(shipped())
    assert all(line.endswith(about(path)) for line, path in zip(lines, shipped().values(), strict=True))
    assert [line.split()[0] for line in said(capsys, "configs", "fml").splitlines()] == ["fml/cifar10"]


def test_one_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "configs", "feddecomp/cifar10") == shipped()["feddecomp/cifar10"].read_text()
    assert "did you mean feddecomp/cifar100" in refused(capsys, "configs", "feddecomp/cifar1000")


def test_it_waits_for_nothing_and_stops_when_nobody_reads() -> None:
    code = "import sys; from lightning_fed.__main__ import main\nmain(['configs'])\nassert 'torch' not in sys.modules"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


@pytest.mark.often(1)
@pytest.mark.parametrize("given", [["--config", "quickstart"], ["--config=configs/quickstart.yaml"], ["-c", "quickstart.yaml"]])
def test_fit_finds_one_by_name(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    config = yaml.safe_load(printed(capsys, "fit", *given, "--config", "{federation: {rounds: 7}}", "--print_config"))
    assert (config["federation"]["run_dir"], config["federation"]["rounds"]) == ("runs/quickstart", 7)


def test_a_sweep_and_its_base_are_found_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    """From a folder that has neither."""
    Path("my.sweep.yaml").write_text("{base: quickstart, folder: compared, seeds: [3], methods: {FedAvg: {model: FedAvg}}}")
    commands = said(capsys, "sweep", "--config", "my.sweep.yaml", "--dry_run").splitlines()
    assert commands[1].startswith("OMP_NUM_THREADS=1 lightning-fed fit --config quickstart --model=FedAvg ")
    assert "did you mean quickstart" in refused(capsys, "sweep", "--config", "quickstrat")
