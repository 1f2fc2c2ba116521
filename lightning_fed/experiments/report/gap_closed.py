"""Where methods stand between two references: the share of the room that they fill."""

from collections.abc import Sequence
from dataclasses import replace
from math import isnan

import pandas as pd

from lightning_fed.errors import FederationError
from lightning_fed.experiments.report.comparison import Difference, difference
from lightning_fed.experiments.report.layout import Entry, Layout


def share_of_room(values: pd.Series, low: pd.Series, high: pd.Series) -> Difference:
    r""":math:`(x - x_{low}) / (x_{high} - x_{low})`, taken seed by seed, with Student's interval; a share above 1 is ahead of the
    upper reference.

    Args:
        values: of a method, by seed.
        low: of the lower reference, by seed.
        high: of the upper one.

    Returns:
        NaN where the references leave no room: where their order is not the same for all seeds that the three have.
    """
    parts = pd.DataFrame({"values": values, "low": low, "high": high}).dropna()
    room = parts["high"] - parts["low"]
    if not ((room > 0).all() or (room < 0).all()):  # below 0: of two losses, say
        return difference(values * float("nan"), values)
    shares = (parts["values"] - parts["low"]) / room
    return difference(shares, 0 * shares)


def with_room(layout: Layout, runs: pd.DataFrame, room: Sequence[str], column: str) -> Layout:
    """A table with one more column, which says where each method stands.

    Args:
        layout: a table of these runs: a row per method, in their order, and perhaps more.
        runs: its runs.
        room: two methods, the lower and the upper reference.
        column: of the runs, with the numbers to compare.

    Raises:
        FederationError: if one of the references is no method of the table.
    """
    by_method = {str(method): group.set_index("seed")[column] for method, group in runs.groupby("method", sort=False)}
    if missing := [name for name in room if name not in by_method]:
        raise FederationError(f"There is no method {missing[0]!r} to leave room; there are {', '.join(by_method)}.")
    low, high = (by_method[name] for name in room)
    said = [Entry(_said(share_of_room(values, low, high))) for values in by_method.values()]
    rows = [[*row, entry] for row, entry in zip(layout.rows, [*said, *[Entry("")] * (len(layout.rows) - len(said))], strict=True)]
    note = f"Share of the room: 0 is {room[0]}, 1 is {room[1]}, seed by seed, with Student's 95 % interval."
    return replace(layout, columns=[*layout.columns, "share of the room"], rows=rows, notes=[*layout.notes, note])


def _said(share: Difference) -> str:
    if isnan(share.mean):
        return "no room"
    said = f"{share.mean:.2f}" + (f" ± {share.half_width:.2f}" if share.half_width > 0 else "")
    return said.replace("-", "−")
