"""Who plays which cell, and what becomes of it. A small program stands for a run: it starts at once."""

import csv
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
from rich.console import Console

from lightning_fed.errors import FederationError
from lightning_fed.experiments.sweep import folder as folders
from lightning_fed.experiments.sweep import forks as forking
from lightning_fed.experiments.sweep import processes
from lightning_fed.experiments.sweep.folder import CellFolder, CellRecord
from lightning_fed.experiments.sweep.forks import ForkServer
from lightning_fed.experiments.sweep.plan import Cell
from lightning_fed.experiments.sweep.player import CellJob, play, time_left, write_cells
from lightning_fed.experiments.sweep.processes import CellProcess, Start, own_processes
from lightning_fed.experiments.sweep.progress import SweepProgress
from lightning_fed.system import children
from lightning_fed.system.disk import write_whole
from lightning_fed.system.signals import Preempted, Terminated, preemption

STAND_IN = """
import logging, os, signal, sys, time, warnings, weakref
from pathlib import Path

folder, behaviour = Path(sys.argv[1]), sys.argv[2]
preempted = []
if behaviour == "makes room":
    signal.signal(signal.SIGUSR1, lambda *_: preempted.append(1))
with (folder / "calls.txt").open("a") as calls:
    calls.write(" ".join(sys.argv[3:]) + f" threads={os.environ['OMP_NUM_THREADS']}\\n")
run = folder / "version_0"
run.mkdir(exist_ok=True)
with (run / "metrics.csv").open("a") as metrics:
    if metrics.tell() == 0:
        metrics.write("round\\n")
    metrics.write("1\\n")
if behaviour == "fails" or behaviour == "fails once" and not sys.argv[3:]:
    sys.exit("lightning-fed: error: it is broken")
if behaviour == "dies":
    os.kill(os.getpid(), 9)
if behaviour == "leaves":
    os._exit(7)
if behaviour == "breaks":
    weakref.finalize(Path, print, "let go")
    1 / 0
if behaviour == "looks":
    [os.environ.pop(name, None) for name in ("LINES", "COLUMNS")]  # which pytest's readline sets, where os.environ does not see it
    print(sys.argv[1:], os.getcwd(), sorted(os.environ.items()), sys.stdin.read())
    print([signal.getsignal(number) for number in signal.valid_signals()], os.getsid(0) == os.getpid() == os.getpgrp())
    print(sys.stdout.isatty(), sys.stdout.encoding, sys.stdout.write_through, __name__, logging.root.handlers, warnings.filters)
    print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
if behaviour in ("waits", "makes room"):
    print("waiting")
    while not (folder / "go").exists():
        time.sleep(0.01)
        if preempted:
            sys.exit(75)
"""
FACTS = CellRecord("interrupted", versions="python 3", commit="abc", machine="this one")


OWN, FORKS = own_processes(3), ForkServer(3)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forks come of a server of each test's own, which imports nothing."""
    Path("run.py").write_text(STAND_IN)
    monkeypatch.setattr(processes, "PROGRAM", (sys.executable, "-S", str(Path("run.py").absolute())))
    monkeypatch.setattr(forking, "PROGRAM", "run")
    monkeypatch.setattr(forking, "PRELOADED", "nothing")
    monkeypatch.setattr(forking, "LIBRARIES", set())
    monkeypatch.syspath_prepend(str(Path.cwd()))
    server = forkserver.ForkServer()
    for name in ("ensure_running", "connect_to_new_process", "set_forkserver_preload"):
        monkeypatch.setattr(forkserver, name, getattr(server, name))
    monkeypatch.setattr(forkserver, "_forkserver", server)
    yield
    server._stop()


