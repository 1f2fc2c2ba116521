"""Processes of cells that are forked from one with all imports done: the fork server of :mod:`multiprocessing`."""

import atexit
import fcntl
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.reduction import DupFd
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NoReturn, Self

from lightning_fed.errors import FederationError
from lightning_fed.experiments.sweep.processes import environment
from lightning_fed.system.children import safe_path
from lightning_fed.system.disk import in_one_line, naming
from lightning_fed.system.locks import taken
from lightning_fed.system.signals import without_preemption

PROGRAM = "lightning_fed"
"""The module that runs a cell."""

PRELOADED = "lightning_fed.cli.fork_server"
"""The module that the server imports after the libraries that cells need."""

LIBRARIES = {"datasets", "pandas", "peft", "scipy", "sklearn", "tokenizers", "torchvision", "transformers"}
"""Libraries that take long to import and that not all runs need."""

NAMES = "LIGHTNING_FED_SERVER_IMPORTS"
"""The environment variable with the file that tells the server which of these to import, a name per line."""

LOOK = 0.02
"""Seconds between the server's looks into that file."""

UNKNOWN, LOST = 255, 128 + signal.SIGTERM
"""The exit code that multiprocessing gives to a fork whose server has died, and what stands for it here. If the fork is still
running, it keeps holding its cell.
"""


@dataclass(frozen=True)
class OpenFile:
    """A file that a process gets with its arguments, where it stands for the file's descriptor.

    Args:
        descriptor: the descriptor.
    """

    descriptor: int

    def __reduce__(self) -> tuple[Any, ...]:
        return _descriptor, (DupFd(self.descriptor),)


def _descriptor(passed: Any) -> Any:
    return passed.detach()


class ForkServer:
    """Starts processes for cells, see :class:`.Start`: forks of a process that has imported torch, Lightning and what else this
    process has imported to check the cells. They start without waiting for imports. If that process dies, the next cell starts
    another one.

    As a context it starts that process at once, to import what all runs need while this one checks them and names what they need
    besides.

    Args:
        threads: number of torch threads of a cell.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._names: Any = None  # an open file, which this process locks until the first cell starts
        self._named: dict[str, None] = {}  # in their order

    def __enter__(self) -> Self:
        self._names = NamedTemporaryFile("w")  # removed when it is closed
        fcntl.flock(self._names, fcntl.LOCK_EX)
        forkserver.set_forkserver_preload([PRELOADED])
        with safe_path(), self._as_cells(**{NAMES: self._names.name}):
            forkserver.ensure_running()
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):  # of a full disk: it was raised when names were written
            self._names.close()

    def name_libraries(self) -> None:
        """Tell the server which libraries this process has imported, so that it imports them, too."""
        libraries = [name for name in sys.modules if name.partition(".")[0] in LIBRARIES and name not in self._named]
        self._named |= dict.fromkeys(libraries)
        if self._names is not None:
            path = Path(self._names.name)
            with in_one_line(lambda: "Make room, or set TMPDIR to another folder.", path), naming(path):
                self._names.writelines(f"{name}\n" for name in libraries)
                self._names.flush()

    def __call__(self, args: Sequence[str], log: Path, lock: int, variables: Mapping[str, str]) -> "Fork":
        """Start a fork, see :class:`.Start`.

        Raises:
            FederationError: if the server has ended before it could start anything.
        """
        self.name_libraries()
        if self._names is not None:
            fcntl.flock(self._names, fcntl.LOCK_UN)
        forkserver.set_forkserver_preload([*self._named, PRELOADED])  # for another server
        given = PROGRAM, list(args), log, dict(variables), OpenFile(lock)
        process = multiprocessing.get_context("forkserver").Process(target=play, args=given)
        try:
            with safe_path(), self._as_cells():
                process.start()
        except (EOFError, OSError) as error:
            raise FederationError(
                "The process that cells are forked from has ended while it started: give each cell its own with --isolate."
            ) from error
        return Fork(process)

    @contextmanager
    def _as_cells(self, **variables: str) -> Iterator[None]:
        """What starts now has the environment of a cell. Ctrl-C only reaches the sweep, which passes it on."""
        before = dict(os.environ)
        os.environ.update(environment(self._threads) | variables)
        try:
            resource_tracker.ensure_running()  # the server starts it otherwise, which would unblock Ctrl-C
            with without_preemption(signal.SIGINT):
                yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def named_libraries() -> Iterator[str]:
    """In the server: what the sweep's checks import of :data:`LIBRARIES`, while they run; nothing if the server was started after
    them.
    """
    if (name := os.environ.pop(NAMES, None)) is None:
        return
    with suppress(FileNotFoundError), Path(name).open() as file:  # a sweep that has ended has removed it
        part, last = "", False
        while not last:
            last = taken(file.fileno(), shared=True)
            whole, _, part = (part + file.read()).rpartition("\n")  # the last line may not be finished
            yield from whole.split()
            if not last:
                time.sleep(LOOK)


class Fork:
    """A process that was forked for a cell, see :class:`.CellProcess`.

    Args:
        process: the process.
    """

    def __init__(self, process: Any) -> None:
        self._process = process
        self.sentinel: int | None = process.sentinel

    def poll(self) -> int | None:
        code = self._process.exitcode
        return LOST if code == UNKNOWN else code

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("fork", timeout)
        return code

    def send_signal(self, number: int, /) -> None:
        self._give(os.kill, number)

    def kill(self) -> None:
        self._give(os.killpg, signal.SIGKILL)

    def _give(self, send: Any, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended just now
                send(self._process.pid, number)


def play(program: str, args: Sequence[str], log: Path, variables: Mapping[str, str], lock: int) -> NoReturn:
    """Run a cell's program, in the process that was forked for it; for the arguments see :class:`.Start`. ``lock`` stays open as
    long as the process lives.
    """
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # drops one that has arrived already
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a sweep in the background of a shell ignores it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGUSR1})  # blocked when the server was started
    multiprocessing.set_start_method(None, force=True)  # the usual one, not that of this process
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    run_program(args, variables, program)


def run_program(args: Sequence[str], variables: Mapping[str, str], module: str) -> NoReturn:
    """Run ``python -m`` this module with variables added to its environment and end the process as Python does, but without
    deallocating objects: a fork would copy all of their memory to decrease reference counts.
    """
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # PyTorch's, of 200 operators
        finalizer.atexit = False
    os.environ.update(variables)
    sys.argv[1:] = args
    sys.modules.pop(f"{module}.__main__", None)  # a sweep's console script has imported it, of which runpy would warn
    code = 1
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does when it ends
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
