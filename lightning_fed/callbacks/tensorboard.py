"""Figures for TensorBoard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lightning_fed.callbacks.base import FederationCallback, RunView, boards, due, majority_baseline

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.ft2font import FT2Font
    from torch import Tensor


MOST_NAMES = 50
"""The largest number of clients or classes whose names fit beside an axis of a figure."""

LONGEST_NAME = 20
"""The number of characters of such a name."""


class TensorBoardFigures(FederationCallback):
    """Draws the clients' labels at the start, and a box plot of the clients' accuracy from time to time.

    Args:
        every: draw the box plot every N rounds, and after the last one.
    """

    def __init__(self, every: int = 10) -> None:
        self.every = every

    def on_fit_start(self, run: RunView) -> None:
        names = run.data.client_names, run.data.class_names
        self._show(run, "clients/labels", lambda: label_figure(run.data.label_counts().numpy(), *names))

    def on_round_end(self, run: RunView) -> None:
        if due(run, self.every):
            name = f"test/{run.metric}"
            values, majority = np.array([result[name] for result in run.results.values() if name in result]), majority_baseline(run)
            self._show(run, f"clients/{run.metric}", lambda: spread_figure(values, majority, run.metric))

    @staticmethod
    def _show(run: RunView, tag: str, draw: Callable[[], Figure]) -> None:
        for logger in boards(run):
            logger.experiment.add_figure(tag, draw(), global_step=run.round)


def label_figure(counts: np.ndarray, clients: Sequence[str] | None = None, classes: Sequence[str] | None = None) -> Figure:
    """Bubble chart of training labels: clients × classes, area proportional to the number of examples.

    Args:
        counts: examples, ``(clients, classes)``.
        clients: their names. None, more than fit beside the axis, or with characters that the font lacks: numbers.
        classes: likewise.
    """
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties, findfont, get_font
    from matplotlib.ticker import MaxNLocator

    width, height = counts.shape
    figure = Figure(figsize=(min(5 + 0.28 * width, 16), min(3 + 0.28 * height, 16)))
    axes = figure.add_subplot()
    client, label = np.nonzero(counts)
    amount = counts[client, label]
    axes.scatter(client, label, s=160 * amount / counts.max(), color="tab:blue", alpha=0.7, linewidths=0)
    axes.set(xlabel="client", ylabel="label", title=f"training examples by client and label (largest: {counts.max():,})")
    axes.set(xlim=(-0.8, width - 0.2), ylim=(-0.8, height - 0.2))
    room = []
    for axis, size, names, turned in ((axes.xaxis, width, clients, 90), (axes.yaxis, height, classes, 0)):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        labels = []
        if names is not None and len(names) == size <= MOST_NAMES:
            font = get_font(findfont(FontProperties()))
            known = font.get_charmap()
            labels = [_shortened(str(name)) if all(ord(c) in known for c in str(name)) else str(k) for k, name in enumerate(names)]
            axis.set_ticks(range(size), labels, rotation=turned, parse_math=False)
        room.append(max((_length(text, font) for text in labels), default=0.0))
    place(figure, below=room[0], left=room[1])
    axes.grid(alpha=0.2)
    return figure


def place(figure: Figure, below: float = 0.0, left: float = 0.0) -> None:
    """Leave room beside the axes for their titles, and for numbers or for labels of some length in inches. Matplotlib's layouts
    measure all texts twice, which takes as long as drawing.
    """
    width, height = figure.get_size_inches()
    bottom, beside = 0.4 + max(below, 0.15), 0.4 + max(left, 0.55)
    figure.subplots_adjust(left=min(beside / width, 0.8), right=1 - 0.15 / width)
    figure.subplots_adjust(bottom=min(bottom / height, 0.8), top=1 - 0.4 / height)


def _length(text: str, font: FT2Font) -> float:
    """Inches of a text in the size of tick labels."""
    font.set_size(10, 72)
    font.set_text(text)
    return float(font.get_width_height()[0]) / 64 / 72


def _shortened(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


def spread_figure(values: np.ndarray, majority: Tensor | None, metric: str) -> Figure:
    """Box plot of a per-client metric, with every client as a dot, beside the majority-label baseline.

    Args:
        values: the metric, ``(clients,)``; NaN, where a client has too few examples, is left out.
        majority: accuracy of each client's majority label, ``(clients,)``, or None to leave it out.
        metric: name of the metric.
    """
    from matplotlib.figure import Figure

    values = values[~np.isnan(values)]
    columns = {"model": values} | ({"majority label": majority.numpy()} if majority is not None else {})
    figure = Figure(figsize=(2 + 1.6 * len(columns), 4))
    place(figure)
    axes = figure.add_subplot()
    axes.boxplot(list(columns.values()), tick_labels=list(columns), showfliers=False, widths=0.5)
    for position, column in enumerate(columns.values(), start=1):
        offsets = np.linspace(-0.15, 0.15, len(column)) if len(column) > 1 else np.zeros(len(column))
        axes.plot(position + offsets, column, "o", markersize=4, alpha=0.5)
    axes.set(ylabel=f"test {metric}", title=f"{len(values)} clients")
    axes.grid(axis="y", alpha=0.3)
    return figure