@pytest.fixture(autouse=True)
def terminal() -> Iterator[None]:
    """SIGHUP is heard, also if the tests run under ``nohup``."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(params=[OWN, FORKS], ids=["own processes", "forks"])
def start(request: pytest.FixtureRequest) -> Start:
    """Both ways to play a cell."""
    return request.param


def job(seed: int, behaviour: str = "works") -> CellJob:
    folder = CellFolder(Path(f"sweep/A/seed_{seed}"))
    return CellJob(Cell("A", "", seed, {}), folder, [str(folder.path), behaviour], 1, 3)


def played(jobs: list[CellJob], workers: int = 1, start: Start = OWN, wait: bool = False) -> list[dict[str, str]]:
    """Play, and what ``cells.csv`` then says."""
    Path("sweep").mkdir(exist_ok=True)
    table = Path("sweep/cells.csv")
    progress = SweepProgress(len(jobs), len(jobs), Console())
    with preemption() as preempted:
        play(jobs, workers, FACTS, progress, partial(write_cells, table, jobs), start, preempted, wait)
    return cells()


def cells() -> list[dict[str, str]]:
    return list(csv.DictReader(Path("sweep/cells.csv").read_text().splitlines()))


def calls(job: CellJob) -> list[str]:
    path = job.folder.path / "calls.txt"
    return path.read_text().splitlines() if path.exists() else []


def test_each_cell_is_played_once_with_its_threads_and_recorded(start: Start) -> None:
    jobs = [job(0), job(1)]
    rows = played(jobs, 2, start)
    assert [calls(job) for job in jobs] == [[" threads=3"]] * 2
    assert [(row["method"], row["seed"], row["status"], row["commit"]) for row in rows] == [
        ("A", "0", "finished", "abc"),
        ("A", "1", "finished", "abc"),
    ]
    assert rows[0]["command"] == "OMP_NUM_THREADS=3 lightning-fed sweep/A/seed_0 works"
    assert 0 < float(rows[0]["seconds"]) < 20
    assert [row["status"] for row in played(jobs, 1, start)] == ["finished"] * 2
    assert [calls(job) for job in jobs] == [[" threads=3"]] * 2  # not again


def test_loggers_find_a_name_and_a_group_in_the_environment(start: Start) -> None:
    cell = job(4, "looks")
    played([cell], 1, start)
    said = cell.folder.log.read_text()
    assert "('WANDB_NAME', 'A/seed_4'), ('WANDB_RUN_GROUP', 'sweep')" in said
    tags = {"mlflow.runName": "A/seed_4", "sweep": "sweep", "method": "A", "seed": "4"}
    assert f"('MLFLOW_RUN_CONTEXT', {json.dumps(tags)!r})" in said


def test_a_failing_cell_is_recorded_does_not_stop_the_rest_and_is_continued_next_time(start: Start) -> None:
    jobs = [job(0, "fails once"), job(1, "dies"), job(2, "leaves"), job(3, "breaks"), job(4)]
    rows = played(jobs, 1, start)
    assert [row["status"] for row in rows] == ["failed", "failed", "failed", "failed", "finished"]
    assert [row["error"] for row in rows] == ["it is broken", "killed by SIGKILL", "exit code 7", "let go", ""]
    assert "ZeroDivisionError" in jobs[3].folder.log.read_text()
    assert jobs[0].folder.log.read_text() == "lightning-fed: error: it is broken\n"
    assert [row["status"] for row in played(jobs, 1, start)] == ["finished", "failed", "failed", "failed", "finished"]
    assert calls(jobs[0]) == [" threads=3", "--ckpt_path=last threads=3"]
    assert len(calls(jobs[4])) == 1


def test_a_fork_finds_itself_where_a_process_of_its_own_would() -> None:
    one, other = job(0, "looks"), job(1, "looks")
    played([one])
    played([job(2), job(3), other], 3, FORKS)
    said = one.folder.log.read_text().replace("seed_0", "seed_1").replace('"seed": "0"', '"seed": "1"')
    assert said == other.folder.log.read_text()


def test_a_cell_that_somebody_else_plays_is_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [job(0), job(1)]
    with jobs[0].folder.locked() as lock:
        assert lock is not None
        with jobs[0].folder.locked() as second:
            assert second is None
        played(jobs)
    assert (calls(jobs[0]), len(calls(jobs[1]))) == ([], 1)
    assert "A/seed_0: is being run by another sweep" in capsys.readouterr().out


@pytest.mark.parametrize(("left", "tries"), [("interrupted", 1), ("finished", 0), ("failed", 0)])
@pytest.mark.parametrize("wait", [True, False])
def test_a_cell_that_somebody_else_has_left_is_played_at_the_end(left: str, tries: int, wait: bool) -> None:
    jobs = [job(0), job(1, "works" if wait else "waits")]
    with ExitStack() as held:
        held.enter_context(jobs[0].folder.locked())
        jobs[0].folder.record(FACTS)

        def leave() -> None:
            (jobs[0].folder.path / "version_0").mkdir()
            (jobs[0].folder.path / "version_0/metrics.csv").write_text("round\n1\n")
            jobs[0].folder.record(replace(FACTS, status=left))
            held.close()
            (jobs[1].folder.path / "go").touch()

        when(lambda: jobs[1].folder.status == "finished" if wait else says(jobs[1], "waiting"), leave)
        assert [row["status"] for row in played(jobs, wait=wait)] == ["finished" if tries else left, "finished"]
    assert [len(calls(job)) for job in jobs] == [tries, 1]


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("ended", [False, True])
def test_a_run_that_outlived_its_sweep_and_left_no_checkpoint_is_not_repeated(ended: bool, checkpoint: bool) -> None:
    """One with a checkpoint is continued, which ends at once."""
    cell = job(0)
    run = cell.folder.path / "version_0"
    (run / "checkpoints/round_1" if checkpoint else run).mkdir(parents=True)
    (run / "metrics.csv").write_text("round\n1\n")
    facts = {"monitor": "loss", "higher_is_better": False, "training": [], "fine_tuning": []}
    (run / "run.json").write_text(json.dumps(facts | {"finished": ended}))
    cell.folder.record(FACTS)
    assert [row["status"] for row in played([cell])] == ["finished"]
    assert len(calls(cell)) == (0 if ended and not checkpoint else 1)


def test_the_line_of_the_last_run_does_not_say_that_time_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    progress = SweepProgress(2, 2, Console())
    progress.left = 60.0
    for name in "ab":
        progress.ended(name, replace(FACTS, status="finished"), 1)
    first, last = capsys.readouterr().out.splitlines()
    assert first.endswith("1 of 2 runs, about 0:01:00 left")
    assert last.endswith("2 of 2 runs")


def test_runs_go_on_if_another_cannot_be_started() -> None:
    jobs = [job(0, "waits"), job(1), job(2)]

    def refusing(args: Sequence[str], *rest: Any) -> CellProcess:
        if args[0].endswith("seed_1"):
            (jobs[0].folder.path / "go").touch()
            raise FederationError("base.yaml has changed")
        return OWN(args, *rest)

    with pytest.raises(FederationError, match=r"base\.yaml has changed"):
        played(jobs, 2, refusing)
    assert [row["status"] for row in cells()] == ["finished", "interrupted", "waiting"]


def test_a_cell_whose_status_is_asked_for_is_free() -> None:
    """Another sweep on the folder asks for it whenever it writes its table."""
    folder = CellFolder(Path("cell").absolute())
    with folder.locked():
        folder.record(FACTS)
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            assert folder.status in ("interrupted", "playing")

    asking = threading.Thread(target=ask)
    asking.start()
    taken = []
    for _ in range(200):
        with folder.locked() as lock:
            taken.append(lock is not None)
    over.set()
    asking.join()
    assert all(taken)
    with folder.locked():
        assert folder.status == "playing"
    assert folder.status == "interrupted"


def test_whoever_asks_for_a_status_writes_nothing() -> None:
    folder = CellFolder(Path("cell"))
    assert folder.status == "waiting"
    folder.path.mkdir()
    folder.record(FACTS)
    assert folder.status == "interrupted"
    assert [path.name for path in folder.path.iterdir()] == ["cell.json"]


def test_a_run_holds_its_cell_when_its_sweep_is_gone() -> None:
    folder = CellFolder(Path("cell").absolute())
    with folder.locked() as lock:
        assert lock is not None
        child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lock])
    with folder.locked() as lock:
        assert lock is None
    child.communicate(b"\n")
    with folder.locked() as lock:
        assert lock is not None


def when(condition: Callable[[], bool], do: Callable[[], Any]) -> threading.Thread:
    """Do something as soon as something is so."""

    def wait() -> None:
        while not condition():
            time.sleep(0.01)
        do()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated), (signal.SIGHUP, Terminated)]
)
def test_a_signal_ends_the_runs_and_they_are_continued_next_time(number: int, raised: type[BaseException], start: Start) -> None:
    jobs, before = [job(0, "waits"), job(1, "waits"), job(2)], signal.getsignal(number)
    when(lambda: bool(calls(jobs[0]) and calls(jobs[1])), lambda: os.kill(os.getpid(), number))
    with pytest.raises(raised):
        played(jobs, 2, start)
    rows = cells()
    assert [row["status"] for row in rows] == ["interrupted", "interrupted", "waiting"]
    assert signal.getsignal(number) == before
    for one in jobs:
        one.folder.path.mkdir(parents=True, exist_ok=True)
        (one.folder.path / "go").touch()
    assert [row["status"] for row in played(jobs, 1, start)] == ["finished"] * 3
    assert calls(jobs[0])[1] == "--ckpt_path=last threads=3"


def says(job: CellJob, word: str) -> bool:
    return job.folder.log.is_file() and word in job.folder.log.read_text()


def test_whoever_is_asked_to_make_room_waits_until_runs_have_stopped_at_a_checkpoint(start: Start) -> None:
    jobs = [job(0, "makes room"), job(1, "makes room"), job(2)]
    when(lambda: says(jobs[0], "waiting") and says(jobs[1], "waiting"), lambda: os.kill(os.getpid(), signal.SIGUSR1))
    with pytest.raises(Preempted) as raised:
        played(jobs, 2, start)
    assert raised.value.code == 75
    assert [row["status"] for row in cells()] == ["interrupted", "interrupted", "waiting"]
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    with jobs[0].folder.locked() as lock:
        assert lock is not None  # whoever comes next can go on
    for one in jobs[:2]:
        (one.folder.path / "go").touch()
    assert [row["status"] for row in played(jobs, 1, start)] == ["finished"] * 3


def test_a_fork_that_has_not_begun_is_also_asked_to_make_room() -> None:
    """What a signal finds while it takes over the process, when only runs that have begun handle it."""
    late = "import os, time\nos.setsid = lambda: (open('forked', 'w'), time.sleep(1))\n"
    Path("nothing.py").write_text(late)
    cell, ended = job(0, "makes room"), threading.Event()
    when(Path("forked").absolute().is_file, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    unasked = when(lambda: ended.is_set() or says(cell, "waiting"), lambda: ended.wait(3) or (cell.folder.path / "go").touch())
    with pytest.raises(Preempted):
        played([cell], 1, FORKS)
    ended.set()
    unasked.join()
    assert calls(cell) == []


@pytest.mark.slow
def test_a_fork_server_that_dies_is_replaced_and_its_forks_hold_their_cells() -> None:
    jobs = [job(0, "waits"), job(1)]
    when(lambda: says(jobs[0], "waiting"), lambda: os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL))
    rows = played(jobs, 1, FORKS)
    assert [row["status"] for row in rows] == ["playing", "finished"]
    (jobs[0].folder.path / "go").touch()
    when(lambda: jobs[0].folder.status == "interrupted", lambda: None).join(20)
    assert [row["status"] for row in played(jobs, 1, FORKS)] == ["finished", "finished"]


def test_a_fork_server_that_starts_early_is_told_what_is_imported_meanwhile() -> None:
    """At once, and the rest when the first cell starts. The second cell is a fork of it, too."""
    Path("nothing.py").write_text(
        "from lightning_fed.experiments.sweep.forks import named_libraries\n"
        "for name in named_libraries(): print(name, file=open('told', 'a'), flush=True)\n"
    )
    told = Path("told").absolute()
    forking.LIBRARIES.add("csv")
    with ForkServer(3) as start:
        start.name_libraries()
        when(lambda: told.is_file() and told.read_text().endswith("\n"), lambda: None).join(20)
        assert told.read_text().split() == ["csv"]
        forking.LIBRARIES.add("json")
        assert [row["status"] for row in played([job(0), job(1)], 1, start)] == ["finished"] * 2
    names = told.read_text().split()
    assert "json" in names
    assert {name.partition(".")[0] for name in names} == {"csv", "json"}
    assert len(names) == len(set(names))
    assert forking.NAMES not in os.environ


def test_ctrl_c_does_not_reach_the_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it needs multiprocessing's resource tracker started, after which that unblocks the signal."""
    Path("nothing.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    tracker = resource_tracker.ResourceTracker()
    monkeypatch.setattr(resource_tracker, "_resource_tracker", tracker)
    for name in ("ensure_running", "getfd"):
        monkeypatch.setattr(resource_tracker, name, getattr(tracker, name))
    with ForkServer(3) as start:
        assert [row["status"] for row in played([job(0)], 1, start)] == ["finished"]
    tracker._stop()


def test_a_full_temporary_folder_is_one_line() -> None:
    forking.LIBRARIES.add("csv")
    start = ForkServer(3)
    start._names = Path("/dev/full").open("w")  # noqa: SIM115 - its end closes it
    with pytest.raises(FederationError, match=r"No space left on device\. Make room, or set TMPDIR to another folder\."):
        start.name_libraries()
    start.__exit__()


def test_a_fork_of_a_program_that_is_imported_does_not_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    """multiprocessing imports the sweep's own console script in the fork, and with it the program."""
    Path("package").mkdir()
    Path("package/__init__.py").touch()
    Path("package/__main__.py").write_text(f"if __name__ == '__main__':\n{indent(STAND_IN, '    ')}")
    Path("nothing.py").write_text("import package.__main__")
    monkeypatch.setattr(forking, "PROGRAM", "package")
    assert [row["status"] for row in played([job(0)], 1, FORKS)] == ["finished"]
    assert "Warning" not in Path("sweep/A/seed_0/log.txt").read_text()


def test_a_name_that_is_half_written_is_read_when_it_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(forking.NAMES, "names")
    with Path("names").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("scipy\nskle")
        file.flush()
        names = forking.named_libraries()
        assert next(names) == "scipy"
        file.write("arn\n")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_UN)
        assert list(names) == ["sklearn"]


