"""TensorBoard for a sweep: for each method the mean over its finished runs as a line, and a band."""

import math
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import mean, stdev

from lightning_fed.experiments.sweep.folder import CellFolder
from lightning_fed.experiments.sweep.plan import Cell, file_name
from lightning_fed.experiments.sweep.run_files import read_facts, read_measured

BOARD = "curves"
"""Subfolder of a sweep's folder for ``tensorboard --logdir``."""

MEAN, LOWER, UPPER = "sweep/mean", "sweep/mean - std", "sweep/mean + std"


def write_board(folder: Path, cells: Iterable[tuple[Cell, CellFolder]]) -> None:
    """Write, for each setting and method, the mean of the monitored metric over finished runs and one standard deviation below and
    above it, at the rounds at which all of them were evaluated. CUSTOM SCALARS shows them as a line with a band. Earlier events of
    the same methods in the sweep's folder are replaced.
    """
    curves: dict[tuple[str, str], list[dict[int, float]]] = {}
    for cell, place in cells:
        if place.run is not None:
            curves.setdefault((cell.setting, cell.method), []).append(curve(place.run, place.remedy))
    for (setting, method), of_runs in curves.items():
        board = folder / BOARD / file_name(setting) / file_name(method)
        before = list(board.glob("events.*"))
        write_curves(board, of_runs)
        for events in before:
            with suppress(FileNotFoundError):  # another process may run the same sweep
                events.unlink()


def curve(run: Path, remedy: str) -> dict[int, float]:
    """The monitored metric on test data by round, where it was evaluated and came to a number. Errors end with the remedy."""
    values = read_measured(run, read_facts(run, remedy)["monitor"], remedy)
    return {round: value for round, value in values.items() if math.isfinite(value)}


def write_curves(folder: Path, curves: Sequence[dict[int, float]]) -> None:
    """Write events with the mean and the band of some runs."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))
    now = time.time()
    writer.add_event(Event(wall_time=now, summary=Summary(value=[_page()])))
    for step in sorted(set.intersection(*map(set, curves))):
        values = [of_run[step] for of_run in curves]
        middle, spread = mean(values), stdev(values) if len(values) > 1 else 0.0
        points = {MEAN: middle, LOWER: middle - spread, UPPER: middle + spread}
        told = [Summary.Value(tag=tag, simple_value=value) for tag, value in points.items()]
        writer.add_event(Event(step=step, wall_time=now, summary=Summary(value=told)))
    writer.close()


def _page() -> object:
    """The layout of CUSTOM SCALARS: one chart, whose lines have bands."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.plugins.custom_scalar import metadata
    from tensorboard.plugins.custom_scalar.layout_pb2 import Category, Chart, Layout, MarginChartContent

    series = MarginChartContent.Series(value=MEAN, lower=LOWER, upper=UPPER)
    chart = Chart(title="monitored metric, mean ± standard deviation over runs", margin=MarginChartContent(series=[series]))
    layout = Layout(category=[Category(title="sweep", chart=[chart])])
    plugin = SummaryMetadata.PluginData(plugin_name=metadata.PLUGIN_NAME)
    content = TensorProto(dtype="DT_STRING", string_val=[layout.SerializeToString()])
    return Summary.Value(tag=metadata.CONFIG_SUMMARY_TAG, tensor=content, metadata=SummaryMetadata(plugin_data=plugin))
