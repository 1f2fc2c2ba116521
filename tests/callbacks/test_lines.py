"""What a run says where there is no terminal."""

import re
from functools import partial

import pytest
from tiny import Net, WideNet, new_data, new_federation, new_method

from lightning_fed.callbacks.lines import network_name
from lightning_fed.models import Backbone, Wrapped


def test_a_line_at_the_start_one_per_round_and_one_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    federation = new_federation(3, "runs", progress=True, participation=0.5)
    federation.fit(new_method("Standalone"), new_data())
    start, *rounds, end = capsys.readouterr().out.splitlines()[:5]
    assert start == (
        "Starting runs/version_0: Standalone with Net, WideNet on InMemory, 4 clients, 2 per round, 3 rounds, InProcess, 1 thread."
    )
    for round, line in enumerate(rounds, start=1):
        row = federation.run.history[round - 1]
        measured = f"accuracy {row['after/test_accuracy/mean']:.4f}, " if "after/test_accuracy/mean" in row else ""
        left = "" if round == 3 else r", 0:00:\d\d left"
        assert re.fullmatch(rf"Round {round}/3: {measured}loss {row['train/local_loss']:.4f}, \d+\.\d s{left}", line)
    assert re.fullmatch(
        rf"Finished 3 rounds: accuracy {federation.run.history[-1]['after/test_accuracy/mean']:.4f}, 0:00:\d\d\.", end
    )


def test_a_continued_run_says_so_and_estimates_by_the_rounds_that_it_plays(capsys: pytest.CaptureFixture[str]) -> None:
    new_federation(2, "runs").fit(new_method("FedAvg"), new_data())
    capsys.readouterr()
    new_federation(3, "runs", progress=True).fit(new_method("FedAvg"), new_data(), ckpt_path="last")
    said = capsys.readouterr().out
    assert said.startswith(
        "Continuing runs/version_0 from round 2: FedAvg with Net on InMemory, 4 clients, 3 rounds, InProcess, 1 thread.\n"
    )
    assert re.search(r"^Round 3/3: ", said, re.MULTILINE)
    assert "Round 2/3" not in said


def test_a_network_is_called_by_its_class_whatever_is_bound_to_it() -> None:
    assert [network_name(factory) for factory in (Net, partial(WideNet, num_classes=2))] == ["Net", "WideNet"]
    assert network_name(lambda classes: Net(classes)) == "<lambda>"
    assert network_name(Backbone.wrap(Net(2))) == network_name(Net(2)) == "Net"
    path = "torchvision.models.resnet18"
    assert network_name(path) == network_name(partial(Wrapped, network=path)) == "resnet18"