def test_a_file_in_the_folder_stands_for_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server imports ``random`` before it can be told a path."""
    monkeypatch.setattr(children, "started_in_folder", lambda: False)
    Path("random.py").write_text("raise SystemExit('mine')")
    assert [row["status"] for row in played([job(0)], 1, FORKS)] == ["finished"]


def denied() -> int:
    raise PermissionError


def test_a_cell_that_another_user_keeps_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished one is passed over."""
    jobs = [job(0), job(1)]
    played(jobs[:1])
    jobs[1].folder.path.mkdir(parents=True)
    (lock := jobs[1].folder.path / ".lock").touch()
    opened = os.open
    monkeypatch.setattr(folders.os, "open", lambda path, *flags: denied() if Path(path) == lock else opened(path, *flags))
    with pytest.raises(FederationError, match=r"seed_1 may not be written by this user: leave it to whoever began it"):
        played(jobs)


def test_a_fork_leaves_the_servers_finalizers_to_it() -> None:
    Path("nothing.py").write_text("import pathlib, weakref; weakref.finalize(pathlib.Path, print, 'the operators')")
    assert played([job(0, "breaks")], 1, FORKS)[0]["error"] == "let go"
    assert "operators" not in job(0).folder.log.read_text()


def test_a_fork_server_that_cannot_start_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    Path("nothing.py").write_text("raise SystemExit('no luck')")
    with pytest.raises(FederationError, match=r"has ended while it started: give each cell its own with --isolate"):
        played([job(0)], 1, FORKS)
    assert capfd.readouterr().err == "no luck\n"


