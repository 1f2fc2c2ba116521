"""What shells complete."""

import shutil
import subprocess

import pytest

from lightning_fed.__main__ import main

pytest.importorskip("shtab")


@pytest.fixture(scope="module")
def script() -> str:
    """Of bash."""
    import contextlib
    import io

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        main(["completion", "bash"])
    return said.getvalue()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "completions"),
    [
        (["ru"], ["runs"]),
        (["fit", "--federation.r"], ["--federation.rounds", "--federation.run_dir"]),
        (["fit", "--model", "FedA"], ["FedALA", "FedAMP", "FedAS", "FedAdagrad", "FedAdam", "FedAvg", "FedAvgFT", "FedAvgM"]),
        (["fit", "--model.help", "Hom"], []),
        (["test", "--federation.progress", "t"], ["true"]),
        (["fit", "--config", "quick"], ["quickstart", "quickstart.sweep", "quickstart_partitions.sweep"]),
        (["configs", "feddecomp/cifar100"], ["feddecomp/cifar100"]),
        (["fit", "--trainer.max_e"], []),
        (["report", "--form"], ["--format"]),
    ],
)
def test_bash(words: list[str], completions: list[str], script: str) -> None:
    line = " ".join(["lightning-fed", *words])
    asks = f'COMP_WORDS=({line}); COMP_CWORD={len(words)}; _shtab_lightning_fed; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", f"{script}\n{asks}"], capture_output=True, text=True, timeout=20)
    assert done.stdout.split() == completions, done.stderr


def test_zsh(capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", "zsh"])
    said = capsys.readouterr().out
    assert said.startswith("#compdef lightning-fed")
    assert "--federation.rounds" in said
    assert "--trainer.max_epochs" not in said
