"""Records, each a dict, in JSON Lines, JSON and Parquet files, compressed by gzip or not, or of a data set of the hub."""

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lightning_fed.data.files.columns import FILE, PARQUET
from lightning_fed.data.files.table import ROLES, find_files
from lightning_fed.data.hub import load_from_hub, optional
from lightning_fed.data.lines import GZIP
from lightning_fed.errors import FederationError, require

ENDINGS = (".jsonl", ".json", ".gz", PARQUET)
"""Of the files that are read here."""


class Record(NamedTuple):
    """What stands in one place.

    Args:
        where: file and number, from 1, the subject of an error's sentence.
        fields: what it says, by name; :data:`.FILE` is the name of its file without endings.
        role: the set that it is of, one of :data:`.ROLES`; None: nobody says.
    """

    where: str
    fields: dict[str, Any]
    role: str | None


def read_records(path: str, role: str | None = None) -> Iterator[Record]:
    """The records of a file, of all files in a folder or with a pattern of names (``train_*.json``) in order of their paths, or
    of a data set of the hub, ``owner/name``.

    Args:
        path: of these.
        role: the set that they are of; of a data set of the hub, its own sets are.
    """
    place = Path(path).expanduser()
    if not place.exists() and not place.suffix and path.count("/") == 1:
        yield from _of_hub(path)
        return
    found = sorted(place.parent.glob(place.name)) if "*" in place.name else find_files(path, ENDINGS)
    require(len(found) > 0, f"Found no file {path}: check the path in --data.init_args.")
    for file in found:
        name = file.name.partition(".")[0]
        for number, fields in enumerate(_of_file(file), start=1):
            where = f"{file}, record {number},"
            require(isinstance(fields, Mapping), f"{where} is {str(fields)[:60]!r}, expected an object with names.")
            yield Record(where, {**fields, FILE: name}, role)


def _of_hub(name: str) -> Iterator[Record]:
    sets = load_from_hub(name, option="path")
    require(any(one.lower() in ROLES for one in sets), f"{name} has the sets {', '.join(sets)}: expected one that is called train.")
    for role, rows in sets.items():
        if role.lower() in ROLES:
            for number, fields in enumerate(rows, start=1):
                yield Record(f"{name}, {role}, record {number},", {**fields, FILE: role}, role)


def _of_file(file: Path) -> Iterator[Any]:
    if file.suffix.lower() == PARQUET:
        parquet = optional("pyarrow.parquet", "hub")
        try:
            yield from parquet.read_table(file).to_pylist()
        except (OSError, ValueError) as error:
            raise FederationError(f"{file} cannot be read as Parquet ({' '.join(str(error).split())[:200]}).") from error
        return
    try:
        content = file.read_bytes()
        text = (gzip.decompress(content) if content.startswith(GZIP) else content).decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise FederationError(f"{file} cannot be read ({error}): expected JSON Lines or JSON in UTF-8.") from error
    if text.lstrip().startswith("["):
        yield from _parsed(text, str(file))
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _parsed(line, f"{file}, line {number},")


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise FederationError(f"{where} is no JSON ({error}): write an object on each line, or a list of objects.") from error
