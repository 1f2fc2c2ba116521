"""Tables of numbers in CSV files."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_fed.data.files.table import Table, TableData, sets_of
from lightning_fed.data.lines import csv_table
from lightning_fed.data.partition.natural import ByColumn
from lightning_fed.data.tabular.scaled import ScaledColumns
from lightning_fed.errors import FederationError, require

MISSING = ("", "?", "na", "n/a", "nan", "null", "none")
"""What a field has, in lower case, of which nothing is known."""


class CSVFiles(ScaledColumns, TableData):
    """Numbers in CSV files with a header, one example per line. A network gets them as floats of shape (B, inputs), as they are or
    standardised; of a column of categories it gets a 0 or 1 for each of them.

    Besides its columns, an example has ``file``, the name of its file without the ending: with ``client: file`` each file is a
    client.

    Args:
        path: a file, or a folder with files that end in ``.csv`` or ``.tsv``, in UTF-8.
        target: the column that is to be predicted.
        input: the columns that are used; None: all but those that have another use.
        test_path: an official test set, in the same form.
        delimiter: what is between columns; None: a tab in files that end in ``.tsv``, else a comma.
        categorical: the columns that hold categories (one-hot, in the place of the column), or for each its categories in order,
            where not everybody has all of them. Categories that are found are in numerical, else in alphabetical order.
        **kwargs: see :class:`TableData`, and :class:`lightning_fed.data.tabular.scaled.ScaledColumns` for ``standardize`` and
            ``impute``. Missing is what is empty, or ``?``, ``NA``, ``N/A``, ``NaN``, ``null``, ``None``; where it is a category,
            what is imputed is how often there is each.
    """

    def __init__(
        self,
        path: str,
        target: str,
        input: list[str] | str | None = None,
        test_path: str | None = None,
        delimiter: str | None = None,
        categorical: list[str] | dict[str, list[str]] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.path = path
        self.target = target
        self.input = [input] if isinstance(input, str) else input
        self.test_path = test_path
        self.delimiter = delimiter
        self.categorical: dict[str, list[str] | None]
        self.categorical = dict(categorical) if isinstance(categorical, dict) else dict.fromkeys(categorical or ())
        self.titles: list[str] = []

    def read(self) -> Table:
        files, sets = sets_of(self.path, self.test_path, (".csv", ".tsv"))
        headers: list[Sequence[str]] = []
        lines, ends = [], [0]
        for file in files:
            own, rows = self._lines(file)
            headers.append(own)
            header = headers[0]
            require(own == header, f"{file} has the columns {', '.join(own)}, but {files[0]} has {', '.join(header)}.")
            lines += [fields for _, fields in rows]
            ends.append(len(lines))
        require(len(lines) > 0, f"{files[0]} has no line below its header.")
        columns = {name: np.array(values) for name, values in zip(header, zip(*lines, strict=True), strict=True)}
        require(self.target in columns, f"{files[0]} has the columns {', '.join(header)}, but no target {self.target!r}.")
        other_use = {self.target, self.split_column, self.partition.column if isinstance(self.partition, ByColumn) else None}
        names = self.input or [name for name in header if name not in other_use]
        lacking = [name for name in (*names, *self.categorical) if name not in columns]
        require(not lacking, f"{files[0]} has the columns {', '.join(header)}, but no input {', '.join(lacking)}.")
        require(len(names) > 0, f"{files[0]} has no column besides {', '.join(header)}: an input is needed.")
        unused = [name for name in self.categorical if name not in names]
        require(not unused, f"Got categorical={unused[:1]}, but the inputs are {', '.join(names)}: name inputs, or leave it out.")
        self.titles, parts = [], []
        for name in names:
            titles, part = self._one_hot(name, columns[name], files) if name in self.categorical else ([name], None)
            parts.append(self._numbers(name, columns[name], files)[:, None] if part is None else part)
            self.titles += titles
        inputs = np.concatenate(parts, axis=1)
        columns["file"] = np.repeat([file.stem for file in files], np.diff(ends))
        of_set = None if sets is None else np.repeat(sets, np.diff(ends))
        return Table(torch.from_numpy(inputs), self._targets(columns.pop(self.target), files), columns, of_set)

    def _lines(self, file: Path) -> tuple[Sequence[str], Iterator[tuple[str, list[str]]]]:
        return csv_table(file, delimiter=self.delimiter or ("\t" if file.suffix == ".tsv" else ","))

    def column_title(self, place: int) -> str:
        return repr(self.titles[place])

    def _missing(self, name: str, values: NDArray[Any], files: list[Path]) -> NDArray[np.bool_]:
        """Of which examples a column says nothing."""
        missing = np.isin(np.char.lower(np.char.strip(values)), MISSING)
        if missing.any() and self.impute == "none":
            bad = int(np.argmax(missing))
            raise FederationError(
                f"{self._place(bad, files)} has {str(values[bad])!r} in the column {name!r}, which is not a number: fill it in, "
                "have it imputed (--data.init_args.impute mean), or name the columns that are to be used with "
                "--data.init_args.input."
            )
        return missing

    def _one_hot(self, name: str, values: NDArray[Any], files: list[Path]) -> tuple[list[str], NDArray[np.float32]]:
        """Names of a category's columns, and a 1 in the one that an example has; NaN where nothing is known."""
        missing, values = self._missing(name, values, files), np.char.strip(values)
        found = np.unique(values[~missing]).tolist()
        known = self.categorical[name] or sorted(
            found, key=lambda each: (not _is_number(each), float(each) if _is_number(each) else 0, each)
        )
        strange = ~missing & ~np.isin(values, known)
        if strange.any():
            bad = int(np.argmax(strange))
            raise FederationError(
                f"{self._place(bad, files)} has {str(values[bad])!r:.60} in the column {name!r}, whose categories are "
                f"{', '.join(map(repr, known))}: correct it, or name it among them."
            )
        hot = (values[:, None] == np.array(known)).astype(np.float32)
        hot[missing] = np.nan
        return [f"{name}={each}" for each in known], hot

    def _numbers(self, name: str, values: NDArray[Any], files: list[Path]) -> NDArray[np.float32]:
        missing = self._missing(name, values, files)
        if missing.any():
            values = np.where(missing, "0", values)
        try:
            numbers = values.astype(np.float32)
            bad = int(np.argmin(np.isfinite(numbers)))
            if np.isfinite(numbers[bad]):
                return np.where(missing, np.float32(np.nan), numbers)
        except ValueError:
            bad = next(place for place, value in enumerate(values.tolist()) if not _is_number(value))
        raise FederationError(
            f"{self._place(bad, files)} has {str(values[bad])!r:.60} in the column {name!r}, which is not a number: correct it, "
            "or name the columns that are to be used with --data.init_args.input."
        )

    def _targets(self, values: NDArray[Any], files: list[Path]) -> NDArray[Any]:
        bad = int(np.argmin(values != ""))
        if values[bad] == "":
            raise FederationError(
                f"{self._place(bad, files)} has nothing in the column {self.target!r}, which is to be predicted: fill it in, "
                "or take the line out."
            )
        targets = values.astype(np.float64) if all(map(_is_number, values.tolist())) else values
        if targets.dtype.kind == "f" and not (whole := np.isfinite(targets) & (targets == np.floor(targets))).all():
            bad = int(np.argmin(whole))
            raise FederationError(
                f"{self._place(bad, files)} has {str(values[bad])!r:.60} in the column {self.target!r}, which is not whole: give "
                "classes, as names or numbers."
            )
        return targets

    def _place(self, row: int, files: list[Path]) -> str:
        """The file and the line of an example, which are looked up when there is an error."""
        places = (where for file in files for where, _ in self._lines(file)[1])
        return next(islice(places, row, None))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
