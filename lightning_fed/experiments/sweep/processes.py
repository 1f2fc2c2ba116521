"""The process that plays a cell."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

PROGRAM = (sys.executable, "-m", "lightning_fed")
"""What plays a cell in a process of its own."""


class CellProcess(Protocol):
    """A process, with what is needed of :class:`subprocess.Popen`."""

    def poll(self) -> int | None:
        """Its exit code, the negative number of the signal that ended it, or None while it lasts."""

    def wait(self, timeout: float) -> int:
        """The same when it has ended. Raises :class:`subprocess.TimeoutExpired` if it has not within so many seconds."""

    def send_signal(self, number: int, /) -> None:
        """Give it a signal, if it lasts."""

    def kill(self) -> None:
        """End it and the processes that it has started."""


class Start(Protocol):
    """Starts processes of cells."""

    def __call__(self, args: Sequence[str], log: Path, lock: int, variables: Mapping[str, str]) -> CellProcess:
        """Start one.

        Args:
            args: what follows ``lightning-fed`` on its command line.
            log: the file at whose end it writes what it says.
            lock: an open file that it holds as long as it lives.
            variables: of its environment, beside those of this process.
        """


class OwnProcess(subprocess.Popen[bytes]):
    """A process that is started for a cell, see :class:`Start`: Python, torch and all."""

    def __init__(self, args: Sequence[str], log: Path, lock: int, variables: Mapping[str, str], threads: int) -> None:
        with log.open("ab") as said:
            super().__init__(
                [*PROGRAM, *args],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                env=environment(threads) | dict(variables),
                pass_fds=[lock],
                start_new_session=True,  # Ctrl-C comes to the sweep alone, which passes it on
            )

    def kill(self) -> None:
        os.killpg(self.pid, signal.SIGKILL)


def environment(threads: int) -> dict[str, str]:
    """Of a process that plays cells with so many torch threads."""
    limits = {f"{library}_NUM_THREADS": str(threads) for library in ("OMP", "MKL", "OPENBLAS")}
    return os.environ | limits | {"PYTHONUNBUFFERED": "1"}


def own_processes(threads: int) -> Start:
    """Starts a process for each cell."""
    return partial(OwnProcess, threads=threads)
