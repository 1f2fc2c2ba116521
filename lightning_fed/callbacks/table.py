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
from lightning_fed.system.disk import move_aside, naming


class MetricsTable(FederationCallback):
    """Writes ``metrics.csv``, a row per round, and ``clients.csv``, a row per client from its last evaluation.

    A round's row is appended; a kill leaves complete lines. The table is only rewritten for new columns, which come with the first
    evaluation.
    """

    def __init__(self) -> None:
        self._columns: list[str] = []

    def on_fit_start(self, run: RunView) -> None:
        """Start with the rounds of a continued run."""
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


class CrossTable(FederationCallback):
    """Writes ``cross.csv``: metrics of each client's model on the data of each client after the last round, a row for each pair
    (``trained``, ``tested``), and on the pooled data (``tested`` is -1). It is meant for few clients, such as hospitals: N clients
    take N × (N + 1) evaluations. A report shows it as a table *trained on site i, tested on site j*.

    With data at sites there is no such file.
    """

    def on_fit_end(self, run: RunView) -> None:
        if run.folder is None or not run.data.at_hand:
            return
        rows = [
            {"trained": client.id, "tested": tested, **measured}
            for client in run.clients
            for tested, measured in run.measure_across(client.id).items()
        ]
        write_table(run.folder / "cross.csv", rows)


def client_rows(run: RunView) -> Iterable[dict[str, Any]]:
    """Information about each client and its last metrics."""
    majority, names = run.data.majority_accuracy(), run.data.client_names
    for client in run.clients:
        named = {} if names is None else {"name": names[client.id]}
        sizes = {"client": client.id, "train": client.num_train, "val": client.num_val, "test": client.num_test}
        trivial = {} if majority is None else {"majority_accuracy": majority[client.id].item()}
        measured = run.results.get(client.id, {})  # empty for a client whose turn was lost
        row = sizes | named | trivial
        yield row | {name: value for name, value in measured.items() if name.startswith(MEASURED)}


def columns_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The union of the rows' keys, in order of appearance."""
    return list(dict.fromkeys(key for row in rows for key in row))


def write_table(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows as CSV to another file and rename it, so that the file is complete or unchanged. A folder of that name is
    renamed.
    """
    columns = columns_of(rows)
    aside = path.with_name(".table.csv")  # the same for all tables: leftovers of a kill are replaced
    with naming(path):
        aside.write_text(_lines([dict(zip(columns, columns, strict=True)), *rows], columns), newline="")
    if path.is_dir():
        move_aside(path)
    aside.replace(path)


def append_row(path: Path, row: dict[str, Any], columns: Sequence[str]) -> None:
    """Append a line to a table with these columns, in one write. On a full disk the table does not change."""
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
