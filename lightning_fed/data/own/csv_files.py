"""Tables of numbers in CSV files."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_fed.data.own.files import sets_of
from lightning_fed.data.own.table import Table, TableData
from lightning_fed.data.partition.natural import ByColumn
from lightning_fed.errors import FederationError, require


class CSVFiles(TableData):
    """Numbers in CSV files with a header, one example per line. A network gets them as floats of shape (B, inputs), as they are.

    Besides its columns, an example has ``file``, the name of its file without the ending: with ``client: file`` each file is a
    client.

    Args:
        path: a file, or a folder with files that end in ``.csv`` or ``.tsv``.
        target: the column that is to be predicted.
        input: the columns that are used; None: all but those that have another use.
        test_path: an official test set, in the same form.
        delimiter: what is between columns; None: a tab in files that end in ``.tsv``, else a comma.
        **kwargs: see :class:`TableData`.
    """

    def __init__(
        self,
        path: str,
        target: str,
        input: list[str] | str | None = None,
        test_path: str | None = None,
        delimiter: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.path = path
        self.target = target
        self.input = [input] if isinstance(input, str) else input
        self.test_path = test_path
        self.delimiter = delimiter

    def read(self) -> Table:
        """All lines of all files."""
        files, sets = sets_of(self.path, self.test_path, (".csv", ".tsv"))
        header, lines, sizes = self._lines(files)
        columns = {name: np.array(values) for name, values in zip(header, zip(*lines, strict=True), strict=True)}
        require(self.target in columns, f"{files[0]} has the columns {', '.join(header)}, but no target {self.target!r}.")
        other_use = {self.target, self.split_column, self.partition.column if isinstance(self.partition, ByColumn) else None}
        names = self.input or [name for name in header if name not in other_use]
        lacking = [name for name in names if name not in columns]
        require(not lacking, f"{files[0]} has the columns {', '.join(header)}, but no input {', '.join(lacking)}.")
        inputs = np.stack([self._numbers(name, columns[name], files, sizes) for name in names], axis=1)
        columns["file"] = np.repeat([file.stem for file in files], sizes)
        of_set = None if sets is None else np.repeat(sets, sizes)
        return Table(torch.from_numpy(inputs), typed(columns.pop(self.target)), columns, of_set)

    def _lines(self, files: list[Path]) -> tuple[list[str], list[list[str]], list[int]]:
        """The header, the lines of all files, and how many each has."""
        header: list[str] | None = None
        lines: list[list[str]] = []
        sizes = []
        for file in files:
            delimiter = self.delimiter or ("\t" if file.suffix == ".tsv" else ",")
            with file.open(newline="", encoding="utf-8-sig") as opened:
                reader = csv.reader(opened, delimiter=delimiter)
                own = next(reader, [])
                header = own if header is None else header
                require(own == header, f"{file} has the columns {', '.join(own)}, but {files[0]} has {', '.join(header)}.")
                before = len(lines)
                for line in reader:
                    fits = len(line) == len(header) or not line
                    require(fits, f"{file}, line {reader.line_num}, has {len(line)} columns, but the header has {len(header)}.")
                    if line:
                        lines.append(line)
            sizes.append(len(lines) - before)
        require(len(lines) > 0, f"{files[0]} has no line below its header.")
        return header or [], lines, sizes

    def _numbers(self, name: str, values: NDArray[Any], files: list[Path], sizes: list[int]) -> NDArray[np.float32]:
        try:
            return values.astype(np.float32)
        except ValueError:
            bad = next(place for place, value in enumerate(values.tolist()) if not _is_number(value))
        file = files[int(np.searchsorted(np.cumsum(sizes), bad, side="right"))]
        raise FederationError(
            f"{file} has {str(values[bad])!r} in the column {name!r}, which is not a number: correct it, or name the columns "
            "that are to be used with --data.init_args.input."
        )


def typed(values: NDArray[Any]) -> NDArray[Any]:
    """What stands in a column, as numbers if it all is numbers."""
    return values.astype(np.float64) if all(map(_is_number, values.tolist())) else values


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
