"""The process that cells are forked from."""

import ast
import os
import re
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import torch

from lightning_fed.experiments.sweep.forks import NAMES

SERVER = "lightning_fed.cli.fork_server"
ROOT = Path(__file__).parents[2]


def test_it_asks_for_no_gpu_and_leaves_the_environment_to_the_runs(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """CUDA that has been asked anything is of no use in a fork; what a variable says is said, or refused, by each run."""
    asked = list[str]()
    for name in ("is_available", "device_count", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: asked.append(name))
    monkeypatch.setenv("LIGHTNING_FED_FIT__FEDERATION__ROUNDS", "many")
    Path("quickstart").mkdir()  # somebody's run_dir
    sys.modules.pop(SERVER, None)
    import_module(SERVER)
    assert asked == []
    assert os.environ["LIGHTNING_FED_FIT__FEDERATION__ROUNDS"] == "many"
    assert capfd.readouterr() == ("", "")


def test_it_imports_nothing_that_is_not_installed_with_the_library() -> None:
    """multiprocessing is silent about a preloaded module that cannot be imported; then each run imports everything itself."""
    source = ast.parse(Path(ROOT, "lightning_fed/cli/fork_server.py").read_text())
    named = [alias.name for node in ast.walk(source) if isinstance(node, ast.Import) for alias in node.names]
    named += [str(node.module) for node in ast.walk(source) if isinstance(node, ast.ImportFrom)]
    declared = tomllib.loads(Path(ROOT, "pyproject.toml").read_text())["project"]["dependencies"]
    ours = {re.match(r"[\w-]+", one)[0] for one in declared} | {"lightning_fed", "PIL"}  # type: ignore[index]  # PIL: of matplotlib
    assert {name.partition(".")[0] for name in named} - sys.stdlib_module_names <= ours


def test_it_imports_what_the_sweep_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be imported alone is left to the runs. Forks do not find the names."""
    Path("named.py").touch()
    Path("names.txt").write_text("no_such_module\nnamed\n")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.setenv(NAMES, "names.txt")
    sys.modules.pop(SERVER, None)
    import_module(SERVER)
    assert sys.modules.pop("named").__file__ == str(Path("named.py").absolute())
    assert NAMES not in os.environ


def test_it_waits_for_no_sweep_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAMES, "names.txt")
    sys.modules.pop(SERVER, None)
    import_module(SERVER)
