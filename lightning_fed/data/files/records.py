"""Records, which are dicts, of JSON Lines, JSON and Parquet files, compressed by gzip or not, or of a Hugging Face dataset."""

import gzip
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lightning_fed.data.files.columns import FILE, PARQUET, names_of, read_parquet
from lightning_fed.data.files.table import ROLES, find_files
from lightning_fed.data.hub import is_saved, load_from_hub, load_saved
from lightning_fed.data.lines import COMPRESSED, GZIP
from lightning_fed.data.paths import is_hidden
from lightning_fed.data.split import TEST
from lightning_fed.errors import FederationError, require

ENDINGS = (".jsonl", ".json", COMPRESSED, PARQUET)
"""Suffixes of the files that are read here."""


class Record(NamedTuple):
    """A record with its location.

    Args:
        where: file and number, from 1, as the subject of error messages.
        fields: values by name, None in place of NaN; in files, :data:`.FILE` is the name of the file without suffixes.
        role: the set that it belongs to, one of :data:`.ROLES`. None: unknown.
    """

    where: str
    fields: dict[str, Any]
    role: str | None


def read_records(path: str, role: str | None = None, config: str | None = None) -> Iterator[Record]:
    """The records of a file, of all files in a folder or with a pattern of names (``train_*.json``, ``*/train.json``) in order of
    their paths, of a folder that ``save_to_disk`` wrote, or of a hub dataset, ``owner/name``.

    Args:
        path: path, pattern or name.
        role: the set of the records. A dataset may have its own sets; with ``test``, only its test set is read, and with ``train``
            only the others.
        config: configuration of a hub dataset, if it has several.
    """
    found = files_of(path)
    if found is None:
        yield from _of_sets(path, load_from_hub(path, config, option="path"), role)
        return
    require(config is None, f"Got config={config!r}, which only datasets of the hub have, and {path} is none: leave it out.")
    if is_saved(folder := Path(path).expanduser()):
        saved = load_saved(folder)
        yield from _of_sets(path, saved, role) if isinstance(saved, Mapping) else _of_set(path, saved, role)
        return
    for file, name in zip(found, names_of(found), strict=True):
        for number, fields in enumerate(_of_file(file), start=1):
            where = f"{file}, record {number},"
            require(isinstance(fields, Mapping), f"{where} is {str(fields)[:60]!r}, expected an object with names.")
            require(FILE not in fields, f"{where} has a field {FILE!r}, which is reserved for the name of the file: rename it.")
            yield Record(where, {**_without_nan(fields), FILE: name}, role)


def files_of(path: str) -> list[Path] | None:
    """The files of a path or pattern, see :func:`read_records`, at least one. None: it is the name of a hub dataset."""
    place = Path(path).expanduser()
    if not place.exists() and path.count("/") == 1 and "*" not in path and place.suffix.lower() not in ENDINGS:
        return None
    found = _matching(place) if "*" in path else find_files(path, ENDINGS)
    require(len(found) > 0, f"Found no file {path}: check the path in --data.init_args.")
    return found


def _matching(place: Path) -> list[Path]:
    """The files that match a pattern and are not hidden, in order of their paths."""
    first = next(number for number, part in enumerate(place.parts) if "*" in part)
    root = Path(*place.parts[:first])
    found = root.glob(str(Path(*place.parts[first:])))
    return sorted(file for file in found if file.is_file() and not is_hidden(file, root))


def _of_sets(name: str, sets: Mapping[str, Any], wanted: str | None) -> Iterator[Record]:
    allowed = [role for role, of_role in ROLES.items() if wanted is None or (of_role == TEST) == (wanted == "test")]
    used = {role: rows for role, rows in sets.items() if role.lower() in allowed}
    require(len(used) > 0, f"{name} has the sets {', '.join(sets)}: expected one that is called {wanted or 'train'}.")
    for role, rows in used.items():
        yield from _of_set(f"{name}, {role}", rows, role)


def _of_set(where: str, rows: Any, role: str | None) -> Iterator[Record]:
    for number, fields in enumerate(rows, start=1):
        yield Record(f"{where}, record {number},", _without_nan(fields), role)


def _without_nan(given: Any) -> Any:
    """A value with None in place of NaN, anywhere in it: pandas writes NaN where a text is missing."""
    if isinstance(given, Mapping):
        return {name: _without_nan(value) for name, value in given.items()}
    if isinstance(given, list):
        return [_without_nan(value) for value in given]
    return None if isinstance(given, float) and math.isnan(given) else given


def _of_file(file: Path) -> Iterator[Any]:
    if file.suffix.lower() == PARQUET:
        yield from read_parquet(file).to_pylist()
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
            try:
                record = _parsed(line, f"{file}, line {number},")
            except FederationError:
                require(
                    not _is_json(text),
                    f"{file} is one object over several lines: write an object on each line, or a list of objects.",
                )
                raise
            yield record


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    return True


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"column {error.colno}" if "\n" not in text.strip() else f"line {error.lineno}, column {error.colno}"
        raise FederationError(
            f"{where} is not JSON ({error.msg}, {place}): write an object on each line, or a list of objects."
        ) from error
