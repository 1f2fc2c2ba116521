"""What a checkpoint's manifest says, in types that hold: the only place where it is read.

A file that is damaged (missing, cut short, other than its checksum) is a :class:`DamagedError`, and there may be an older
checkpoint. One that is whole and says what no run can have written is a plain :class:`FederationError`: somebody made it, and is
told.
"""

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_fed.errors import DamagedError, FederationError
from lightning_fed.formatting import shown
from lightning_fed.storage.client_store import FileRecord, file_record
from lightning_fed.storage.disk import write_synced
from lightning_fed.storage.fields import Fields, numbers, parse
from lightning_fed.storage.index import NAME as INDEX_NAME
from lightning_fed.storage.index import number_of

FORMAT = 4
"""3 had a journal, which all checkpoints of a run shared."""

SERVER_FILE = "server.safetensors"
Metrics = dict[str, float]
"""Numbers by name: the columns of a round."""

Setting = bool | int | float | str | None
NAME = re.compile(r"round_(\d{6,})", re.ASCII)


@dataclass(frozen=True)
class Best:
    """The round that was best on validation data.

    Args:
        round: which one, the first among equals.
        val: its headline on validation data.
        test: on test data; NaN where these were not measured.
    """

    round: int
    val: float
    test: float


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint's own file holds; the rest is in files that it names. It is never written again.

    Args:
        round: the last finished round.
        identity: what must agree with a run that continues it: ``method``, ``seed``, ``clients`` (how many) and ``data``.
        threads: torch threads that the run has computed with: sums depend on it.
        server: the server's file.
        index: the names of the index files, which name those of the clients, by their numbers.
        rows: the metrics of the rounds since the checkpoint before, at least of its own.
        best: the round that was best on validation data so far; None: nothing was measured on such data.
        target: the value that the headline was to reach; None: there was none.
        reached: what it took to reach the target: ``target/…``.
        settings: what else the run was made with, by name: a run that continues it says where it differs.
    """

    round: int
    identity: dict[str, Any]
    threads: int
    server: FileRecord
    index: dict[int, str]
    rows: list[Metrics]
    best: Best | None = None
    target: float | None = None
    reached: Metrics = field(default_factory=dict)
    settings: dict[str, Setting] = field(default_factory=dict)

    @property
    def last_client(self) -> int:
        """The first is -1: the server, of a method that trains on everybody's data."""
        return int(self.identity["clients"]) - 1


def round_named(name: str) -> int | None:
    """The round that a folder or a file is named after; None for another name."""
    match = NAME.fullmatch(name)
    return int(match[1]) if match and name == f"round_{int(match[1]):06d}" else None


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write it and return once it is on the disk."""
    body = json.dumps(asdict(manifest))
    write_synced(path, json.dumps({"format": FORMAT, "crc32": _checksum(body, FORMAT), "body": body}).encode())


def read_manifest(path: Path) -> Manifest:
    """Read what :func:`write_manifest` wrote: in the folder of its checkpoint, or among those of earlier rounds."""
    body = Fields(parse(_body(path), str(path)), str(path))
    identity = body.fields("identity")
    for name in ("method", "data"):
        identity.text(name)
    identity.integer("seed")
    identity.integer("clients", least=1)
    round = body.integer("round", least=1)
    if (named := round_named(path.stem) or round_named(path.parent.name)) not in (None, round):
        raise FederationError(f"{path} is of round {round}, but is named after round {named}: put it where it belongs.")
    server = file_record(body.fields("server"))
    if server["file"] != SERVER_FILE:
        raise body.refused("server", f"the file {SERVER_FILE}")
    return Manifest(
        round,
        identity.content,
        body.integer("threads", least=1),
        server,
        _index(body, identity.integer("clients") - 1),
        _rows(body, round),
        body.optional("best", lambda name: _best(body.fields(name), round)),
        body.optional("target", body.number),
        numbers(body.fields("reached").content, f"reached of {path}"),
        _settings(body.fields("settings")),
    )


def _index(body: Fields, last: int) -> dict[int, str]:
    names, index = body.fields("index"), {}
    for number, key in body.numbered("index", -1, number_of(last)).items():
        index[number] = names.text(key)
        if not INDEX_NAME.fullmatch(index[number]):
            raise names.refused(key, "the name of an index file, 32 digits from 0 to f and .json")
    return index


def _rows(body: Fields, round: int) -> list[Metrics]:
    rows = [numbers(row, f"One of the rows of {body.where}") for row in body.entries("rows")]
    if not rows or [row.get("round") for row in rows] != list(range(round - len(rows) + 1, round + 1)) or len(rows) > round:
        raise FederationError(
            f"{body.where} has rows of the rounds {shown([row.get('round') for row in rows])}, expected that of {round} and those "
            "before: no lightning-fed wrote this."
        )
    return rows


def _best(fields: Fields, round: int) -> Best:
    return Best(fields.integer("round", 1, round), fields.number("val"), fields.number("test"))


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
    if version != FORMAT or isinstance(version, float | bool):
        raise DamagedError(f"{path} has format {version}, this version reads {FORMAT}")
    if checksum != crc32:
        raise DamagedError(f"{path} is damaged (its checksum does not match)")
    return body


def _checksum(body: str, version: int) -> int:
    return zlib.crc32(body.encode(), version)  # which a change of either changes
