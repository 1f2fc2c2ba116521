"""A run killed at any moment, continued, ends as one that was never killed."""

import csv
import io
import os
import random
import re
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tiny import assert_same_end, data_for, new_data, new_federation, new_method, new_trainer

from lightning_fed.callbacks import FederationCallback, RunView
from lightning_fed.core.messages import ClientUpdate
from lightning_fed.core.module import FederatedModule
from lightning_fed.engines.passes import OutputsPass
from lightning_fed.engines.worker import Worker
from lightning_fed.methods import DSFL, FedDF, FedET, PFedLoRA
from lightning_fed.storage.checkpoint import Checkpoints
from lightning_fed.storage.client_store import RoundStore

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is killed does not tidy up."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def fit(run_dir: str, ckpt_path: Path | str | None = None, method: str = "PFedLoRA") -> None:
    """Four rounds, two of three clients in each, measured at the end. The third brings no new column to the table."""
    federation = new_federation(4, run_dir, participation=0.7, evaluate_every=0, trainer=new_trainer)
    federation.fit(new_method(method), data_for(method, num_clients=3), ckpt_path)


class Disk:
    """Knows how much of each file is on the disk: until it is synced, what was written since may be missing.

    Args:
        folder: what it holds when a process starts is on the disk.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.synced: dict[int, int] = {}
        for path in self._files():
            self.sync(os.open(path, os.O_RDONLY))

    def sync(self, descriptor: int) -> None:
        """A file was synced."""
        status = os.fstat(descriptor)
        self.synced[status.st_ino] = status.st_size
        os.dup(descriptor)  # an inode that is open is given to no other file

    def tear(self) -> None:
        """Lose half of what files got since they were last synced."""
        for path in self._files():
            status = path.stat()
            synced = self.synced.get(status.st_ino, 0)
            if status.st_size > synced:
                os.truncate(path, (synced + status.st_size) // 2)

    def _files(self) -> list[Path]:
        """Tables are not among them: nothing depends on them."""
        return [path for path in self.folder.rglob("*") if path.suffix in (".json", ".safetensors")]


FSYNC = os.fsync


class Countdown:
    """Passes calls on until the n-th, at which the process kills itself, and the machine with it."""

    def __init__(self, calls: int, folder: Path) -> None:
        self.left = calls
        self.disk = Disk(folder)

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                self.disk.tear()
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return counted


Arm = Callable[[int, Path], None]


def watch(*places: tuple[Any, str]) -> Arm:
    """Arm the functions named: the n-th call of any of them kills the process."""

    def arm(calls: int, folder: Path) -> None:
        countdown = Countdown(calls, folder)

        def fsync(descriptor: int) -> None:
            FSYNC(descriptor)
            countdown.disk.sync(descriptor)

        os.fsync = fsync
        for owner, name in places:
            setattr(owner, name, countdown.before(getattr(owner, name)))

    return arm


CHANGES = ("fsync", "mkdir", "rename", "replace", "rmdir", "unlink", "write")
WRITING = watch(*((os, name) for name in CHANGES))
TABLES = watch((os, "replace"), (os, "write"))
TRAINING = watch((Worker, "run_turn"), (FederatedModule, "client_step"), (PFedLoRA, "shared_state"))
ON_PUBLIC_DATA = watch(
    (OutputsPass, "predict_step"),
    (FedDF, "student_loss"),
    (FedET, "student_loss"),
    (DSFL, "distill_loss"),
    (RoundStore, "clear"),
    (Checkpoints, "save"),
)
"""What servers and clients learn from public data, and what comes after."""


def dies(arm: Arm, calls: int, run_dir: str, ckpt_path: Path | str | None = None, method: str = "PFedLoRA") -> bool:
    """Run :func:`fit` in a fork; whether it was killed before it ended. A fork need not import anything again."""
    child = os.fork()
    if child == 0:
        run_armed(arm, calls, run_dir, ckpt_path, method)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def run_armed(arm: Arm, calls: int, run_dir: str, ckpt_path: Path | str | None, method: str) -> NoReturn:
    try:
        arm(calls, Path(run_dir))
        fit(run_dir, ckpt_path, method)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file that consists of whole lines, without what they took."""
    text = path.read_bytes().decode()
    assert text.endswith("\r\n")
    header, *rows = csv.reader(io.StringIO(text, newline=""))
    assert rows
    assert {len(row) for row in rows} == {len(header)}
    named = [dict(zip(header, row, strict=True)) for row in rows]
    return [{name: value for name, value in row.items() if not name.startswith("seconds/")} for row in named]


def assert_whole_lines(run_folder: Path) -> None:
    """At any moment, the tables that are there are tables."""
    for path in run_folder.glob("[!.]*.csv"):
        rows = table(path)
        if path.name == "metrics.csv":
            assert [float(row["round"]) for row in rows] == list(range(1, len(rows) + 1))


def unnumbered(name: str) -> str:
    """A file's name, without what says that its round was played again."""
    return re.sub(r"_2\.|(?<=index/).*", ".", name)


def assert_ended_as(run_folder: Path, whole: Path) -> None:
    """A run ended as one that was never stopped, and nothing that was left by the way lies about."""
    assert_same_end(run_folder, whole)
    ours, theirs = ([str(path.relative_to(folder)) for path in folder.rglob("*")] for folder in (run_folder, whole))
    assert sorted(map(unnumbered, ours)) == sorted(map(unnumbered, theirs))
    for path in whole.glob("*.csv"):
        assert table(run_folder / path.name) == table(path)
    checkpoints = Checkpoints(run_folder)
    kept = [checkpoints.load(path) for path in checkpoints.paths()]
    assert len(kept) == 2
    referred_to = {record["file"] for checkpoint in kept for record in checkpoint.clients.values()}
    assert {path.name for path in checkpoints.clients_folder.glob("*")} == referred_to
    named = {name for checkpoint in kept for name in checkpoint.manifest.index.values()}
    assert {path.name for path in checkpoints.index_folder.iterdir()} == named


