"""States of all clients: the recently used in memory, the rest on disk."""

import itertools
import os
import re
import shutil
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypedDict

import safetensors
import safetensors.torch
from torch import Tensor

from lightning_fed.errors import DamagedError
from lightning_fed.storage.disk import write_synced
from lightning_fed.tensors import State, count_bytes


class FileRecord(TypedDict):
    """A file that a checkpoint refers to: its name in its folder, its size and its CRC-32."""

    file: str
    bytes: int
    crc32: int


def write_state(path: Path, state: State) -> FileRecord:
    """Write tensors as safetensors and return once they are on the disk."""
    data = safetensors.torch.save({name: tensor.contiguous() for name, tensor in state.items()})
    write_synced(path, data)
    return {"file": path.name, "bytes": len(data), "crc32": zlib.crc32(data)}


def read_state(folder: Path, record: FileRecord) -> State:
    """Read what :func:`write_state` wrote.

    Raises:
        DamagedError: if the file is missing, cut short or changed.
    """
    path = folder / record["file"]
    try:
        size = path.stat().st_size
        data = path.read_bytes() if size == record["bytes"] else b""
    except OSError as error:
        raise DamagedError(f"{path} is missing or cannot be read ({error.strerror})") from error
    if len(data) != record["bytes"] or zlib.crc32(data) != record["crc32"]:
        raise DamagedError(f"{path} is damaged ({size} bytes, {record['bytes']} were written)")
    return safetensors.torch.load(data)


FILE = re.compile(r"(client|server)_(-?\d{5,})_round_(\d{6,})(?:_\d+)?\.safetensors", re.ASCII)
"""Names of the files of a store."""


class ClientStore:
    """One state per client that has one, bounded in memory: what clients keep to themselves, or what the server keeps for them.

    A state is written once: when memory runs short or when a checkpoint asks for it, whichever comes first, and under a new name
    each time, so that the files of earlier checkpoints stay as they are: whoever wrote these removes them.

    Args:
        folder: where the files go; created when the first is written.
        memory_limit: bytes of states to keep in memory. The state last used is always kept.
        owner: who keeps them, the first word of the files' names: stores of different owners may have one folder.

    Attributes:
        records: the file of each client's state that has been written, as it was when it was.
    """

    def __init__(self, folder: Path, memory_limit: int, owner: str = "client") -> None:
        self.folder = folder
        self.memory_limit = memory_limit
        self.owner = owner
        self._memory: OrderedDict[int, State] = OrderedDict()
        self._bytes = 0
        self._dirty: dict[int, int] = {}  # client → round of the state that is in memory only
        self.records: dict[int, FileRecord] = {}
        self._changed: set[int] = set()  # clients whose file no call of flush has named

    def __contains__(self, client: int) -> bool:
        return client in self._memory or client in self.records

    def __iter__(self) -> Iterator[int]:
        """The clients that have a state, in order."""
        return iter(sorted(self._memory.keys() | self.records.keys()))

    def get(self, client: int) -> State:
        """The state of a client. Raises :class:`KeyError` for a client that has none."""
        if client not in self._memory:
            self._remember(client, read_state(self.folder, self.records[client]))
        self._memory.move_to_end(client)
        return self._memory[client]

    def find(self, client: int) -> State | None:
        """The state of a client, None if it has none."""
        return self.get(client) if client in self else None

    def part(self, client: int, name: str, start: int, stop: int) -> Tensor:
        """Some values of a one-dimensional tensor of a client's state, which stays where it is: in memory or on disk."""
        if client in self._memory:
            return self._memory[client][name][start:stop]
        with safetensors.safe_open(self.folder / self.records[client]["file"], framework="pt") as file:
            values: Tensor = file.get_slice(name)[start:stop]
        return values

    def put(self, client: int, state: State, round: int) -> None:
        """Replace the state of a client by the one it has after ``round``."""
        self._forget(client)
        self._dirty[client] = round
        self._remember(client, state)

    def flush(self) -> set[int]:
        """Write what is in memory only; returns the clients whose file is another one than at the last call."""
        for client in list(self._dirty):
            self._write(client)
        changed, self._changed = self._changed, set()
        return changed

    def in_use(self) -> set[str]:
        """Names of the files that may have to be read again: none if memory has room for all states."""
        return set() if self.records.keys() <= self._memory.keys() else {record["file"] for record in self.records.values()}

    def rounds(self, client: int) -> set[int]:
        """Rounds of a client's states that are on the disk: those that checkpoints refer to, and perhaps a newer one."""
        names = (FILE.fullmatch(path.name) for path in self.folder.glob(f"{self.owner}_{client:06d}_round_*"))
        return {int(match[3]) for match in names if match}

    def restore(self, records: Mapping[int, FileRecord], folder: Path | None = None) -> None:
        """Continue with the states in these files, by client, in the store's folder or another one, which stays as it is."""
        self._memory.clear()
        self._dirty.clear()
        self._bytes, self._changed = 0, set()
        self.records = dict(records)
        if folder not in (None, self.folder):
            whole = {client: str(folder.absolute() / record["file"]) for client, record in records.items()}
            self.records = {client: {**record, "file": whole[client]} for client, record in records.items()}

    def _write(self, client: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._free(f"{self.owner}_{client:06d}_round_{self._dirty[client]:06d}")
        before = self.records.get(client)
        self.records[client] = write_state(path, self._memory[client])
        del self._dirty[client]
        if before is not None and client in self._changed:  # no checkpoint knows of it
            (self.folder / before["file"]).unlink(missing_ok=True)
        self._changed.add(client)

    def _free(self, name: str) -> Path:
        """A file that is not there yet: of a round that is played again, the one before may still be needed."""
        names = itertools.chain([name], (f"{name}_{again}" for again in itertools.count(2)))
        paths = (self.folder / f"{name}.safetensors" for name in names)
        return next(path for path in paths if not os.path.lexists(path))

    def _remember(self, client: int, state: State) -> None:
        self._memory[client] = state
        self._bytes += count_bytes(state)
        while self._bytes > self.memory_limit and len(self._memory) > 1:
            oldest = next(iter(self._memory))
            if oldest in self._dirty:
                self._write(oldest)
            self._forget(oldest)

    def _forget(self, client: int) -> None:
        if client in self._memory:
            self._bytes -= count_bytes(self._memory.pop(client))


class RoundStore(ClientStore):
    """States that nobody needs when a round is over; no checkpoint refers to them. Its folder is its own."""

    def clear(self) -> None:
        """Drop all states and their files, with those of a run that was killed."""
        self.restore({})
        shutil.rmtree(self.folder, ignore_errors=True)
