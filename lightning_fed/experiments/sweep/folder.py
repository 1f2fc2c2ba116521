"""The folder of a cell: who plays it, and what became of it."""

import csv
import fcntl
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_fed.errors import FederationError
from lightning_fed.experiments.sweep.settings import read_json
from lightning_fed.locks import taken


@dataclass(frozen=True)
class CellRecord:
    """What became of a cell so far.

    Args:
        status: ``finished``, ``failed`` or ``interrupted``.
        seconds: wall-clock time of all attempts together.
        command: what played it.
        error: the last line that a failed one printed.
        versions: of Python and the libraries that decide numbers.
        commit: of the repository in the working directory, ``+changes`` if files differ from it; empty without one.
        machine: system, processor, cores.
    """

    status: str
    seconds: float = 0.0
    command: str = ""
    error: str = ""
    versions: str = ""
    commit: str = ""
    machine: str = ""


class CellFolder:
    """A cell's folder: the run's ``version_<n>``, ``log.txt``, and ``cell.json``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = path / "log.txt"

    @property
    def result(self) -> CellRecord | None:
        """What ``cell.json`` says; None before the first attempt. Raises :class:`FederationError` if no sweep wrote it."""
        path = self.path / "cell.json"
        if not path.is_file():
            return None
        content, known = read_json(path), CellRecord.__dataclass_fields__
        if "status" not in content:
            raise FederationError(f"{path} is damaged: it has no status. Remove it, and the cell is played again.")
        return CellRecord(**{key: value for key, value in content.items() if key in known})

    def record(self, result: CellRecord) -> None:
        """Write ``cell.json``."""
        write_whole(self.path / "cell.json", json.dumps(asdict(result), indent=1))

    @property
    def run(self) -> Path | None:
        """Folder of the newest run that has finished a round."""
        found = [path.parent for path in self.path.glob("version_*/metrics.csv")]
        runs = [path for path in found if path.name.removeprefix("version_").isdecimal()]
        return max(runs, key=lambda path: int(path.name.removeprefix("version_")), default=None)

    @property
    def rounds(self) -> int:
        """How many rounds that run has finished."""
        if self.run is None:
            return 0
        with (self.run / "metrics.csv").open(newline="") as file:
            return sum(1 for _ in csv.reader(file)) - 1

    @property
    def last_line(self) -> str:
        """The last line of the log that says something."""
        lines = self.log.read_text(errors="replace").split("\n") if self.log.is_file() else []
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    @contextmanager
    def locked(self) -> Iterator[int | None]:
        """Hold the cell within the block; gives None if another process does.

        What is given is the open lock: a process that inherits it goes on holding the cell, also when its parent is killed.

        Raises:
            FederationError: where files cannot be locked.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT)
        try:
            try:
                held = taken(descriptor)
            except OSError as error:  # of some network file systems
                raise FederationError(
                    f"{self.path} cannot be locked ({error.strerror}), so two could play it: give the sweep a folder on a file "
                    "system with locks."
                ) from error
            while not held and taken(descriptor, shared=True):
                # Who plays the cell would have left no room for this either: somebody only asks for its status.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
                time.sleep(0.001)
                held = taken(descriptor)
            yield descriptor if held else None
        finally:
            os.close(descriptor)

    @property
    def status(self) -> str:
        """``waiting`` before the first attempt, ``playing`` while somebody holds it, else what became of it."""
        result = self.result
        if result is None:
            return "waiting"
        if result.status == "finished":
            return "finished"  # and nobody plays it again
        descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT)
        try:
            if not taken(descriptor, shared=True):
                return "playing"
            result = self.result  # of who may have held it until now
        finally:
            os.close(descriptor)
        return result.status if result else "waiting"


def write_whole(path: Path, text: str) -> None:
    """Write a file aside, and then put it in its place: whoever reads it, on whichever machine, has all of it, or what was there
    before.
    """
    aside = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}")
    aside.write_text(text)
    aside.replace(path)
