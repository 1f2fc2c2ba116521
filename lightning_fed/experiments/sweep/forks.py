"""Processes of cells that are forked from one with all imports done."""

import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from types import TracebackType

from lightning_fed.errors import FederationError
from lightning_fed.experiments.sweep.processes import environment
from lightning_fed.system.signals import without_preemption

FORK_SERVER = (sys.executable, "-m", "lightning_fed.cli.fork_server")
"""The command that forks itself for cells; its last argument is its end of the pipe."""

LIBRARIES = {"datasets", "pandas", "peft", "scipy", "sklearn", "tokenizers", "torchvision", "transformers"}
"""Libraries that take long to import and that not all runs need."""

LOST = 128 + signal.SIGTERM
"""Stands for the exit code of a fork whose state is unknown. If it is still running, it keeps holding its cell."""


@dataclass(frozen=True)
class CellRequest:
    """Asks the fork server for a process with this number; for the other fields see :class:`Start`. The lock follows."""

    number: int
    args: list[str]
    log: Path
    variables: dict[str, str]


@dataclass(frozen=True)
class SignalRequest:
    """Asks the fork server to send a signal to a process; for SIGKILL also to the processes that it has started."""

    number: int
    signal: int


@dataclass(frozen=True)
class ImportRequest:
    """Tells the fork server which modules cells will import."""

    modules: list[str]


@dataclass(frozen=True)
class Ended:
    """The fork server's message that a process has ended.

    Args:
        number: number of the process.
        code: its exit code, or the negative number of the signal that ended it.
    """

    number: int
    code: int


class ForkServer:
    """Starts processes of cells as forks of a process that has imported torch, Lightning and what else they need. A fork is a
    separate process, but starts without waiting for imports. If the server dies, the next cell starts another one.

    Args:
        threads: number of torch threads of each cell.
    """

    _connection: Connection
    _process: subprocess.Popen[bytes]
    _is_ready: bool

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._numbers = count()
        self._forks: dict[int, Fork] = {}
        self._launch()

    def __enter__(self) -> "ForkServer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the server. Running forks continue."""
        self._end()

    def __call__(self, args: Sequence[str], log: Path, lock: int, variables: Mapping[str, str]) -> "Fork":
        """Start a process, see :class:`Start`."""
        if self._process.poll() is not None:
            self.receive()  # pending messages
            self._end()
            self._launch()
            self.prepare()
        number = next(self._numbers)
        self._forks[number] = fork = Fork(self, number)
        self._send(CellRequest(number, list(args), log, dict(variables)), lock)
        return fork

    def prepare(self) -> None:
        """Let the server import those of :data:`LIBRARIES` that this process has imported to build the cells' objects."""
        self._send(ImportRequest([name for name in sys.modules if name.partition(".")[0] in LIBRARIES]))

    def give(self, number: int, of: int) -> None:
        """Send a signal to a process."""
        if self._is_ready:
            self._send(SignalRequest(number, of))
        else:  # it has not started any process yet
            self._end()

    def receive(self, seconds: float = 0.0) -> None:
        """Process messages of the server, waiting up to ``seconds`` for them.

        Raises:
            FederationError: if the server has ended before it could start anything.
        """
        try:
            while self._connection.poll(seconds):
                word = self._connection.recv()
                if isinstance(word, Ended):
                    self._forks.pop(word.number).returncode = word.code
                else:
                    self._is_ready = True
        except (EOFError, ConnectionError):
            self._lose()
            if not self._is_ready:
                said = self._process.communicate()[1].decode(errors="replace").strip().rpartition("\n")[2]
                raise FederationError(
                    f"The process that cells are forked from has ended while it started ({said or 'without a word'}): give each "
                    "cell its own with --isolate."
                ) from None

    def _send(self, request: CellRequest | SignalRequest | ImportRequest, lock: int | None = None) -> None:
        try:
            self._connection.send(request)
            if lock is not None:
                send_handle(self._connection, lock, self._process.pid)
        except ConnectionError:
            self.receive()  # it has ended, which is reported there

    def _launch(self) -> None:
        self._connection, theirs = Pipe()
        self._is_ready = False
        with without_preemption():
            self._process = subprocess.Popen(
                [*FORK_SERVER, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=environment(self._threads),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        theirs.close()

    def _end(self) -> None:
        with self._process:
            self._process.terminate()
        self._connection.close()
        self._lose()

    def _lose(self) -> None:
        """Mark all forks as lost: their exit codes will never arrive."""
        for fork in self._forks.values():
            fork.returncode = LOST
        self._forks.clear()


class Fork:
    """A process that the fork server has started."""

    def __init__(self, server: ForkServer, number: int) -> None:
        self.returncode: int | None = None
        self._server = server
        self._number = number

    def poll(self) -> int | None:
        """See :class:`CellProcess`."""
        if self.returncode is None:
            self._server.receive()
        return self.returncode

    def wait(self, timeout: float) -> int:
        """See :class:`CellProcess`."""
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("fork", timeout)
            self._server.receive(0.05)
        return code

    def send_signal(self, number: int, /) -> None:
        """See :class:`CellProcess`."""
        if self.poll() is None:
            self._server.give(self._number, number)

    def kill(self) -> None:
        """See :class:`CellProcess`."""
        if self.poll() is None:
            self._server.give(self._number, signal.SIGKILL)
