"""Pictures of a comparison, as wide as a column of a paper."""

import io
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from math import isnan
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, NullFormatter

from lightning_fed.experiments.report.comparison import Comparison
from lightning_fed.experiments.report.views import in_percent, measure_of, stage_of
from lightning_fed.experiments.sweep.tuning import Trial, chosen

WIDTH, HEIGHT = 3.35, 2.4
"""Inches: a column of a two-column paper, 85 mm."""

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colours that can be distinguished with colour blindness (Okabe and Ito); dashes distinguish lines in grey print."""

DASHES = ("-", "--", "-.", ":")

STYLE: Any = {
    **{"font.size": 8, "axes.labelsize": 8, "legend.fontsize": 7, "xtick.labelsize": 7, "ytick.labelsize": 7},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3, "grid.linewidth": 0.5},
    **{"lines.linewidth": 1.3, "lines.markersize": 2.5, "legend.frameon": False, "axes.linewidth": 0.6},
    "text.parse_math": False,  # names of methods may have dollar signs
}

AXES = {
    "rounds": ("round", "communication round", ""),
    "bytes": ("traffic/total_bytes", "sent, up + down", "B"),
    "flops": ("compute/total_flops", "training FLOPs", ""),
}
"""The horizontal axes: the column, the label of the axis, its unit."""


MOST_NAMED = 30
"""Maximum number of clients with a row each in a picture."""

Ends = Mapping[tuple[str, str], float]
"""The reported value of each setting and method."""


def pictures(rounds: pd.DataFrame, clients: pd.DataFrame, metric: str, ends: Ends | None = None) -> Iterator[tuple[str, Figure]]:
    """All pictures of a comparison with their names: curves over rounds, bytes and FLOPs, and the spread over clients.

    Args:
        rounds: as returned by :func:`lightning_fed.experiments.report.load_rounds`.
        clients: as returned by :func:`lightning_fed.experiments.report.load_clients`.
        metric: the column of ``rounds`` to draw.
        ends: value of each method in the legend. None: its mean over seeds at the last evaluation.
    """
    styles = dict(zip(rounds["method"].unique(), _styles(), strict=False))
    for setting, group in rounds.groupby("setting", sort=False, dropna=False):
        suffix = f"-{setting}" if setting else ""
        for name in AXES if group[metric].notna().any() else ():
            of_setting = {method: end for (where, method), end in (ends or {}).items() if where == setting}
            yield f"over_{name}{suffix}", curves(group, metric, name, styles, of_setting)
    column = f"test/{measure_of(metric)}"
    if metric.startswith("after/test_") and column in clients:
        for setting, group in clients.groupby("setting", sort=False, dropna=False):
            yield f"clients{f'-{setting}' if setting else ''}", boxes(group, column, styles)
            if "name" in group and 0 < group["name"].nunique() <= MOST_NAMED:
                yield f"sites{f'-{setting}' if setting else ''}", sites(group, column, styles)


Style = tuple[str, str]


def _styles() -> Iterator[Style]:
    """Colours and dashes, both cycled."""
    return zip(cycle(COLORS), cycle(DASHES), strict=False)


def save(figure: Figure, path: Path) -> bytes:
    """Write a picture as PDF and PNG to a path without extension, and return the latter."""
    png = io.BytesIO()
    with rc_context(STYLE):  # ticks are made when a figure is drawn
        figure.savefig(f"{path}.pdf")
        figure.savefig(png, format="png")
    Path(f"{path}.png").write_bytes(png.getvalue())
    return png.getvalue()


def curves(rounds: pd.DataFrame, metric: str, over: str, styles: dict[str, Style], ends: Mapping[str, float]) -> Figure:
    """Mean over seeds, a band of one standard deviation around it, and thin lines for the runs of a setting, each at its own cost.
    A mean is over all of them, at their mean cost: it ends with the run that ends first. ``over`` is one of :data:`AXES`; ``ends``
    has the reported value of each method, if it is not the mean at the last evaluation.
    """
    column, label, unit = AXES[over]
    percent = in_percent(metric)
    scale, digits = (100, 1) if percent else (1, 3)
    with rc_context(STYLE):
        figure, axes = _new()
        measured = rounds.dropna(subset=[metric])
        reach = [group[column].max() for _, group in measured.groupby("method") if group[column].max() > 0]
        for method, group in measured.groupby("method", sort=False):
            color, dashes = styles[str(method)]
            values = group.pivot(index="round", columns=["partition", "seed"], values=metric) * scale
            whole = values.dropna()
            mean, std, together = whole.mean(axis=1), whole.std(axis=1, ddof=1), group.groupby("round")[column].mean()[whole.index]
            end = ends[str(method)] * scale if str(method) in ends else values.ffill().iloc[-1].mean()
            if group[column].max() == 0:
                axes.axhline(end, color=color, linestyle=dashes, label=f"{method} ({end:.{digits}f}, sends nothing)")
                continue
            marker = "o" if len(together) == 1 else None
            axes.plot(together, mean, color=color, linestyle=dashes, label=f"{method} ({end:.{digits}f})", marker=marker)
            if values.shape[1] > 1:
                axes.fill_between(together, mean - std, mean + std, color=color, alpha=0.18, linewidth=0)
                for _, run in group.groupby(["partition", "seed"]):
                    axes.plot(run[column], run[metric] * scale, color=color, alpha=0.35, linewidth=0.4)
        if over == "rounds":
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        else:
            if reach and max(reach) > 8 * min(reach):
                axes.set_xscale("log")
                axes.xaxis.set_minor_formatter(NullFormatter())
            axes.xaxis.set_major_formatter(
                EngFormatter(unit) if unit else lambda x, _: f"{x:.3g}".replace("e+0", "e").replace("e+", "e")
            )
        axes.set(xlabel=label, ylabel=_called(metric, percent))
        if len(reach) < measured["method"].nunique():  # a line across would strike through a legend inside
            _legend_above(figure, axes)
        else:
            _legend(figure, axes)
        return figure


def boxes(clients: pd.DataFrame, column: str, styles: dict[str, Style]) -> Figure:
    """Box plots over the clients of all seeds, with a dot per client: boxes span the quartiles, whiskers 5 to 95 %."""
    percent = column.endswith("accuracy")
    by_method = clients.groupby("method", sort=False)[column]
    groups = {str(method): values.dropna() * (100 if percent else 1) for method, values in by_method}
    with rc_context(STYLE):
        figure, axes = _new(0.45 + 0.34 * len(groups))
        names = list(groups)
        drawn = axes.boxplot(
            [groups[name].to_numpy() for name in names],
            orientation="horizontal",
            tick_labels=names,
            whis=(5, 95),
            showfliers=False,
            showmeans=True,
            widths=0.55,
            medianprops={"color": "black"},
            meanprops={"marker": "D", "markersize": 3, "markerfacecolor": "black", "markeredgecolor": "black"},
        )
        for name, box in zip(names, drawn["boxes"], strict=True):
            box.set_color(styles[name][0])
        for place, name in enumerate(names, start=1):
            values = groups[name].sort_values()
            offsets = [0.22 * ((index * 0.618) % 1 - 0.5) * 2 for index in range(len(values))]
            axes.plot(values, [place + offset for offset in offsets], ".", color=styles[name][0], alpha=0.35, markersize=2.5)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        _label(axes, f"{_called(column, percent)} of each client")
        return figure


def sites(clients: pd.DataFrame, column: str, styles: dict[str, Style]) -> Figure:
    """Named clients as rows, largest first, with their numbers of training examples: for each method the mean over runs as a dot,
    and a line of one standard deviation to both sides.
    """
    percent = column.endswith("accuracy")
    sizes = clients.groupby("name")["train" if "train" in clients else "test"].mean().sort_values(ascending=False, kind="stable")
    methods = list(clients["method"].unique())
    with rc_context(STYLE):
        figure, axes = _new(0.7 + (0.14 + 0.06 * len(methods)) * len(sizes))
        for place, method in enumerate(methods):
            own = clients[clients["method"] == method].groupby("name")[column]
            mean, std = ((of * (100 if percent else 1)).reindex(sizes.index) for of in (own.mean(), own.std(ddof=1)))
            rows = [row + 0.7 * ((place + 0.5) / len(methods) - 0.5) for row in range(len(sizes))]
            axes.errorbar(mean, rows, xerr=std.fillna(0), fmt="o", color=styles[str(method)][0], label=str(method), linewidth=0.8)
        axes.set_yticks(range(len(sizes)), [f"{name} ({size:.0f})" for name, size in sizes.items()])
        axes.set_ylim(len(sizes) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
        _label(axes, _called(column, percent))
        _legend_above(figure, axes)
        return figure


def dots(comparison: Comparison) -> Figure:
    """Differences to the baseline, methods as rows: a dot for each partition, the mean over them and its 95 % interval. The axis
    says which measure is compared, unless it is that of the last round.
    """
    measure, scale, styles = comparison.compared, comparison.scale, dict(zip(comparison.methods, _styles(), strict=False))
    apart = comparison.differences(measure)
    with rc_context(STYLE):
        named = "" if measure == "last" else f",\n{comparison.measures[measure]}"
        figure, axes = _new(0.55 + 0.3 * len(apart) + (0.12 if named else 0))
        axes.axvline(0, color="black", linewidth=0.8)
        for place, (method, one) in enumerate(apart.items()):
            of_partitions = comparison.cells(measure, method, comparison.baseline).mean(1) * scale
            color, half = styles[method][0], None if isnan(one.error) else one.half_width * scale
            axes.errorbar(one.mean * scale, place, xerr=half, fmt="D", color=color, markersize=3.5, capsize=2)
            axes.plot(of_partitions, [place + 0.22] * len(of_partitions), "o", color=color, alpha=0.6, markersize=2.5)
        axes.set_yticks(range(len(apart)), list(apart))
        axes.set_ylim(len(apart) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
        usual = comparison.metrics[comparison.baseline]
        points = f"{measure_of(usual).replace('_', ' ')} minus that of {comparison.baseline}" + (
            " (points)" if scale == 100 else ""
        )
        _label(axes, f"test {points}{named}")
        return figure


def values_tried(tried: Mapping[tuple[str, str], Sequence[Trial]]) -> Figure:
    """Tuned values of the trials of :func:`.grouped`, methods as rows: a dot for each value on the metric's axis, filled if it was
    chosen.
    """
    best = chosen([trial for of in tried.values() for trial in of])
    with rc_context(STYLE):
        figure, axes = _new(0.6 + 0.42 * len(tried))
        names = [", ".join(filter(None, (method, setting))) for setting, method in tried]
        known = {key: [trial for trial in of if not isnan(trial.score)] for key, of in tried.items()}
        metrics = [trial.metric for of in known.values() for trial in of]
        percent = bool(metrics) and all(map(in_percent, metrics))
        for place, ((key, of), (color, _)) in enumerate(zip(known.items(), _styles(), strict=False)):
            for rank, trial in enumerate(sorted(of, key=lambda trial: trial.score)):
                value = trial.score * (1 if trial.higher_is_better else -1) * (100 if percent else 1)
                face = color if trial.cell.value == best.get(key) else "white"
                axes.plot(value, place, "o", color=color, markerfacecolor=face, markersize=4)
                text = trial.cell.value.partition("=")[2] if "," not in trial.cell.value else trial.cell.value
                offset = 5 if rank % 2 else -10  # neighbours above and below
                axes.annotate(text, (value, place), (0, offset), textcoords="offset points", ha="center", fontsize=6)
        axes.set_yticks(range(len(tried)), names)
        axes.set_ylim(len(tried) - 0.4, -0.6)
        axes.margins(x=0.1)
        axes.grid(visible=False, axis="y")
        what = measure_of(metrics[0]).replace("_", " ") if len(set(metrics)) == 1 else "monitored metric"
        _label(axes, f"validation {what}" + (" (%)" if percent else ""))
        return figure


def _new(height: float = HEIGHT) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), dpi=300, layout="constrained")
    return figure, figure.add_subplot()


def _label(axes: Axes, text: str) -> None:
    """Label a horizontal axis. The text goes on below the names of rows, which take the axis' room."""
    axes.set_xlabel(text, loc="right")


