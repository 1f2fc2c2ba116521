"""Which files hold the states of the clients: index files of a few hundred clients each, which are never changed."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_fed.errors import DamagedError
from lightning_fed.formatting import shown
from lightning_fed.storage.client_store import FILE, FileRecord
from lightning_fed.storage.disk import write_synced

CLIENTS = 256
"""How many clients an index file is of, at most. What a round writes for a client that takes part is at most so many entries, and a
manifest has a name for so many clients."""

NAME = re.compile(r"[0-9a-f]{32}\.json", re.ASCII)


@dataclass(frozen=True)
class ClientEntry:
    """What there is of a client.

    Args:
        client: the file of its private state, if it has one.
        server: the file of what the server keeps for it, if it does.
        last_round: round of its last fit turn that was merged, if there was one.
        turns: how many were merged.
    """

    client: FileRecord | None
    server: FileRecord | None
    last_round: int | None
    turns: int = 0

    @property
    def records(self) -> list[FileRecord]:
        """Its files."""
        return [record for record in (self.client, self.server) if record is not None]


def write_index(folder: Path, entries: Mapping[int, ClientEntry]) -> str:
    """Write the entries of some clients; returns the name of the file, the hash of what it holds: one that is damaged is known by
    its name, and those of different rounds lie beside each other.
    """
    data = json.dumps({str(client): asdict(entry) for client, entry in entries.items()}).encode()
    name = _name(data)
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / ".new"  # a file of this name may be there, and needed
    write_synced(aside, data)
    aside.replace(folder / name)
    return name


def read_index(path: Path) -> dict[int, ClientEntry]:
    """The entries of a file by client. Raises :class:`DamagedError` if it is missing or damaged."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DamagedError(f"{path} is missing or cannot be read ({error.strerror})") from error
    if _name(data) != path.name:
        raise DamagedError(f"{path} is damaged (its checksum does not match)")
    entries = {int(client): ClientEntry(**entry) for client, entry in json.loads(data).items()}
    files = (record["file"] for entry in entries.values() for record in entry.records)
    if wrong := [file for file in files if not FILE.fullmatch(file)]:  # such files are deleted one day
        raise DamagedError(f"{path} names {shown(wrong[0])}, which is no file of a client's state")
    return entries


def _name(data: bytes) -> str:
    return f"{hashlib.blake2b(data, digest_size=16).hexdigest()}.json"
