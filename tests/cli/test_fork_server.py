"""The process that cells are forked from."""

import os
import sys
from importlib import import_module

import pytest
import torch


def test_it_asks_for_no_gpu_and_leaves_the_environment_to_the_runs(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """CUDA that has been asked anything is of no use in a fork; what a variable says is said, or refused, by each run."""
    asked = list[str]()
    for name in ("is_available", "device_count", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: asked.append(name))
    monkeypatch.setenv("LIGHTNING_FED_FIT__FEDERATION__ROUNDS", "many")
    sys.modules.pop("lightning_fed.cli.fork_server", None)
    import_module("lightning_fed.cli.fork_server")
    assert asked == []
    assert os.environ["LIGHTNING_FED_FIT__FEDERATION__ROUNDS"] == "many"
    assert capfd.readouterr() == ("", "")