def test_a_folder_that_cannot_be_locked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(descriptor: int, shared: bool = False) -> bool:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(folders, "taken", taken)
    with pytest.raises(FederationError, match="A/seed_0 cannot be locked \\(No locks available\\), so two could play it"):
        played([job(0)])


def test_a_full_disk_ends_all_runs_and_releases_their_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        if Path("full").exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        write_whole(path, text)

    monkeypatch.setattr(folders, "write_whole", full)
    jobs = [job(0, "waits"), job(1, "waits"), job(2, "waits")]
    when(lambda: all(says(job, "waiting") for job in jobs), lambda: (Path("full").touch(), (jobs[0].folder.path / "go").touch()))
    with pytest.raises(OSError, match="No space left"):
        played(jobs, 3)
    for one in jobs:
        (one.folder.path / "go").touch()
        with one.folder.locked() as lock:
            assert lock is not None
    Path("full").unlink()
    assert [row["status"] for row in played(jobs)] == ["finished"] * 3


def test_two_sweeps_on_one_folder_share_the_cells() -> None:
    """Each cell is played by one of two processes that start at the same time."""
    Path("both.py").write_text(
        textwrap.dedent(
            """
            import sys
            sys.path.insert(0, sys.argv[1])
            import test_player as t
            t.processes.PROGRAM = (sys.executable, "-S", "run.py")
            t.played([t.job(seed) for seed in range(4)])
            """
        )
    )
    command = [sys.executable, "both.py", str(Path(__file__).parent)]
    sweeps = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [sweep.wait(60) for sweep in sweeps] == [0, 0]
    assert [len(calls(job(seed))) for seed in range(4)] == [1] * 4


def test_the_time_left_is_that_of_the_rounds_left_at_each_methods_pace() -> None:
    slow, fast, unknown = (CellJob(Cell(name, "", 0, {}), CellFolder(Path(name)), [], 10, 1) for name in ("slow", "fast", "new"))
    paces = {("slow", ""): [2.0], ("fast", ""): [1.0, 1.0]}
    run = Path("slow/version_0")
    run.mkdir(parents=True)
    (run / "metrics.csv").write_text("round\n1\n2\n3\n4\n")
    assert time_left([slow, fast], [], paces, 1) == 6 * 2 + 10 * 1
    assert time_left([slow, fast], [], paces, 2) == 12  # a run is not divided
    assert time_left([unknown], [], paces, 1) == pytest.approx(10 * 4 / 3)
    assert time_left([slow], [], {}, 1) is None


def test_what_a_cell_says_is_on_the_disk_before_it_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    synced = list[str]()
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(next(Path().glob(".cell.json.*")).read_text()))
    monkeypatch.setattr(Path, "replace", lambda aside, path: synced.append(path.name))
    write_whole(Path("cell.json"), "all of it")
    assert synced == ["all of it", "cell.json"]
