"""Manifests of checkpoints."""

import json
import re
import zlib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from lightning_fed.errors import DamagedError, one_line
from lightning_fed.formatting import shown
from lightning_fed.storage.client_store import FileRecord
from lightning_fed.storage.index import NAME as INDEX_NAME
from lightning_fed.system.disk import write_synced

FORMAT = 6
"""Format of manifests; other formats are not read."""

SERVER_FILE = "server.safetensors"
Metrics = dict[str, float]
"""Numbers by name: the columns of a round."""

Setting = bool | int | float | str | None
NAME = re.compile(r"round_(\d{6,})", re.ASCII)


@dataclass(frozen=True)
class Best:
    """The best round on validation data.

    Args:
        round: its number, the first of equally good ones.
        val: its monitored metric on validation data.
        test: its monitored metric on test data; NaN if test data were not evaluated.
    """

    round: int
    val: float
    test: float


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint's manifest, which names its other files. It is never changed.

    Args:
        round: the last finished round.
        identity: what a run that continues it must agree with: ``method``, ``seed``, ``clients`` (their number) and ``data``.
        threads: number of torch threads of the run, on which sums depend.
        server: the server's file; this and the next two are set when the checkpoint is written.
        index: names of the index files, which name those of the clients, by their numbers.
        rows: the metrics of the rounds since the previous checkpoint, at least of its own round.
        best: the best round on validation data so far. None: validation data have not been evaluated.
        target: the target of the monitored metric. None: there is none.
        reached: the cost of reaching the target: ``target/…``.
        settings: further settings of the run, by name; a run that continues it reports differences.
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
    """The round in the name of a folder or a file; None for another name."""
    match = NAME.fullmatch(name)
    return int(match[1]) if match and name == f"round_{int(match[1]):06d}" else None


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write a manifest and return once it is on the disk."""
    body = json.dumps(asdict(manifest))
    write_synced(path, json.dumps({"format": FORMAT, "crc32": _checksum(body, FORMAT), "body": body}).encode())


def read_manifest(path: Path) -> Manifest:
    """Read a manifest, in the folder of its checkpoint or among those of earlier rounds.

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
    if unknown := body.keys() - {known.name for known in fields(Manifest)}:
        raise DamagedError(f"{path} has {', '.join(sorted(unknown))}, which this version does not know: a newer one wrote it")
    best = Best(**body["best"]) if body["best"] is not None else None
    manifest = Manifest(**body | {"best": best, "index": {int(number): name for number, name in body["index"].items()}})
    if (named := round_named(path.stem) or round_named(path.parent.name)) not in (None, manifest.round):
        raise DamagedError(f"{path} is of round {manifest.round}, but is named after round {named}: put it where it belongs")
    if wrong := [name for name in manifest.index.values() if not INDEX_NAME.fullmatch(name)]:  # such files are deleted later
        raise DamagedError(f"{path} names {shown(wrong[0])}, which is not an index file")
    return manifest


def _checksum(body: str, version: int) -> int:
    return zlib.crc32(body.encode(), version)  # depends on both
