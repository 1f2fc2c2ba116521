"""What every test runs in: one thread, its own folder, its own random state, nothing left behind."""

import atexit
import gc
import importlib.metadata
import os
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

LEFT_BY_LIBRARIES = {
    *("PL_GLOBAL_SEED", "PL_SEED_WORKERS"),  # by the seed_everything of Lightning's command line
    *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),  # by the import of scikit-learn
    "RAY_CLIENT_MODE",  # by the import of Ray
    "CUDA_DEVICE_ORDER",  # by Lightning on a machine with a GPU
}


def plays(config: pytest.Config) -> bool:
    """Whether tests are run in this process. That which hands them to others need not wait for torch."""
    return hasattr(config, "workerinput") or not config.getoption("numprocesses", default=None)


def pytest_configure(config: pytest.Config) -> None:
    if not plays(config):
        return
    gc.set_threshold(100_000, 50, 100)  # networks come and go: looking for circles after each 700 objects takes a twentieth of all
    import torch
    from lightning.fabric.utilities import registry

    import lightning_fed.engines.turn_loop

    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # else the driver's library is looked for whenever somebody asks
    # Thousands of Trainers look for plugins. Installed is while tests run what was installed before.
    lightning_fed.engines.turn_loop.entry_points = registry.entry_points = cache(importlib.metadata.entry_points)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Neighbouring tests run in one process as long as it has tests of its own left: what a method's tests compare with is played
    once, and libraries that few tests need are imported once. Another way to divide them can be asked for (``--dist``).
    """
    if config.getoption("dist") != "load":  # which it is if none was asked for
        return None
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


def pytest_collectstart() -> None:
    from lightning_fed.seeding import seed_torch

    seed_torch(0)  # what a module of tests draws while it is imported is the same in every process, whatever else runs


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the cases of a test that is marked ``often(n)`` the first n are tried often; the others are slow."""
    cases: Counter[str] = Counter()
    for item in items:
        if (often := item.get_closest_marker("often")) and not item.get_closest_marker("slow"):
            test = item.nodeid.partition("[")[0]
            cases[test] += 1
            if cases[test] > often.args[0]:
                item.add_marker("slow")


def pytest_collection_finish() -> None:
    gc.freeze()  # a million objects of imported libraries, which each full collection would look through, pytest's last ones too
    atexit.register(gc.unfreeze)  # else libraries that count what they leave behind report all of it


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are written under the working directory. No power fails, so nobody waits until their files have reached the disk."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is computed once and found again lies in no user's folder."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def lines() -> Iterator[None]:
    """What is logged is printed, as within a run."""
    from lightning_fed.system.logs import lines_shown

    with lines_shown():
        yield


@pytest.fixture(scope="session")
def two_workers() -> Iterator[Any]:
    """An engine for whoever looks at worker processes, which take long to start: they stay from run to run."""
    from lightning_fed.engines import Processes

    engine = Processes(workers=2)
    yield engine
    engine._stop()


@pytest.fixture(autouse=True)
def own_random_state() -> Iterator[None]:
    from lightning.pytorch.utilities.seed import isolate_rng

    from lightning_fed.seeding import seed_torch

    with isolate_rng():
        seed_torch(0)
        yield


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    after = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    before.pop("PYTEST_CURRENT_TEST", None)
    leaked = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    for name in leaked:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    assert leaked <= LEFT_BY_LIBRARIES, f"left in the environment: {sorted(leaked)}"


@pytest.fixture(scope="session")
def option_index() -> Any:
    """The index of all options, made once for all tests that look into it."""
    from lightning_fed.cli.all_parsers import index

    return index()


@pytest.fixture
def kept_index(option_index: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a user's cache that has it."""
    from lightning_fed.cli.help.option_index import write

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write(option_index)
    return tmp_path / "cache" / "lightning-fed"
