"""CSV files of runs, read with an error that says which of them is damaged."""

from collections.abc import Collection
from pathlib import Path

import pandas as pd

from lightning_fed.errors import FederationError


def read_table(path: Path, needed: Collection[str], numbers: bool = False) -> pd.DataFrame:
    """A CSV file with a row at least.

    Args:
        path: of the file.
        needed: columns that it has.
        numbers: whether all of its columns have numbers, or nothing.

    Raises:
        FederationError: if it is not that.
    """
    try:
        table = pd.read_csv(path)
    except (OSError, ValueError, UnicodeError) as error:  # pandas' own are ValueErrors
        raise FederationError(
            f"{path} is damaged ({' '.join(str(error).split())}): leave the run out, or play it again."
        ) from error
    if lacking := [name for name in needed if name not in table]:
        raise FederationError(f"{path} is damaged: it has no column {', '.join(lacking)}. Leave the run out, or play it again.")
    if not len(table):
        raise FederationError(f"{path} is damaged: it has no row. Leave the run out, or play it again.")
    if numbers and (texts := [str(name) for name in table if table[name].dtype.kind not in "biuf"]):
        wrong = pd.to_numeric(table[texts[0]], errors="coerce").isna() & table[texts[0]].notna()
        row = int(wrong.to_numpy().argmax())
        raise FederationError(
            f"{path} is damaged: line {row + 2} has {str(table[texts[0]].iloc[row])!r:.60} in the column {texts[0]!r}, expected a "
            "number. Leave the run out, or play it again."
        )
    if numbers and table["round"].isna().any():
        raise FederationError(f"{path} is damaged: line {int(table['round'].isna().to_numpy().argmax()) + 2} has no round.")
    return table
