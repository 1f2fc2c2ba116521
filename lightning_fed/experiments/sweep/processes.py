"""Processes of cells."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from lightning_fed.system.children import started_in_folder

PROGRAM = (sys.executable, *([] if started_in_folder() else ["-P"]), "-m", "lightning_fed")
"""The command that runs a cell in a new process."""


class CellProcess(Protocol):
    """A process, with the methods of :class:`subprocess.Popen` that are needed.

    Attributes:
        sentinel: a file descriptor that can be read once the process has ended; None: only :meth:`poll` tells.
    """

    sentinel: int | None

    def poll(self) -> int | None:
        """Its exit code, the negative number of the signal that ended it, or None while it runs."""

    def wait(self, timeout: float) -> int:
        """Wait for the exit code. Raises :class:`subprocess.TimeoutExpired` after ``timeout`` seconds."""

    def send_signal(self, number: int, /) -> None:
        """Send it a signal, if it is running."""

    def kill(self) -> None:
        """Kill it and the processes that it has started."""


class Start(Protocol):
    """Starts processes of cells."""

    def __call__(self, args: Sequence[str], log: Path, lock: int, variables: Mapping[str, str]) -> CellProcess:
        """Start a process.

        Args:
            args: arguments of ``lightning-fed``.
            log: file to which its output is appended.
            lock: an open file that it holds as long as it lives.
            variables: environment variables in addition to those of this process.
        """


class OwnProcess(subprocess.Popen[bytes]):
    """A new process for a cell, see :class:`Start`; it imports everything anew."""

    sentinel: int | None = None

    def __init__(self, args: Sequence[str], log: Path, lock: int, variables: Mapping[str, str], threads: int) -> None:
        with log.open("ab") as said:
            super().__init__(
                [*PROGRAM, *args],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                env=environment(threads) | dict(variables),
                pass_fds=[lock],
                start_new_session=True,  # Ctrl-C only reaches the sweep, which passes it on
            )

    def kill(self) -> None:
        os.killpg(self.pid, signal.SIGKILL)


def environment(threads: int) -> dict[str, str]:
    """Environment of a process that runs cells with this number of torch threads."""
    limits = {f"{library}_NUM_THREADS": str(threads) for library in ("OMP", "MKL", "OPENBLAS")}
    return os.environ | limits | {"PYTHONUNBUFFERED": "1"}


def own_processes(threads: int) -> Start:
    """Starts a new process for each cell."""
    return partial(OwnProcess, threads=threads)
