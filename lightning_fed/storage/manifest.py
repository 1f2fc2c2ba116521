"""What a checkpoint's manifest says."""

import json
import re
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_fed.errors import DamagedError, one_line
from lightning_fed.formatting import shown
from lightning_fed.storage.client_store import FileRecord
from lightning_fed.storage.disk import write_synced
from lightning_fed.storage.index import NAME as INDEX_NAME

FORMAT = 5
"""Of manifests: those of another format are not read."""

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
        val: its monitored metric on validation data.
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
        server: the server's file; this and the next two are known when it is written.
        index: the names of the index files, which name those of the clients, by their numbers.
        rows: the metrics of the rounds since the checkpoint before, at least of its own.
        best: the round that was best on validation data so far; None: nothing was measured on such data.
        target: the value that the monitored metric was to reach; None: there was none.
        reached: what it took to reach the target: ``target/…``.
        settings: what else the run was made with, by name: a run that continues it says where it differs.
    """

    round: int
    identity: dict[str, Any]
    threads: int
    server: FileRecord = field(default_factory=lambda: FileRecord(file=SERVER_FILE, bytes=0, crc32=0))
    index: dict[int, str] = field(default_factory=dict)
    rows: list[Metrics] = field(default_factory=list)
    best: Best | None = None
    target: float | None = None
    reached: Metrics = field(default_factory=dict)
    settings: dict[str, Setting] = field(default_factory=dict)


def round_named(name: str) -> int | None:
    """The round that a folder or a file is named after; None for another name."""
    match = NAME.fullmatch(name)
    return int(match[1]) if match and name == f"round_{int(match[1]):06d}" else None


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write it and return once it is on the disk."""
    body = json.dumps(asdict(manifest))
    write_synced(path, json.dumps({"format": FORMAT, "crc32": _checksum(body, FORMAT), "body": body}).encode())


def read_manifest(path: Path) -> Manifest:
    """Read what :func:`write_manifest` wrote: in the folder of its checkpoint, or among those of earlier rounds.

    Raises:
        DamagedError: if it is missing, changed, of another format, or named after another round.
    """
    try:
        document = json.loads(path.read_bytes())
        text, checksum, version = document["body"], document["crc32"], document["format"]
        changed = _checksum(text, version) != checksum
        body = {} if changed or version != FORMAT else json.loads(text)
    except OSError as error:
        raise DamagedError(f"{path} is missing or cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise DamagedError(f"{path} is damaged ({one_line(error)})") from error
    if version != FORMAT:
        raise DamagedError(f"{path} has format {version}, this version reads {FORMAT}")
    if changed:
        raise DamagedError(f"{path} is damaged (its checksum does not match)")
    best = Best(**body["best"]) if body["best"] is not None else None
    manifest = Manifest(**body | {"best": best, "index": {int(number): name for number, name in body["index"].items()}})
    if (named := round_named(path.stem) or round_named(path.parent.name)) not in (None, manifest.round):
        raise DamagedError(f"{path} is of round {manifest.round}, but is named after round {named}: put it where it belongs")
    if wrong := [name for name in manifest.index.values() if not INDEX_NAME.fullmatch(name)]:  # such files are deleted one day
        raise DamagedError(f"{path} names {shown(wrong[0])}, which is no index file")
    return manifest


def _checksum(body: str, version: int) -> int:
    return zlib.crc32(body.encode(), version)  # which a change of either changes
