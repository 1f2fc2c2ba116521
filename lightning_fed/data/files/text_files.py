"""Texts in CSV, TSV and Parquet files."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lightning_fed.data.files.columns import (
    ENDINGS,
    FILE,
    PARQUET,
    Lines,
    categories_of,
    class_targets,
    parquet_table,
    place_of,
    read_columns,
    refuse_missing,
)
from lightning_fed.data.files.table import Table, TableData, check_columns, sets_of
from lightning_fed.data.lines import csv_table
from lightning_fed.data.text.classification import load_tokenizer, tokenised, written_as
from lightning_fed.errors import require
from lightning_fed.formatting import counted
from lightning_fed.options import PositiveInt, require_from

log = logging.getLogger(__name__)


class TextFiles(TableData):
    """Texts, or pairs of texts, in your own files, for a pretrained network; see :class:`TextClassification` for its inputs.

    Files have a header. ``.tsv`` files have tabs and no quotation, others commas and quotation. A warning counts empty texts.

    Args:
        path: a file, or a folder with ``.csv`` or ``.tsv`` files, in UTF-8, compressed by gzip (``.csv.gz``) or not, or
            ``.parquet`` files.
        tokenizer: folder or name on the Hugging Face hub, of a tokenizer or the model that it belongs to.
        input: column of the texts, or two columns.
        target: column of the classes.
        test_path: an official test set, in the same form.
        max_length: maximum number of tokens of a text or pair of texts. Longer ones are cut at the end, in a pair the longer text.
        **kwargs: see :class:`TableData`.
    """

    def __init__(
        self,
        path: str,
        tokenizer: str,
        input: list[str] | str = "text",
        target: str = "label",
        test_path: str | None = None,
        max_length: PositiveInt = 128,
        **kwargs: Any,
    ) -> None:
        super().__init__(augment="none", **kwargs)
        require_from(1, max_length=max_length)
        self.path = path
        self.tokenizer = tokenizer
        self.input = [input] if isinstance(input, str) else input
        self.target = target
        check_columns(self.input, [target])
        self.test_path = test_path
        self.max_length: int = max_length
        require(len(self.input) in (1, 2), f"Got input={input}: give the name of one column or of two.")

    def read(self) -> Table:
        tokenizer = load_tokenizer(self.tokenizer)
        files, sets = sets_of(self.path, self.test_path, ENDINGS)
        columns, _, sizes = read_columns(files, sets, lines_of, (self.path, self.test_path))
        lacking = [name for name in (*self.input, self.target) if name not in columns]
        require(
            not lacking, f"{files[0]} has the columns {', '.join(columns)}, but no {', '.join(lacking)}: check input and target."
        )
        texts = list(zip(*(columns[name] for name in self.input), strict=True))
        of_rows = {name: np.array(values) for name, values in columns.items() if name == self.target or name not in self.input}
        of_rows = {name: values if name == FILE else np.char.strip(values) for name, values in of_rows.items()}
        place = partial(place_of, files=files, lines=lines_of)
        for column, use in ((self.owner_column, "the client"), (self.group, "the group")):
            if column in of_rows and column != FILE:
                of_rows[column] = categories_of(of_rows[column])
                refuse_missing(of_rows[column], column, use, place)
        refuse_missing(of_rows[self.target], self.target, "a target", place, self.classes or ())
        if empty := [row for row, parts in enumerate(texts) if not all(map(str.strip, parts))]:
            first = place(empty[0]).rstrip(",")
            log.warning(
                f"{self.path}: {counted(len(empty), 'example')} without a text, the first in {first}: fill in "
                f"{' and '.join(self.input)}, or take the lines out."
            )
        of_set = None if sets is None else np.repeat(sets, sizes)
        return Table(tokenised(texts, tokenizer, self.max_length), class_targets(of_rows[self.target]), of_rows, of_set)


def lines_of(file: Path) -> Lines:
    """The lines of a file; in ``.tsv`` files quotation marks are ordinary characters."""
    if file.suffix.lower() == PARQUET:
        return parquet_table(file)
    return csv_table(file, **written_as(file))
