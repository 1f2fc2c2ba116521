"""Files with one example per line and columns; errors name the file and the line."""

import csv
import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning_fed.errors import FederationError, require
from lightning_fed.formatting import counted

LONGEST_FIELD = 2**31 - 1
"""Maximum number of characters of a field. Python's default of 131,072 guards against files that never close a quotation."""

OTHERS = (".json", ".jsonl", ".parquet", ".arrow")
"""Suffixes of files that :class:`lightning_fed.data.HFDataset` reads."""

GZIP = b"\x1f\x8b"
"""First bytes of a gzip file."""

COMPRESSED = ".gz"
"""Suffix of a gzip file."""


def unpacked(file: Path) -> Path:
    """The path without the suffix of a gzip file: the name says what is in it."""
    return file.with_suffix("") if file.suffix.lower() == COMPRESSED else file


def csv_rows(path: Path, **options: Any) -> Iterator[tuple[int, list[str]]]:
    """The non-empty lines of a CSV file with their numbers, from 1, including the header.

    Args:
        path: path of the file, in UTF-8, compressed by gzip or not.
        **options: options of ``csv.reader``.

    Raises:
        FederationError: if the file is not UTF-8 text or not CSV: a quotation that never ends would hold all lines below it.
    """
    require(
        unpacked(path).suffix.lower() not in OTHERS,
        f"{path} is not CSV, by its name: HFDataset reads such files (--data HFDataset).",
    )
    limit, line = csv.field_size_limit(LONGEST_FIELD), 1
    try:
        with path.open("rb") as start:
            is_packed = start.read(2) == GZIP
        with gzip.open(path, "rb") if is_packed else path.open("rb") as file:
            reader = csv.reader(
                (text.decode("utf-8-sig" if n == 0 else "utf-8") for n, text in enumerate(file)), strict=True, **options
            )
            for fields in reader:
                line = reader.line_num
                if fields:
                    yield line, fields
                line += 1
    except UnicodeDecodeError as error:
        byte = f"{error.object[error.start]:#04x}"
        raise FederationError(f"{path}, line {line}, is not text in UTF-8 (byte {byte}): save it as UTF-8.") from error
    except csv.Error as error:
        raise FederationError(
            f"{path}, line {line}, cannot be read ({error}): close every quotation mark, and double those within."
        ) from error
    except (OSError, EOFError) as error:
        raise FederationError(f"{path} cannot be read ({error}).") from error
    finally:
        csv.field_size_limit(limit)


def csv_table(
    path: Path,
    needed: Sequence[str] | None = None,
    header: Sequence[str] | None = None,
    skip_short: bool = False,
    **options: Any,
) -> tuple[Sequence[str], Iterator[tuple[str, list[str]]]]:
    """The header of a CSV file, and for each line below it its location, for errors, and its fields.

    Args:
        path: see :func:`csv_rows`.
        needed: the columns to return, in this order. None: all.
        header: names of the columns. None: the first line has them.
        skip_short: skip lines that lack a needed column, instead of refusing them and those that have too many.
        **options: see :func:`csv_rows`.
    """
    rows = csv_rows(path, **options)
    columns = next(rows, (1, []))[1] if header is None else header
    refuse_doubles(columns, f"The header of {path}")
    wanted = columns if needed is None else needed
    require({*wanted} <= {*columns}, f"{path} has the columns {', '.join(columns)}, but needs {', '.join(wanted)}.")
    places = [columns.index(name) for name in wanted]

    def fields_of_lines() -> Iterator[tuple[str, list[str]]]:
        for line, fields in rows:
            where, lacks = f"{path}, line {line},", len(fields) <= max(places)
            require(
                skip_short or (not lacks and len(fields) <= len(columns)),
                f"{where} has {counted(len(fields), 'column')}, expected {len(columns)}: complete the line, and put fields "
                "that contain commas or line breaks in quotation marks.",
            )
            if not lacks:
                yield where, [fields[place] for place in places]

    return columns, fields_of_lines()


def refuse_doubles(names: Sequence[Any], what: str) -> None:
    """Refuse names that occur twice."""
    double = next((name for place, name in enumerate(names) if name in names[:place]), None)
    require(double is None, f"{what} has the name {double!r} twice: give each a name of its own.")


def existing(file: str | Path, remedy: str) -> Path:
    """The path of an existing file; raises an error with ``remedy`` if there is none."""
    path = Path(file).expanduser()
    require(path.is_file(), f"Found no file {path.absolute()}: {remedy}.")
    return path
