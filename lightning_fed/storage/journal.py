"""What grows with a run, written once: a line per checkpoint, appended to one file."""

import json
import os
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from lightning_fed.errors import DamagedError
from lightning_fed.storage.disk import naming
from lightning_fed.storage.fields import parse


class Extent(NamedTuple):
    """How much of a journal belongs to a checkpoint: its first ``bytes`` bytes, and their CRC-32."""

    bytes: int
    crc32: int


EMPTY = Extent(0, 0)


class Journal:
    """A file of JSON lines that only ever gets longer. A checkpoint refers to the part that was there when it was made, so that it
    need not repeat it: what a checkpoint writes does not grow with the run. What lies behind the part that checkpoints refer to was
    written by a run that was killed; it is cut off before the next line is written.

    Args:
        path: the file.
        extent: how much of it there is to continue from.
    """

    def __init__(self, path: Path, extent: Extent = EMPTY) -> None:
        self.path = path
        self.extent = extent

    def append(self, entry: dict[str, Any]) -> Extent:
        """Write a line and return once it is on the disk."""
        line = (json.dumps(entry) + "\n").encode()
        with naming(self.path), self.path.open("r+b" if self.path.exists() else "xb") as file:
            file.truncate(self.extent.bytes)
            file.seek(self.extent.bytes)
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self.extent = Extent(self.extent.bytes + len(line), zlib.crc32(line, self.extent.crc32))
        return self.extent

    def trim(self) -> None:
        """Cut off what lies behind the extent."""
        if self.path.is_file() and self.path.stat().st_size > self.extent.bytes:
            with naming(self.path), self.path.open("r+b") as file:
                file.truncate(self.extent.bytes)

    def read(self) -> list[Any]:
        """The lines of the extent. Raises :class:`DamagedError` if the file is missing, too short or changed."""
        try:
            size = self.path.stat().st_size
            with self.path.open("rb") as file:
                data = file.read(min(size, self.extent.bytes))
        except OSError as error:
            raise DamagedError(f"{self.path} is missing or cannot be read ({error.strerror})") from error
        if len(data) != self.extent.bytes or zlib.crc32(data) != self.extent.crc32:
            raise DamagedError(f"{self.path} is damaged ({len(data)} bytes, {self.extent.bytes} were written)")
        return [parse(line, f"Line {number} of {self.path}") for number, line in enumerate(data.splitlines(), start=1)]
