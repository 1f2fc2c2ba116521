"""Reading the files of a run for a report. Errors name the file, and the column or field."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pandas as pd

from lightning_fed.errors import FederationError, one_line
from lightning_fed.experiments.sweep.run_files import refuse_cut_clients

ROUNDS = ("round", "traffic/total_bytes", "compute/total_flops")
"""Columns that ``metrics.csv`` always has."""

CLIENTS = ("client", "test")
"""Columns that ``clients.csv`` always has."""

RECORD = ("method", "setting", "value", "status", "folder", "command", "error", "versions", "commit", "machine")
"""Columns of ``cells.csv`` that need not be numbers."""

AS_WRITTEN: Any = {"dtype": {"name": str}, "keep_default_na": False, "na_values": ["", "nan"]}
"""Options with which pandas reads what a run has written: clients may be called 007 or NA."""


def read_table(path: Path, needed: Collection[str], texts: Collection[str] = ()) -> pd.DataFrame:
    """A table of a run.

    Raises:
        FederationError: if it is not a table, has no rows, lacks a column, or has something else than numbers in one.
    """
    try:
        table = pd.read_csv(path, **AS_WRITTEN)
    except (OSError, ValueError) as error:
        raise FederationError(f"{path} is not a table that a run has written ({one_line(error)[:200]}).") from error
    if table.empty:
        raise FederationError(f"{path} has no rows: a run writes it when its first round is over.")
    if lacking := [name for name in needed if name not in table]:
        raise FederationError(f"{path} has no column {lacking[0]!r}, which a run writes: give folders of runs.")
    for name in table.columns.difference(list(texts)):
        if not pd.api.types.is_numeric_dtype(table[name]):
            wrong = pd.to_numeric(table[name], errors="coerce").isna() & table[name].notna()
            row = int(wrong.to_numpy().argmax())
            raise FederationError(
                f"{path} has {str(table[name].iloc[row])[:40]!r} in column {name!r} of row {row + 1}, expected a number."
            )
    if unknown := [name for name in needed if table[name].isna().any()]:
        raise FederationError(f"{path} has rows without a number in column {unknown[0]!r}: it was cut short.")
    return table


def read_rounds(run: Path) -> pd.DataFrame:
    """``metrics.csv``, a row per round. Raises as :func:`read_table` does, or if rounds are out of order."""
    table = read_table(path := run / "metrics.csv", ROUNDS)
    if not table["round"].is_monotonic_increasing or table["round"].iloc[0] < 1:
        raise FederationError(f"{path} has rounds that are not in order, from 1 on: give folders as runs have written them.")
    return table


def read_clients(run: Path) -> pd.DataFrame:
    """``clients.csv``, a row per client. Raises as :func:`read_table` does, or if clients are missing."""
    refuse_cut_clients(run)
    return read_table(run / "clients.csv", CLIENTS, texts=["name"])


def read_crossed(run: Path) -> pd.DataFrame:
    """``cross.csv``, a row per trained and tested client, with the name of the former."""
    table = read_table(run / "cross.csv", ("trained", "tested"))
    clients = read_clients(run)
    names = clients["name"] if "name" in clients else "client " + clients["client"].astype(str)
    return table.assign(name=table["trained"].map(dict(zip(clients["client"], names, strict=True))))


def read_commands(sweep: Path) -> list[str]:
    """The commands in ``cells.csv`` of a sweep's runs; empty without such a file."""
    path = sweep / "cells.csv"
    return [str(command) for command in read_table(path, ["command"], texts=RECORD)["command"]] if path.is_file() else []