def _called(metric: str, percent: bool) -> str:
    """The measure of clients' models in the mean, or of each client; the whole name of another column."""
    usual = stage_of(metric) in ("after", "monitor", "test") and ("/mean" in metric or metric.count("/") == 1)
    return (f"test {measure_of(metric).replace('_', ' ')}" if usual else metric) + (" (%)" if percent else "")


def _legend(figure: Figure, axes: Axes) -> None:
    """A legend inside the picture if it has up to four lines that are not long, else above it."""
    if len(axes.get_legend_handles_labels()[1]) <= 4:
        inside = axes.legend(loc="best", frameon=True, framealpha=0.7, edgecolor="none")  # a band may lie below
        if inside.get_window_extent().width < 0.7 * figure.bbox.width:
            return
        inside.remove()
    _legend_above(figure, axes)


def _legend_above(figure: Figure, axes: Axes) -> None:
    """A legend above the picture, which becomes higher by that, in as many columns as fit."""
    lines, labels = axes.get_legend_handles_labels()
    for columns in (3, 2, 1):
        legend = figure.legend(lines, labels, loc="outside upper center", ncols=columns, handlelength=1.5, columnspacing=0.8)
        if legend.get_window_extent().width < figure.bbox.width or columns == 1:
            break
        legend.remove()
    figure.set_figheight(figure.get_figheight() + 0.12 * -(-len(labels) // columns))
