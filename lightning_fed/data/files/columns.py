"""Columns of CSV, TSV and Parquet files as text, and the location of each row, for errors."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from lightning_fed.data.hub import optional
from lightning_fed.data.lines import refuse_doubles, unpacked
from lightning_fed.errors import FederationError, one_line, require

PARQUET = ".parquet"

ENDINGS = (".csv", ".tsv", ".csv.gz", ".tsv.gz", PARQUET)
"""Suffixes of the files that are read here."""

FILE = "file"
"""The column that every example has besides those of the files: the name of its file without the suffix, with its folders if two
files of a set have the same name.
"""

MISSING = ("", "?", "na", "<na>", "n/a", "nan", "nat", "null", "none")
"""Fields, in lower case, that stand for a missing value."""

WHOLE = re.compile(r"\s*(-?(?:0|[1-9][0-9]*))(?:\.0*)?\s*")
"""A whole number as text, as programs write it, with or without a point."""

NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
"""A missing value in the name of a folder."""

Lines = tuple[Sequence[str], Iterator[tuple[str, list[str]]]]
"""The header of a file, and for each line its location and its fields; see :func:`.csv_table`."""


def read_columns(
    files: list[Path], sets: Sequence[str] | None, lines: Callable[[Path], Lines], roots: Sequence[str | None] = ()
) -> tuple[dict[str, list[str]], list[str], list[int]]:
    """The columns of files (at least one) with the same header, by name, those of their paths last: :data:`FILE`, and folders of a
    partitioned Parquet table, such as ``site=a`` below one of ``roots``, if each file has such a one. Also the header, and the
    number of rows of each file. ``sets`` has the set of each file; None: there is one set.
    """
    called = names_of(files, sets)
    rows: list[list[str]] = []
    sizes: list[int] = []
    owners: list[str] = []
    header: list[str] | None = None
    for file, name in zip(files, called, strict=True):
        names, of_file = lines(file)
        require(FILE not in names, f"{file} has a column {FILE!r}, which is reserved for the name of the file: rename the column.")
        header = list(names) if header is None else header
        require(list(names) == header, f"{file} has the columns {', '.join(names)}, but {files[0]} has {', '.join(header)}.")
        rows += [fields for _, fields in of_file]
        sizes.append(len(rows) - len(owners))
        owners += [name] * sizes[-1]
    require(len(rows) > 0, f"{files[0]} has no line below its header.")
    header = header or []
    columns = dict(zip(header, map(list, zip(*rows, strict=True)), strict=True)) | {FILE: owners}
    partitions = [_partition_of(file, roots) for file in files]
    for name in partitions[0]:
        if name not in columns and all(name in of_file for of_file in partitions):
            columns[name] = [of_file[name] for of_file, size in zip(partitions, sizes, strict=True) for _ in range(size)]
    return columns, header, sizes


def is_missing(values: NDArray[Any], named: Sequence[str] = ()) -> NDArray[np.bool_]:
    """Which fields, shape (N,), stand for a missing value: none of those that are ``named`` as classes or categories."""
    fields = np.char.strip(values)
    return np.isin(np.char.lower(fields), MISSING) & ~np.isin(fields, [name for name in named if name])


def refuse_missing(
    values: NDArray[Any], column: str, use: str, place: Callable[[int], str], classes: Sequence[str] | None = None
) -> None:
    """Refuse missing values among the fields of a column, shape (N,), which ``use`` describes. ``place`` returns the location of an
    example, for the error; ``classes`` are the names that classes are known to have, whatever they are. None: the column has no
    classes.
    """
    missing = is_missing(values, classes or ())
    if missing.any():
        bad = int(np.argmax(missing))
        what, remedy = repr(str(values[bad])) if values[bad] else "nothing", "fill it in, or take the line out"
        if classes is not None and values[bad]:
            remedy = "fill it in, take the line out, or, if it is a class, name it in --data.init_args.classes with all others"
        raise FederationError(f"{place(bad)} has {what} in the column {column!r}, which is {use}: {remedy}.")


def place_of(row: int, files: list[Path], lines: Callable[[Path], Lines]) -> str:
    """The file and line of an example. Files are read again, because this is only needed for an error."""
    return next(islice((where for file in files for where, _ in lines(file)[1]), row, None))


def names_of(files: Sequence[Path], sets: Sequence[str] | None = None) -> list[str]:
    """The name of each file, see :data:`FILE`.

    Raises:
        FederationError: for files of a set that differ in their suffix alone: both may hold the same examples.
    """
    sets = sets or [""] * len(files)
    plain = [*map(unpacked, files)]
    stems = Counter(zip(sets, (file.stem for file in plain), strict=True))
    root = os.path.commonpath([file.absolute().parent for file in plain])
    names = [
        file.stem if stems[of_set, file.stem] == 1 else str(file.absolute().with_suffix("").relative_to(root))
        for file, of_set in zip(plain, sets, strict=True)
    ]
    found: dict[tuple[str, str], Path] = {}
    for file, key in zip(files, zip(sets, names, strict=True), strict=True):
        other = found.setdefault(key, file)
        require(other is file, f"{other} and {file} have the same name {key[1]}: rename one, or take it out.")
    return names


def class_targets(values: NDArray[Any]) -> NDArray[Any]:
    """Classes as integers if all are written as integers, else unchanged: 01 and 1 are two names.

    Args:
        values: strings, shape (N,).

    Returns:
        Shape (N,): int64; strings; or float64 if all are numbers and some have a decimal point, which may not be integers. Numbers
        that float64 does not tell apart stay strings.
    """
    texts = [text.strip() for text in values.tolist()]
    if all(map(_is_whole, texts)):
        return np.array(list(map(int, texts)), dtype=np.int64)
    digits = all(text.removeprefix("-").isdecimal() for text in texts)
    if digits or not all(map(is_number, texts)):
        return values
    numbers = values.astype(np.float64)
    return values if (np.isfinite(numbers) & (np.abs(numbers) >= 2**53)).any() else numbers


def categories_of(values: NDArray[Any]) -> NDArray[Any]:
    """Categories, or names of clients or groups, shape (N,), as text: if all are whole numbers, without a point. Programs write 1
    as 1.0 where a column has gaps. 01 and 1e3 are names.
    """
    matches = [WHOLE.fullmatch(text) for text in values.tolist()]
    return np.array([match[1] for match in matches if match], dtype=str) if all(matches) else values


def _is_whole(text: str) -> bool:
    return text.removeprefix("-").isdecimal() and str(int(text)) == text and abs(int(text)) < 2**63


def is_number(text: str) -> bool:
    """Whether the text is a number, which is also not as Python groups its digits (1_0)."""
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text


def read_parquet(file: Path) -> Any:
    """A Parquet file as a pyarrow table."""
    parquet = optional("pyarrow.parquet", "hub")
    try:
        return parquet.read_table(file)
    except (OSError, ValueError) as error:
        raise FederationError(f"{file} cannot be read as Parquet ({one_line(error)[:200]}).") from error


def parquet_table(file: Path) -> Lines:
    """The header of a Parquet file, and for each row its location and its fields as text; see :func:`.csv_table`."""
    table = read_parquet(file)
    refuse_doubles(table.column_names, f"The header of {file}")
    rows = zip(*(column.to_pylist() for column in table.columns), strict=True)
    placed = ((f"{file}, row {n},", fields) for n, fields in enumerate(rows, start=1))
    return table.column_names, ((place, [_as_text(value, place) for value in fields]) for place, fields in placed)


def _partition_of(file: Path, roots: Sequence[str | None]) -> dict[str, str]:
    """The values in the names of a Parquet file's folders, as Hive and Spark write them."""
    folders = [Path(root).expanduser() for root in roots if root is not None and file.suffix.lower() == PARQUET]
    below = next((file.relative_to(folder).parent.parts for folder in folders if folder in file.parents), ())
    pairs = [part.split("=", 1) for part in below if "=" in part]
    return {unquote(name): "" if value == NO_VALUE else unquote(value) for name, value in pairs}


def _as_text(value: Any, place: str) -> str:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise FederationError(f"{place} has bytes that are not text in UTF-8 ({error.object[:20]!r}): save text.") from error
    return "" if value is None else str(int(value) if isinstance(value, bool) else value)
