"""What a checkpoint's own files say, in types that hold: the only place where they are read.

A file that is damaged (missing, cut short, other than its checksum) is a :class:`DamagedError`, and there may be an older
checkpoint. One that is whole and says what no run can have written is a plain :class:`FederationError`: somebody made it, and is
told.
"""

import json
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_fed.errors import DamagedError, FederationError
from lightning_fed.storage.client_store import FileRecord, owner_and_client
from lightning_fed.storage.fields import Fields, numbers, parse
from lightning_fed.storage.journal import Extent

FORMAT = 3
"""2 had no settings, and a journal without ``after``."""

SERVER_FILE = "server.safetensors"
Setting = bool | int | float | str | None
NAME = re.compile(r"round_(\d{6,})", re.ASCII)


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint's own file holds; the rest is in the journal and in the files of states.

    Args:
        round: the last finished round.
        identity: what must agree with a run that continues it: ``method``, ``seed``, ``clients`` (how many) and ``data``.
        threads: torch threads that the run has computed with: sums depend on it.
        server: the server's file.
        journal: how much of the journal belongs to it.
        best: the round that was best on validation data so far; None: nothing was measured on such data.
        settings: what else the run was made with, by name: a run that continues it says where it differs.
    """

    round: int
    identity: dict[str, Any]
    threads: int
    server: FileRecord
    journal: Extent
    best: int | None = None
    settings: dict[str, Setting] = field(default_factory=dict)


@dataclass(frozen=True)
class JournalLine:
    """A line of the journal: what is new in a checkpoint.

    Args:
        round: of the checkpoint.
        after: the round of the checkpoint before it, 0 if there is none: what the journal has of later rounds was played again.
        history: the metrics of the rounds since then.
        clients: the files of the private states that changed.
        kept: the files of what the server keeps for each client that changed.
        since: round of the last merged fit turn, of the clients for which it changed.
    """

    round: int
    after: int
    history: list[dict[str, float]]
    clients: dict[int, FileRecord]
    kept: dict[int, FileRecord]
    since: dict[int, int]


def round_of(path: Path) -> int | None:
    """The round of a checkpoint's folder by its name; None for what is no such folder."""
    match = NAME.fullmatch(path.name)
    named = match is not None and path.name == f"round_{int(match[1]):06d}"
    return int(match[1]) if match and named and path.is_dir() and not path.is_symlink() else None


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write it and return once it is on the disk."""
    body = json.dumps(asdict(manifest))
    with path.open("w") as file:
        file.write(json.dumps({"format": FORMAT, "crc32": _checksum(body, FORMAT), "body": body}))
        file.flush()
        os.fsync(file.fileno())


def read_manifest(path: Path) -> Manifest:
    """Read what :func:`write_manifest` wrote, in the folder of its checkpoint."""
    body = Fields(parse(_body(path), str(path)), str(path))
    identity = body.fields("identity")
    for name in ("method", "data"):
        identity.text(name)
    identity.integer("seed")
    identity.integer("clients", least=1)
    round = body.integer("round", least=1)
    if NAME.fullmatch(path.parent.name) and round != round_of(path.parent):
        raise FederationError(f"{path} is of round {round}, but lies in the folder {path.parent.name}: put it where it belongs.")
    server = _file_record(body.fields("server"))
    if server["file"] != SERVER_FILE:
        raise body.refused("server", f"the file {SERVER_FILE}")
    return Manifest(
        round,
        identity.content,
        body.integer("threads", least=1),
        server,
        _extent(body),
        body.optional("best", lambda name: body.integer(name, 1, round)),
        _settings(body.fields("settings")) if "settings" in body.content else {},
    )


def read_entries(lines: list[Any], manifest: Manifest, where: str) -> list[JournalLine]:
    """The lines of the journal that a checkpoint is made of, oldest first, without those that were played again.

    Args:
        lines: of the part of the journal that belongs to the checkpoint.
        manifest: of the checkpoint.
        where: which file it is.
    """
    entries: list[JournalLine] = []
    for number, line in enumerate(lines, start=1):
        place = f"Line {number} of {where}"
        entry = _entry(Fields(line, place), entries[-1].round if entries else 0, manifest)
        while entries and entries[-1].round > entry.after:
            entries.pop()
        played = sum(len(one.history) for one in entries) + len(entry.history)
        if entry.after != (entries[-1].round if entries else 0) or played != entry.round:
            raise FederationError(
                f"{place} is of round {entry.round} after round {entry.after}, but the rounds before it end with "
                f"{played - len(entry.history)} and it has {len(entry.history)} more: no lightning-fed wrote this."
            )
        entries.append(entry)
    if (last := entries[-1].round if entries else 0) != manifest.round:
        raise FederationError(f"The manifest is of round {manifest.round}, but its part of {where} ends with round {last}.")
    return entries


def _entry(line: Fields, before: int, manifest: Manifest) -> JournalLine:
    round = line.integer("round", least=1)
    after = line.integer("after", 0, round - 1) if "after" in line.content else before
    history = [numbers(row, f"A row of {line.where}") for row in line.entries("history")]
    for number, row in enumerate(history, start=round - len(history) + 1):
        if row.get("round") != number:
            raise FederationError(f"{line.where} has a row of round {row.get('round')} where that of {number} should be.")
    last = manifest.identity["clients"] - 1  # the first is -1: the server, of a method that trains on everybody's data
    since = line.fields("since")
    turns = {client: since.integer(key, 1, round) for client, key in line.numbered("since", -1, last).items()}
    kept = _file_records(line, "kept", "server", last) if "kept" in line.content else {}
    return JournalLine(round, after, history, _file_records(line, "clients", "client", last), kept, turns)


def _file_records(line: Fields, name: str, owner: str, last: int) -> dict[int, FileRecord]:
    """Files of states by client."""
    records = line.fields(name)
    return {client: _file_record(records.fields(key), (owner, client)) for client, key in line.numbered(name, -1, last).items()}


def _file_record(record: Fields, belongs: tuple[str, int] | None = None) -> FileRecord:
    """A file of a state.

    Args:
        record: its fields.
        belongs: the owner and the client whose state it must be; None for the server's own.
    """
    file = record.text("file")
    if belongs is not None and owner_and_client(file) != belongs:
        raise record.refused("file", f"that of {belongs[0]} {belongs[1]}, as in client_000003_round_000012.safetensors")
    return {"file": file, "bytes": record.integer("bytes"), "crc32": record.integer("crc32", most=2**32 - 1)}


def _extent(body: Fields) -> Extent:
    parts = body.entries("journal")
    if len(parts) != 2:
        raise body.refused("journal", "two numbers")
    extent = Fields(dict(zip(Extent._fields, parts, strict=True)), f"journal of {body.where}")
    return Extent(extent.integer("bytes"), extent.integer("crc32", most=2**32 - 1))


def _settings(settings: Fields) -> dict[str, Setting]:
    for name, value in settings.content.items():
        if not isinstance(value, Setting):
            raise settings.refused(name, "a number, a text or null")
    return settings.content


def _body(path: Path) -> str:
    """The text of a manifest whose checksum is right."""
    try:
        document: Mapping[str, Any] = json.loads(path.read_bytes())
        body, crc32, version = document["body"], document["crc32"], document["format"]
        checksum = _checksum(body, version)
    except OSError as error:
        raise DamagedError(f"{path} is missing or cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise DamagedError(f"{path} is damaged ({' '.join(str(error).split())})") from error
    if version not in (2, FORMAT) or isinstance(version, float | bool):
        raise DamagedError(f"{path} has format {version}, this version reads 2 and {FORMAT}")
    if checksum != crc32:
        raise DamagedError(f"{path} is damaged (its checksum does not match)")
    return body


def _checksum(body: str, version: int) -> int:
    return zlib.crc32(body.encode(), 0 if version == 2 else version)  # which a change of either changes
