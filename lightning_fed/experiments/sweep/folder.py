"""The folder of a cell: its lock and its results."""

import csv
import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lightning_fed.errors import FederationError, require
from lightning_fed.experiments.sweep.run_files import read_facts, read_settings, refuse_cut_clients
from lightning_fed.experiments.sweep.settings import read_json
from lightning_fed.system.disk import write_whole
from lightning_fed.system.folders import numbered
from lightning_fed.system.locks import taken

OVER = ("finished", "failed")
"""Statuses of a run that has ended."""

KINDS: dict[str, type | tuple[type, ...]] = {"seconds": (int, float), "rounds": int}
"""Types of what ``cell.json`` says; the rest is text."""


@dataclass(frozen=True)
class CellRecord:
    """The state of a cell so far.

    Args:
        status: ``finished``, ``failed`` or ``interrupted``.
        seconds: wall-clock time of all attempts together.
        command: command of the run.
        error: last line that a failed run printed.
        versions: versions of Python and of the libraries that affect results.
        commit: commit of the repository in the working directory, ``+changes`` if files differ from it; empty without one.
        machine: system, processor, cores.
        rounds: number of rounds that the run is to have.
    """

    status: str
    seconds: float = 0.0
    command: str = ""
    error: str = ""
    versions: str = ""
    commit: str = ""
    machine: str = ""
    rounds: int = 0


class CellFolder:
    """A cell's folder: the run's ``version_<n>``, ``log.txt``, and ``cell.json``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = path / "log.txt"

    @property
    def remedy(self) -> str:
        """What to do if files of its run are damaged, for the end of an error."""
        return f"Remove {self.path} to run it again."

    @property
    def _is_readable(self) -> bool:
        """Whether the folder exists and this user may read it; a report names those that may not be read, and leaves them out."""
        return os.access(self.path, os.R_OK | os.X_OK)

    @property
    def result(self) -> CellRecord | None:
        """The content of ``cell.json``; None before the first attempt, and if the folder may not be read. Raises
        :class:`FederationError` if no sweep wrote it.
        """
        path = self.path / "cell.json"
        if not self._is_readable or not path.is_file():
            return None
        remedy = " Remove it to run the cell again."
        content = read_json(path, remedy)
        known = {key: value for key, value in content.items() if key in CellRecord.__dataclass_fields__}
        require("status" in known, f"{path} is damaged: it has no status.{remedy}")
        for key, value in known.items():
            require(isinstance(value, KINDS.get(key, str)), f"{path} is damaged: it has {key} = {str(value)[:40]!r}.{remedy}")
        return CellRecord(**known)

    def record(self, result: CellRecord) -> None:
        """Write ``cell.json``."""
        write_whole(self.path / "cell.json", json.dumps(asdict(result), indent=1))

    def reopen(self, rounds: int) -> None:
        """Record that a finished run is to have more rounds, unless another process is running it, or has done so."""
        with self.locked() as lock:
            result, run = self.result, self.run
            if lock is not None and result and run and read_settings(run, self.remedy)["federation.rounds"] < rounds:
                self.record(replace(result, status="interrupted", rounds=rounds))

    def record_end(self) -> bool:
        """Record a run as finished that ended when its sweep had been killed, and return whether it is one. Only of a run without
        checkpoints (``keep: none``), which would be repeated: others end at once when they are continued.
        """
        result, run = self.result, self.run
        if result is None or result.status != "interrupted" or run is None or not (run / "run.json").is_file():
            return False
        if any(run.glob("checkpoints/round_*")) or not read_facts(run, self.remedy).get("finished"):
            return False
        self.record(replace(result, status="finished"))
        return True

    @property
    def run(self) -> Path | None:
        """Folder of the newest run that has finished a round."""
        found = numbered(path.parent for path in self.path.glob("version_*/metrics.csv")) if self._is_readable else {}
        return next(reversed(found), None)

    @property
    def rounds(self) -> int:
        """Number of rounds that this run has finished."""
        if self.run is None:
            return 0
        with (self.run / "metrics.csv").open(newline="") as file:
            return max(0, sum(1 for _ in csv.reader(file)) - 1)  # an empty file lacks its header, too

    def refuse_cut(self) -> None:
        """Raise :class:`FederationError` if files of a finished run are missing, or have fewer rounds or clients than it."""
        if self.status != "finished" or self.run is None:
            return
        require((self.run / "config.yaml").is_file(), f"{self.run} has no config.yaml, which its run wrote. {self.remedy}")
        finished = read_facts(self.run, self.remedy).get("rounds", 0)
        require(
            self.rounds >= finished,
            f"{self.run / 'metrics.csv'} has {self.rounds} rounds of a run that finished {finished}: it was cut. {self.remedy}",
        )
        refuse_cut_clients(self.run, self.remedy)

    @property
    def last_line(self) -> str:
        """The last non-empty line of the log."""
        lines = self.log.read_text(errors="replace").split("\n") if self.log.is_file() else []
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    @contextmanager
    def locked(self) -> Iterator[int | None]:
        """A context that locks the cell; yields None if another process holds the lock.

        Otherwise it yields the open lock file: a process that inherits it keeps holding the lock, even if its parent is killed.

        Raises:
            FederationError: if files cannot be locked, or the cell belongs to a user who lets nobody else write there.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT)
        except PermissionError as error:
            raise FederationError(
                f"{self.path} may not be written by this user: leave it to whoever began it, or give each other write access "
                "(umask 002 and a common group)."
            ) from error
        try:
            held = self._taken(descriptor)
            while not held and taken(descriptor, shared=True):
                # A running cell would hold the lock exclusively: another process is only reading the status.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
                time.sleep(0.001)
                held = taken(descriptor)
            yield descriptor if held else None
        finally:
            os.close(descriptor)

    @property
    def status(self) -> str:
        """``waiting`` before the first attempt and if a finished run was removed, ``playing`` while a process holds the lock, else
        the status of the last attempt.
        """
        result = self.result
        if result is not None and result.status == "finished":
            return "finished" if self.run else "waiting"
        try:
            descriptor = os.open(self.path / ".lock", os.O_RDONLY)  # it may be another user's
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return result.status if result else "waiting"
        try:
            if not self._taken(descriptor, shared=True):
                return "playing"
            result = self.result  # the process that held the lock may have written it
        finally:
            os.close(descriptor)
        return result.status if result else "waiting"

    def _taken(self, descriptor: int, shared: bool = False) -> bool:
        try:
            return taken(descriptor, shared)
        except OSError as error:  # on some network file systems
            raise FederationError(
                f"{self.path} cannot be locked ({error.strerror}), so two could play it: give the sweep a folder on a file system "
                "with locks."
            ) from error
