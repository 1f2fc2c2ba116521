"""Metrics as CSV files."""

import csv
import errno
import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning_fed.callbacks.base import FederationCallback, RunView
from lightning_fed.core.aggregation import MEASURED
from lightning_fed.storage.disk import move_aside, naming


class MetricsTable(FederationCallback):
    """Keeps ``metrics.csv``, a row per round, and ``clients.csv``, a row per client as last measured.

    A round's row is appended; a kill leaves whole lines. Only new columns, which come with the first measurement, have the table
    written anew.
    """

    def __init__(self) -> None:
        self._columns: list[str] = []

    def on_fit_start(self, run: RunView) -> None:
        """Begin with the rounds that a continued run has behind it."""
        self._columns = columns_of(run.history)
        if run.folder is not None and run.history:
            write_table(run.folder / "metrics.csv", run.history)

    def on_round_end(self, run: RunView) -> None:
        if run.folder is None:
            return
        row, path = run.history[-1], run.folder / "metrics.csv"
        if row.keys() <= set(self._columns) and path.is_file():
            append_row(path, row, self._columns)
        else:
            self._columns = columns_of(run.history)
            write_table(path, run.history)
        if run.monitored("test") in row:
            write_table(run.folder / "clients.csv", list(client_rows(run)))


def client_rows(run: RunView) -> Iterable[dict[str, Any]]:
    """What is known of each client and what was last measured."""
    majority, names = run.data.majority_accuracy(), run.data.client_names
    for client in run.clients:
        named = {} if names is None else {"name": names[client.id]}
        sizes = {"client": client.id, "train": client.num_train, "val": client.num_val, "test": client.num_test}
        trivial = {} if majority is None else {"majority_accuracy": majority[client.id].item()}
        measured = run.results.get(client.id, {})  # of a client whose turn was lost there is nothing
        row = sizes | named | trivial
        yield row | {name: value for name, value in measured.items() if name.startswith(MEASURED)}


def columns_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The union of the rows' keys, in order of appearance."""
    return list(dict.fromkeys(key for row in rows for key in row))


def write_table(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows as CSV, aside first: the file is there as a whole, or as it was before. A folder of its name is moved out of the
    way.
    """
    columns = columns_of(rows)
    aside = path.with_name(".table.csv")  # the same for all tables: what a kill leaves there is replaced when a run goes on
    with naming(path):
        aside.write_text(_lines([dict(zip(columns, columns, strict=True)), *rows], columns), newline="")
    if path.is_dir():
        move_aside(path)
    aside.replace(path)


def append_row(path: Path, row: dict[str, Any], columns: Sequence[str]) -> None:
    """Add a line to a table that has these columns, in one write. On a disk that is full the table stays as it was."""
    line = _lines([row], columns).encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        size = os.fstat(descriptor).st_size
        with naming(path):
            if os.write(descriptor, line) < len(line):
                os.ftruncate(descriptor, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(descriptor)


def _lines(rows: Iterable[dict[str, Any]], columns: Sequence[str]) -> str:
    text = io.StringIO()
    csv.DictWriter(text, list(columns)).writerows(rows)
    return text.getvalue()