@pytest.mark.parametrize(
    ("arm", "first", "step"),
    [
        pytest.param(WRITING, 1, 18, id="writing"),
        pytest.param(TABLES, 1, 1, id="tables", marks=pytest.mark.slow),
        pytest.param(TRAINING, 1, 11, id="training", marks=pytest.mark.slow),
        *(pytest.param(WRITING, first, 9, id=f"writing from {first}", marks=pytest.mark.slow) for first in range(2, 11)),
    ],
)
def test_killed_anywhere_and_continued(arm: Arm, first: int, step: int) -> None:
    fit("whole")
    kills = 0
    while dies(arm, first + kills * step, f"run_{kills}"):
        assert_whole_lines(Path(f"run_{kills}/version_0"))
        fit(f"run_{kills}", ckpt_path="last")
        newest = max(Path(f"run_{kills}").iterdir())  # killed before its first checkpoint, a run is started anew
        assert_ended_as(newest, Path("whole/version_0"))
        kills += 1
    assert kills >= 5  # the run was not over before it began


@pytest.mark.parametrize(
    ("method", "first", "step"),
    [
        ("FedDF", 6, 23),
        pytest.param("FedET", 4, 17, marks=pytest.mark.slow),
        pytest.param("DSFL", 5, 19, marks=pytest.mark.slow),
        *(pytest.param("FedDF", first, 7, marks=pytest.mark.slow) for first in range(1, 8)),
        *(pytest.param(name, first, 5, marks=pytest.mark.slow) for name in ("FedET", "DSFL") for first in range(1, 6)),
    ],
)
def test_killed_while_it_learns_from_public_data_and_continued(method: str, first: int, step: int) -> None:
    """During distillation, and after it."""
    fit("whole", method=method)
    kills = 0
    while dies(ON_PUBLIC_DATA, first + kills * step, f"run_{kills}", method=method):
        fit(f"run_{kills}", "last", method)
        assert_ended_as(max(Path(f"run_{kills}").iterdir()), Path("whole/version_0"))
        kills += 1
    assert kills >= 3


@pytest.mark.parametrize(("first", "step"), [(1, 10), *(pytest.param(first, 5, marks=pytest.mark.slow) for first in range(2, 7))])
def test_killed_while_it_plays_rounds_again_and_continued(first: int, step: int) -> None:
    """A run of four rounds goes on from the third: what it has left of the fourth is in the way."""
    fit("whole")
    kills = 0
    while True:
        run = Path(f"run_{kills}/version_0")
        shutil.copytree("whole/version_0", run)
        if not dies(WRITING, first + kills * step, f"run_{kills}", run / "checkpoints/round_000003"):
            break
        assert_whole_lines(run)
        fit(f"run_{kills}", ckpt_path="last")
        assert_ended_as(run, Path("whole/version_0"))
        kills += 1
    assert kills >= 4


def test_a_tear_takes_half_of_what_was_not_synced() -> None:
    Path("old.json").write_bytes(bytes(10))
    disk = Disk(Path())
    file = os.open("state.safetensors", os.O_WRONLY | os.O_CREAT)
    sizes = []
    for length, synced in ((100, True), (150, False), (90, True)):
        os.ftruncate(file, length)
        if synced:
            disk.sync(file)
        Path("new.json").write_bytes(bytes(10))
        disk.tear()
        sizes.append(os.fstat(file).st_size)
    assert sizes == [100, 125, 90]
    assert (Path("old.json").stat().st_size, Path("new.json").stat().st_size) == (10, 5)


class InASecondRound(FederationCallback):
    """Lets its process live for so many seconds of computing from the first turn of the second round that is played in it, when the
    first is on the disk. A busy machine makes them longer; their end, SIGPROF, is that of SIGKILL.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self.rounds = seconds, set[int]()

    def on_turn_end(self, run: RunView, update: ClientUpdate) -> None:
        if run.round not in self.rounds:
            self.rounds.add(run.round)
            if len(self.rounds) == 2:
                signal.setitimer(signal.ITIMER_PROF, self.seconds)


def goes_on(method: str, run_dir: str, seconds: float, second: bool) -> bool:
    """Continue a run in a fork that is killed after so many seconds, counted from a second round on or not; whether it was over."""
    child = os.fork()
    if child == 0:
        try:
            signal.setitimer(signal.ITIMER_PROF, 0 if second else seconds)
            callbacks = [InASecondRound(seconds)] if second else []
            federation = new_federation(6, run_dir, participation=0.7, callbacks=callbacks)
            federation.fit(new_method(method), new_data(4), "last")
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGPROF)
    return not os.WIFSIGNALED(status)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["PFedLoRA", "FedAMP", "FedHM"])
def test_killed_again_and_again_at_random_moments(method: str) -> None:
    """Private states, states that the server keeps for each client, statistics: whatever is lost is played again. One kill is at
    any moment, the next one after a round was finished.
    """
    new_federation(1).fit(new_method(method), new_data(4))  # imports what forks then have
    begun = time.process_time()
    new_federation(6, "whole", participation=0.7).fit(new_method(method), new_data(4))
    round = (time.process_time() - begun) / 6
    moments, kills = random.Random(method), 0
    while not goes_on(method, "killed", moments.uniform(0, round if kills % 2 else 2 * round), second=kills % 2 == 1):
        kills += 1
        assert kills < 20, "half of them finish a round"
    newest = max(Path("killed").iterdir())
    assert_same_end(newest, Path("whole/version_0"))
    assert kills >= 2
