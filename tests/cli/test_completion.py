"""What shells complete."""

import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_fed.__main__ import main
from lightning_fed.cli.completion import answers, words
from lightning_fed.cli.help.option_index import OptionIndex


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ru", ["runs"]),
        ("fit --federation.r", ["--federation.rounds", "--federation.run_dir"]),
        ("fit --model FedA", ["FedALA", "FedAMP", "FedAS", "FedAdagrad", "FedAdam", "FedAvg", "FedAvgFT", "FedAvgM"]),
        ("fit --model=FedAvgF", ["FedAvgFT"]),
        ("fit --model FedProx --model.m", ["--model.metric", "--model.metrics", "--model.mu"]),
        ("fit --model FedProx --model.init_args.mu", ["--model.init_args.mu"]),
        ("fit --model FedAvg --model.mu", []),
        ("fit --config quickstart --model.init_args.backbone.init_args.h", ["--model.init_args.backbone.init_args.hidden"]),
        ("fit --config feddecomp/cifar10 --model.rank", ["--model.rank_ratio_conv", "--model.rank_ratio_linear"]),
        ("fit --model.help HOM", ["HOMLoRA"]),
        ("test --federation.progress t", ["true"]),
        ("fit --config quick", ["quickstart", "quickstart.sweep", "quickstart_partitions.sweep"]),
        ("sweep --config quickstart", ["quickstart.sweep", "quickstart_partitions.sweep"]),
        ("configs feddecomp/cifar100", ["feddecomp/cifar100"]),
        ("fit --trainer.max_e", []),
        ("report --form", ["--format"]),
        ("nothing --form", []),
        ("comp", ["completion"]),
        ("fit -c quickstart --model.init_args.backbone.init_args.h", ["--model.init_args.backbone.init_args.hidden"]),
        ("fit -c ~/none.yaml --model FedAvgF", ["FedAvgFT"]),
        (f"fit --config {'x' * 300} --model FedAvgF", ["FedAvgFT"]),
        ("fit --config 'quick", []),
    ],
)
def test_answers(line: str, expected: list[str], option_index: OptionIndex) -> None:
    assert answers(words(f"lightning-fed {line}"), option_index) == expected


@pytest.mark.parametrize(
    ("words", "expected"), [(["lightning-fed", "FedAvgF", "="], "FedAvgFT"), ([], "--model=FedAvgFT")], ids=["bash", "zsh"]
)
def test_a_word_is_completed_as_the_shell_divides_it(
    words: list[str],
    expected: str,
    kept_index: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Bash calls the command with the word, which begins after the sign of equality; zsh calls it alone."""
    monkeypatch.setenv("COMP_LINE", "lightning-fed fit --model=FedAvgF")
    main(["completion", *words])
    assert capsys.readouterr().out.split() == [expected]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_asks(option_index: OptionIndex, kept_index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion"])
    line = capsys.readouterr().out.splitlines()[1]
    program = tmp_path / "lightning-fed"
    program.write_text(f'#!/bin/sh\n[ "$1" = completion ] || exec echo "typed: $*"\nexec {sys.executable} -m lightning_fed "$@"\n')
    program.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PS1": "", "TERM": "dumb"}
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as bash:
        os.write(ours, f"{line}\nlightning-fed fit --model FedProx --model.init_args.m\tu\t1\nexit\n".encode())
        bash.wait(60)
    assert "typed: fit --model FedProx --model.init_args.mu 1" in os.read(ours, 100_000).decode()
    os.close(ours)
    os.close(theirs)
