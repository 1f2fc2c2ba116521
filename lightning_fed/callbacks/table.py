"""Metrics as CSV files."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_fed.callbacks.base import FederationCallback

if TYPE_CHECKING:
    from lightning_fed.federation import Federation


class MetricsTable(FederationCallback):
    """Keeps ``metrics.csv``, a row per round, and ``clients.csv``, a row per client as last measured."""

    def on_round_end(self, federation: Federation) -> None:
        """Rewrite both files: a continued run then needs no special care, and new columns may appear at any round."""
        if federation.folder is None:
            return
        write_table(federation.folder / "metrics.csv", federation.history)
        if federation.results:
            majority = federation.data.majority_accuracy()
            write_table(
                federation.folder / "clients.csv",
                [
                    {
                        "client": client.id,
                        "train": client.num_train,
                        "val": client.num_val,
                        "test": client.num_test,
                        **({} if majority is None else {"majority_accuracy": majority[client.id].item()}),
                        **federation.results[client.id],
                    }
                    for client in federation.clients
                ],
            )


def write_table(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows as CSV; the columns are the union of their keys, in order of appearance."""
    columns = dict.fromkeys(key for row in rows for key in row)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(columns))
        writer.writeheader()
        writer.writerows(rows)
