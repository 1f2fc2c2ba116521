"""Processes of cells that are forked from one with all imports done: the fork server of :mod:`multiprocessing`."""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, NoReturn

from lightning_fed.errors import FederationError
from lightning_fed.experiments.sweep.processes import Start, environment
from lightning_fed.system.signals import without_preemption

PROGRAM = "lightning_fed"
"""The module that runs a cell."""

PRELOADED = "lightning_fed.cli.fork_server"
"""The module that the server imports after the libraries that cells need."""

LIBRARIES = {"datasets", "pandas", "peft", "scipy", "sklearn", "tokenizers", "torchvision", "transformers"}
"""Libraries that take long to import and that not all runs need."""

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


class Fork:
    """A process for a cell, see :class:`Start` and :class:`CellProcess`: a fork of a process that has imported torch, Lightning and
    what else this process has imported to check the cells. It starts without waiting for imports. If the server dies, the next cell
    starts another one.

    Raises:
        FederationError: if the server has ended before it could start anything.
    """

    def __init__(self, args: Sequence[str], log: Path, lock: int, variables: Mapping[str, str], threads: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*(name for name in sys.modules if name.partition(".")[0] in LIBRARIES), PRELOADED])
        given = PROGRAM, list(args), log, dict(variables), OpenFile(lock)
        self._process = context.Process(target=play, args=given)
        before = dict(os.environ)
        os.environ.update(environment(threads))
        try:
            with without_preemption(signal.SIGINT):  # Ctrl-C only reaches the sweep, which passes it on
                self._process.start()
        except (EOFError, OSError) as error:
            raise FederationError(
                "The process that cells are forked from has ended while it started: give each cell its own with --isolate."
            ) from error
        finally:
            os.environ.clear()
            os.environ.update(before)

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


def forks(threads: int) -> Start:
    """Starts a fork for each cell."""
    return partial(Fork, threads=threads)


def play(program: str, args: Sequence[str], log: Path, variables: Mapping[str, str], lock: int) -> NoReturn:
    """Run a cell's program, in the process that was forked for it; for the arguments see :class:`Start`. ``lock`` stays open as
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
    os.environ.update(variables)
    sys.argv[1:] = args
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
