"""Tables of numbers in CSV and Parquet files."""

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fed.data.batches import INPUT, TARGETS
from lightning_fed.data.checked import pick_column, warn_of_rounding
from lightning_fed.data.files.columns import (
    ENDINGS,
    FILE,
    PARQUET,
    Lines,
    categories_of,
    class_targets,
    is_missing,
    is_number,
    parquet_table,
    place_of,
    read_columns,
    refuse_missing,
)
from lightning_fed.data.files.table import FEW, Table, TableData, check_columns, sets_of
from lightning_fed.data.lines import csv_table, unpacked
from lightning_fed.data.tabular.scaled import ScaledColumns, mean_of_known
from lightning_fed.errors import FederationError, require
from lightning_fed.formatting import counted

log = logging.getLogger(__name__)

INDEX = "__index_level_"
"""How the name of a column begins in which pandas writes the numbers of rows to Parquet."""

MOST_NAMED = 10
"""The largest number of clients that a warning names."""


class CSVFiles(ScaledColumns, TableData):
    """Numbers in CSV or Parquet files, one example per line. A network gets them as floats of shape (B, inputs), unchanged or
    standardized; a categorical column becomes a 0 or 1 for each of its categories.

    Besides its columns, an example has ``file``, the name of its file without the suffix: with ``client: file`` each file is a
    client.

    Args:
        path: a file, or a folder with ``.csv`` or ``.tsv`` files, in UTF-8, compressed by gzip (``.csv.gz``) or not, or
            ``.parquet`` files.
        target: column to predict; several columns with ``regression``; with ``survival`` two: whether there was an event (0 or 1),
            and the time of the event or of censoring.
        input: columns to use. None: all that have no other use.
        test_path: an official test set, in the same form.
        delimiter: delimiter of columns. None: a tab in ``.tsv`` files, compressed or not, else a comma.
        categorical: names of the categorical columns (one-hot encoded, in place of the column), or the ordered categories of each,
            for when not every client has all of them, or one is called ``none``. Otherwise categories are sorted, numerically if
            all are numbers. 1.0 is 1.
        columns: names of the columns, for files without a header.
        task: what is predicted: one of several classes; yes or no, with one output (``binary``: yes is the second of two classes,
            in the order of ``classes``, else of the alphabet in any case); numbers; or the time to an event. For partitions by
            label, the labels of numbers are quarters of the examples, and those of times the events.
        **kwargs: see :class:`TableData`, and :class:`lightning_fed.data.tabular.scaled.ScaledColumns` for ``standardize`` and
            ``impute``. Empty fields, ``?``, ``NA``, ``<NA>``, ``N/A``, ``NaN``, ``NaT``, ``null`` and ``None``, in any case, are
            missing values unless ``classes`` or ``categorical`` lists them. For missing categories, their frequencies are imputed.
    """

    def __init__(
        self,
        path: str,
        target: list[str] | str,
        input: list[str] | str | None = None,
        test_path: str | None = None,
        delimiter: str | None = None,
        categorical: list[str] | dict[str, list[str]] | None = None,
        columns: list[str] | None = None,
        task: Literal["multiclass", "binary", "regression", "survival"] = "multiclass",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.path = path
        self.target = [target] if isinstance(target, str) else list(target)
        self.columns = columns
        self.problem = task
        self.predicts_labels = task in ("multiclass", "binary")
        wanted = {"regression": max(1, len(self.target)), "survival": 2}.get(task, 1)
        require(
            len(self.target) == wanted,
            f"Got target={self.target} with task={task}: give {'event and time' if task == 'survival' else 'one column'}.",
        )
        require(
            self.predicts_labels or self.classes is None,
            f"Got classes={self.classes} with task={task}, which has none: leave them out.",
        )
        self.input = [input] if isinstance(input, str) else input
        check_columns(self.input or (), self.target)
        self.test_path = test_path
        require(delimiter is None or len(delimiter) == 1, f"Got delimiter={delimiter!r}: give one character.")
        self.delimiter = delimiter
        self.categorical: dict[str, list[str] | None]
        self.categorical = dict(categorical) if isinstance(categorical, dict) else dict.fromkeys(categorical or ())
        self.titles: list[str] = []
        self._one_hots: list[bool] = []  # whether each title is a category's
        self._owners: NDArray[Any] | None = None  # each example's client, if that is not the file

    @property
    def num_labels(self) -> int:
        """Number of labels to partition by: classes, quarters, or event and no event."""
        return super().num_classes

    @property
    def num_classes(self) -> int:  # type: ignore[override]
        """Number of outputs of a network: one per class or number; one for a risk, or for yes and no."""
        return {"multiclass": self.num_labels, "regression": len(self.target)}.get(self.problem, 1)

    def _set_up(self) -> None:
        """Read and partition the data; print warnings about clients that the data name."""
        super()._set_up()
        names, counts = self.client_names, self.label_counts()
        if names is None:
            return
        column = repr(self.target[0])
        odd = {f"training examples of one class only in the column {column}": (counts > 0).sum(dim=1) == 1}
        if self.problem == "survival":
            odd = {f"no event in the column {column} among their training examples, which they cannot train on": counts[:, 1] == 0}
        elif self.problem == "regression":
            odd = {}
        odd |= {f"fewer training examples than a batch has ({self.batch_size})": counts.sum(dim=1) < self.batch_size}
        for what, of_clients in odd.items():
            if number := int(of_clients.sum()):
                named = ", ".join(repr(names[k]) for k in of_clients.nonzero()[:MOST_NAMED])
                more = f" and {number - MOST_NAMED} more" if number > MOST_NAMED else ""
                have = "has" if number == 1 else "have"
                log.warning(f"{self.path}: {number} of {counted(len(names), 'client')} {have} {what}: {named}{more}.")

    def read(self) -> Table:
        files, sets = sets_of(self.path, self.test_path, ENDINGS)
        found, header, sizes = read_columns(files, sets, self._lines, (self.path, self.test_path))
        columns = {name: np.array(values) for name, values in found.items()}
        absent = [name for name in self.target if name not in columns]
        require(not absent, f"{files[0]} has the columns {', '.join(header)}, but no target {', '.join(map(repr, absent))}.")
        owner = self.owner_column
        for column in filter(None, (owner, self.split_column, self.group)):
            pick_column(type(self).__name__, columns, column)  # before other columns are read as inputs
        other_use = {*self.target, self.split_column, self.group, owner}
        names = self.input or [name for name in header if name not in other_use]
        if self.input is None:
            self._warn_of_identifiers({name: columns[name] for name in names})
            index = next((name for name in names if name == "" or name.startswith(INDEX)), None)
            require(
                index is None,
                f"{files[0]} has {f'the column {index!r}' if index else 'a column without a name'}, as pandas writes the numbers "
                "of rows, which would be an input: take it out (to_csv or to_parquet with index=False), or name the columns to use "
                "with --data.init_args.input.",
            )
        for name in header:
            if name in other_use or name not in names:  # blanks around a number do not matter, around a name they would
                columns[name] = np.char.strip(columns[name])
        self._owners = None
        for named, use in ((owner, "the client"), (self.group, "the group")):
            if named is not None and named != FILE:
                columns[named] = categories_of(columns[named])
                refuse_missing(columns[named], named, use, partial(self._place, files=files))
        if owner in columns and owner != FILE:
            self._owners = columns[owner]
        lacking = [name for name in (*names, *self.categorical) if name not in columns]
        require(not lacking, f"{files[0]} has the columns {', '.join(header)}, but no input {', '.join(lacking)}.")
        require(len(names) > 0, f"{files[0]} has no column besides {', '.join(header)}: an input is needed.")
        unused = [name for name in self.categorical if name not in names]
        require(not unused, f"Got categorical={unused[:1]}, but the inputs are {', '.join(names)}: name inputs, or leave it out.")
        self.titles, self._one_hots, parts = [], [], []
        for name in names:
            titles, part = self._one_hot(name, columns[name], files) if name in self.categorical else ([name], None)
            if part is None:
                part = self._parsed(name, columns[name], self._missing(name, columns[name], files), files)[:, None]
            parts.append(part)
            self.titles += titles
            self._one_hots += [name in self.categorical] * len(titles)
        inputs = torch.from_numpy(np.concatenate(parts, axis=1))
        targets = [columns.pop(name) for name in self.target]
        of_set = None if sets is None else np.repeat(sets, sizes)
        if self.predicts_labels:
            classes = self._classes_of(targets[0], files)
            if self.problem != "binary" or classes.dtype.kind != "U":
                return Table(inputs, classes, columns, of_set)
            names = sorted(set(classes.tolist()), key=lambda name: (name.casefold(), name))
            places = {name: place for place, name in enumerate(names)}
            return Table(inputs, np.array([places[name] for name in classes.tolist()]), columns, of_set, names)
        numbers = np.column_stack([self._quantities(*each, files) for each in zip(self.target, targets, strict=True)])
        if self.problem == "survival":
            self._refuse_times(numbers, targets, files)
            labels, names = numbers[:, 0].astype(np.int64), ["no event", "event"]
        else:
            labels = np.searchsorted(np.quantile(numbers[:, 0], [0.25, 0.5, 0.75]), numbers[:, 0])
            names = ["lowest quarter", "second quarter", "third quarter", "highest quarter"]
        of_numbers = torch.from_numpy(numbers[:, 0] if numbers.shape[1] == 1 else numbers)
        return Table({INPUT: inputs, TARGETS: of_numbers}, labels, columns, of_set, names)

    def _read(self) -> Table:
        table = super()._read()
        if self.problem == "binary" and self.num_labels != 2:
            found = ", ".join(map(repr, (self.class_names or range(self.num_labels))[:5]))
            raise FederationError(
                f"{self.path} has {self.num_labels} classes in the column {self.target[0]!r} ({found}), but task binary needs two: "
                "name both (--data.init_args.classes), or choose another task."
            )
        return table

    def _lines(self, file: Path) -> Lines:
        if file.suffix.lower() == PARQUET:
            require(self.columns is None, f"Got columns={self.columns}, but {file} has the names of its own: leave columns out.")
            return parquet_table(file)
        usual = "\t" if unpacked(file).suffix.lower() == ".tsv" else ","
        names, lines = csv_table(file, header=self.columns, delimiter=self.delimiter or usual)
        require(
            len(names) != 1 or not {*names[0]} & {*",;|\t"},
            f"{file} has the single column {', '.join(names)}: set --data.init_args.delimiter to what separates its columns.",
        )
        return names, lines

    def column_title(self, place: int) -> str:
        return self.titles[place]

    def _usual(self, rows: Tensor) -> Tensor:
        """Also with medians, of a category its frequency: the median of its column would mostly be 0, as of all others."""
        return torch.where(torch.tensor(self._one_hots), mean_of_known(rows), super()._usual(rows))

    def _missing(self, name: str, values: NDArray[Any], files: list[Path]) -> NDArray[np.bool_]:
        """Which examples have no value in a column."""
        missing = is_missing(values, self.categorical.get(name) or ())
        if missing.any() and self.impute == "none":
            bad = int(np.argmax(missing))
            is_category = name in self.categorical and values[bad]
            what = "counts as missing: name it and all others if it is a category" if is_category else "is not a number: fill it in"
            raise FederationError(
                f"{self._place(bad, files)} has {str(values[bad])!r} in the column {name!r}, which {what}, "
                "impute it (--data.init_args.impute mean), or name the columns to use with "
                "--data.init_args.input."
            )
        nones = int((np.char.lower(np.char.strip(values[missing])) == "none").sum())
        if nones and name in self.categorical:
            log.warning(
                f"{self.path}: 'none' in the column {name!r} counts as missing, in {counted(nones, 'example')}: if it is a "
                "category, name it and all others in --data.init_args.categorical."
            )
        return missing

    def _warn_of_identifiers(self, inputs: Mapping[str, NDArray[Any]]) -> None:
        """Warn about columns that are inputs only because no columns were named, and that have another name or whole number in each
        example.
        """
        for name, values in inputs.items():
            for part in (values[:1000], values):  # most columns repeat themselves soon
                numbered = name in self.categorical or np.char.isdecimal(np.char.strip(part)).all()
                if not numbered or len(part) <= FEW or len(np.unique(part)) < len(part):
                    break
            else:
                log.warning(
                    f"{self.path}: the column {name!r}, which is an input, differs in all {len(values)} examples, as an identifier "
                    "does: name the columns to use with --data.init_args.input."
                )

    def _one_hot(self, name: str, values: NDArray[Any], files: list[Path]) -> tuple[list[str], NDArray[np.float32]]:
        """Names of a categorical column's one-hot columns, and their values; NaN for missing values."""
        places = np.flatnonzero(~self._missing(name, values, files))
        present = categories_of(np.char.strip(values[places]))
        known = categories_of(np.array(self.categorical[name] or [], dtype=str)).tolist() or sorted(
            np.unique(present).tolist(), key=lambda each: (not is_number(each), float(each) if is_number(each) else 0, each)
        )
        strange = ~np.isin(present, known)
        if strange.any():
            bad = int(places[np.argmax(strange)])
            raise FederationError(
                f"{self._place(bad, files)} has {str(values[bad])!r:.60} in the column {name!r}, whose categories are "
                f"{', '.join(map(repr, known))}: correct it, or name it among them."
            )
        hot = np.full((len(values), len(known)), np.nan, dtype=np.float32)
        hot[places] = present[:, None] == np.array(known)
        return [f"{name}={each}" for each in known], hot

    def _quantities(self, name: str, values: NDArray[Any], files: list[Path]) -> NDArray[np.float32]:
        """Numbers to predict."""
        refuse_missing(values, name, "a target", partial(self._place, files=files))
        return self._parsed(name, values, np.zeros(len(values), dtype=bool), files)

    def _parsed(self, name: str, values: NDArray[Any], missing: NDArray[np.bool_], files: list[Path]) -> NDArray[np.float32]:
        if missing.any():
            values = np.where(missing, "0", values)
        try:
            numbers = values.astype(np.float32)
            fine = np.isfinite(numbers) & (np.char.find(values, "_") < 0)  # Python reads 1_0 as 10
            bad = int(np.argmin(fine))
            if fine[bad]:
                warn_of_rounding(values, numbers, f"{self.path}: the column {name!r}")
                return np.where(missing, np.float32(np.nan), numbers)
        except ValueError:
            bad = next(place for place, value in enumerate(values.tolist()) if not is_number(value))
        remedy = ", name it in --data.init_args.categorical if it holds categories, or name the columns to use with "
        remedy = "" if name in self.target else f"{remedy}--data.init_args.input"
        raise FederationError(
            f"{self._place(bad, files)} has {str(values[bad])!r:.60} in the column {name!r}, which is not a number: correct it"
            f"{remedy}."
        )

    def _refuse_times(self, numbers: NDArray[np.float32], values: list[NDArray[Any]], files: list[Path]) -> None:
        """Refuse events other than 0 and 1, and times below 0."""
        good = (np.isin(numbers[:, 0], (0, 1)), "0 or 1"), (numbers[:, 1] >= 0, "a time from 0 on")
        for name, of_column, (fine, expected) in zip(self.target, values, good, strict=True):
            if not fine.all():
                bad = int(np.argmin(fine))
                raise FederationError(
                    f"{self._place(bad, files)} has {str(of_column[bad])!r:.60} in the column {name!r}, expected {expected}."
                )

    def _classes_of(self, values: NDArray[Any], files: list[Path]) -> NDArray[Any]:
        refuse_missing(values, self.target[0], "a target", partial(self._place, files=files), self.classes or ())
        targets = class_targets(values)
        if targets.dtype.kind == "f" and not (whole := np.isfinite(targets) & (targets == np.floor(targets))).all():
            bad = int(np.argmin(whole))
            raise FederationError(
                f"{self._place(bad, files)} has {str(values[bad])!r:.60} in the column {self.target[0]!r}, which is not whole: "
                "give classes, as names or numbers, or predict numbers (--data.init_args.task regression)."
            )
        return targets.astype(np.int64) if targets.dtype.kind == "f" else targets

    def _place(self, row: int, files: list[Path]) -> str:
        """The file and line of an example, for errors, with its client."""
        where = place_of(row, files, self._lines)
        return where if self._owners is None else f"{where} of {str(self._owners[row])!r},"
