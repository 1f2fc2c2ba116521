"""States of all clients: recently used ones in memory, the rest on disk."""

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
from lightning_fed.system.disk import write_synced
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
    """Read a state that :func:`write_state` wrote.

    Raises:
        DamagedError: if the file is missing, truncated or changed.
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
    """Stores a state per client in limited memory: the clients' private states, or what the server keeps for them.

    A state is written once, when memory runs short or for a checkpoint, and under a new name each time. Files of earlier
    checkpoints are therefore never changed; the code that writes checkpoints removes them.

    Args:
        folder: folder of the files; created when the first is written.
        memory_limit: bytes of states to keep in memory. The most recently used state is always kept.
        owner: prefix of the files' names; stores with different owners may share a folder.

    Attributes:
        records: the last written file of each client's state.
    """

    def __init__(self, folder: Path, memory_limit: int, owner: str = "client") -> None:
        self.folder = folder.absolute()  # states are also read after the run, perhaps from another working directory
        self.memory_limit = memory_limit
        self.owner = owner
        self._memory: OrderedDict[int, State] = OrderedDict()
        self._bytes = 0
        self._dirty: dict[int, int] = {}  # client → round of a state that is only in memory
        self.records: dict[int, FileRecord] = {}
        self._changed: set[int] = set()  # clients whose file flush() has not returned yet

    def __contains__(self, client: int) -> bool:
        return client in self._memory or client in self.records

    def __iter__(self) -> Iterator[int]:
        """The clients that have a state, in order."""
        return iter(sorted(self._memory.keys() | self.records.keys()))

    def get(self, client: int) -> State:
        """The state of a client. Raises :class:`KeyError` if it has none."""
        if client not in self._memory:
            self._remember(client, read_state(self.folder, self.records[client]))
        self._memory.move_to_end(client)
        return self._memory[client]

    def find(self, client: int) -> State | None:
        """The state of a client; None if it has none."""
        return self.get(client) if client in self else None

    def part(self, client: int, name: str, start: int, stop: int) -> Tensor:
        """Values of a one-dimensional tensor of a client's state, read from where it is, in memory or on disk."""
        if client in self._memory:
            return self._memory[client][name][start:stop]
        with safetensors.safe_open(self.folder / self.records[client]["file"], framework="pt") as file:
            values: Tensor = file.get_slice(name)[start:stop]
        return values

    def put(self, client: int, state: State, round: int) -> None:
        """Replace the state of a client by its state after ``round``."""
        self._forget(client)
        self._dirty[client] = round
        self._remember(client, state)

    def flush(self) -> set[int]:
        """Write states that are only in memory; returns the clients whose file has changed since the last call."""
        for client in list(self._dirty):
            self._write(client)
        changed, self._changed = self._changed, set()
        return changed

    def in_use(self) -> set[str]:
        """Names of the files that may be read again: none if all states fit into memory."""
        return set() if self.records.keys() <= self._memory.keys() else {record["file"] for record in self.records.values()}

    def rounds(self, client: int) -> set[int]:
        """Rounds of a client's states on disk: those that checkpoints refer to, and possibly a newer one."""
        names = (FILE.fullmatch(path.name) for path in self.folder.glob(f"{self.owner}_{client:06d}_round_*"))
        return {int(match[3]) for match in names if match}

    def restore(self, records: Mapping[int, FileRecord], folder: Path | None = None) -> None:
        """Continue with the states in these files, by client, in the store's folder or another one, which is not changed."""
        self._memory.clear()
        self._dirty.clear()
        self._bytes, self._changed = 0, set()
        self.records = dict(records)
        if folder is not None and folder.absolute() != self.folder:
            whole = {client: str(folder.absolute() / record["file"]) for client, record in records.items()}
            self.records = {client: {**record, "file": whole[client]} for client, record in records.items()}

    def _write(self, client: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._free(f"{self.owner}_{client:06d}_round_{self._dirty[client]:06d}")
        before = self.records.get(client)
        self.records[client] = write_state(path, self._memory[client])
        del self._dirty[client]
        if before is not None and client in self._changed:  # no checkpoint refers to it
            (self.folder / before["file"]).unlink(missing_ok=True)
        self._changed.add(client)

    def _free(self, name: str) -> Path:
        """A path that does not exist yet: a repeated round must not overwrite files that may still be needed."""
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
    """States that exist only within a round; no checkpoint refers to them. It has its own folder."""

    def clear(self) -> None:
        """Drop all states and their files, including those of a killed run."""
        self.restore({})
        shutil.rmtree(self.folder, ignore_errors=True)
