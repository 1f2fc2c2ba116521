"""Index of the files that hold the clients' states: files for a few hundred clients each, which are never changed."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_fed.errors import DamagedError
from lightning_fed.formatting import shown
from lightning_fed.storage.client_store import FILE, FileRecord
from lightning_fed.system.disk import write_synced

CLIENTS = 256
"""Maximum number of clients per index file. For each participant a round writes at most this many entries, and a manifest has one
name per this many clients."""

NAME = re.compile(r"[0-9a-f]{32}\.json", re.ASCII)


@dataclass(frozen=True)
class ClientEntry:
    """The files of a client.

    Args:
        client: file of its private state, if there is one.
        server: file of what the server keeps for it, if there is one.
        last_round: round of its last merged fit turn, if there is one.
        turns: number of its merged fit turns.
    """

    client: FileRecord | None
    server: FileRecord | None
    last_round: int | None
    turns: int = 0

    @property
    def records(self) -> list[FileRecord]:
        return [record for record in (self.client, self.server) if record is not None]


def write_index(folder: Path, entries: Mapping[int, ClientEntry]) -> str:
    """Write the entries of some clients; returns the file's name, which is a hash of its content: a damaged file is recognized by
    its name, and files of different rounds do not collide.
    """
    data = json.dumps({str(client): asdict(entry) for client, entry in entries.items()}).encode()
    name = _name(data)
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / ".new"  # a file with the final name may exist and be in use
    write_synced(aside, data)
    aside.replace(folder / name)
    return name


def read_index(path: Path) -> dict[int, ClientEntry]:
    """The entries of a file by client. Raises :class:`DamagedError` if the file is missing or damaged."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DamagedError(f"{path} is missing or cannot be read ({error.strerror})") from error
    if _name(data) != path.name:
        raise DamagedError(f"{path} is damaged (its checksum does not match)")
    entries = {int(client): ClientEntry(**entry) for client, entry in json.loads(data).items()}
    files = (record["file"] for entry in entries.values() for record in entry.records)
    if wrong := [file for file in files if not FILE.fullmatch(file)]:  # such files are deleted later
        raise DamagedError(f"{path} names {shown(wrong[0])}, which is not a file of a client's state")
    return entries


def _name(data: bytes) -> str:
    return f"{hashlib.blake2b(data, digest_size=16).hexdigest()}.json"
