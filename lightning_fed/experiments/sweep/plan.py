"""The runs of a sweep: methods × points of a grid × seeds."""

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Literal

from lightning_fed.experiments.sweep.settings import PARTITION_SEED, SEED, flat, plain

Overrides = dict[str, Any]
"""Options of ``lightning-fed fit`` without dashes, and their values."""

OF_SEED, OF_PARTITION = "{seed}", "{partition}"
"""Placeholders of a run's seeds in values of overrides, such as paths to files that exist for each seed."""

Seeds = list[int] | dict[str, list[int]]
"""Seeds of a sweep: integers, or those of ``partition`` and of ``training``, of which every pair is run."""

LARGEST_SEED = 2**32 - 1
"""NumPy's maximum seed."""

VIEWS = re.compile(r"last|selected|best|mean([1-9]\d*)")
"""The rounds of a run that can be reported."""


@dataclass(frozen=True)
class Cell:
    """One run of a sweep.

    Args:
        method: its name in the tables.
        setting: point of the grid, such as ``alpha=0.1``; empty without a grid.
        seed: seed of all randomness, including the partition unless that has its own.
        overrides: changes to the base configuration.
        partition: seed of the partition. None: the partition is drawn with ``seed``.
        value: value of the tuned options, such as ``lr=0.1``; empty if the method is not tuned.
    """

    method: str
    setting: str
    seed: int
    overrides: Overrides
    partition: int | None = None
    value: str = ""

    @property
    def name(self) -> str:
        """Name of the cell, and of its folder in the sweep's folder."""
        seeds = f"seed_{self.seed}" if self.partition is None else f"partition_{self.partition}_seed_{self.seed}"
        return "/".join(filter(None, (file_name(self.setting), file_name(self.method), file_name(self.value), seeds)))

    @property
    def draw(self) -> tuple[int, int]:
        """The seeds of its partition and of everything else."""
        return (self.seed if self.partition is None else self.partition), self.seed


@dataclass(frozen=True)
class Published:
    """A published number.

    Args:
        method: the method's name in the sweep.
        mean: the number, in the unit of the table: percent for an accuracy.
        std: its standard deviation, if published.
        setting: point of the grid; empty without a grid.
        source: where it is published.
    """

    method: str
    mean: float
    std: float | None = None
    setting: str = ""
    source: str = ""


@dataclass(frozen=True)
class ReportOptions:
    """What the table of a comparison shows; the options of ``lightning-fed report``.

    Args:
        metric: column of ``metrics.csv``, or ``monitor``. None: see :func:`lightning_fed.experiments.report.load_runs`.
        at: reported round: ``last``, ``selected``, ``best``, ``mean10``.
        baseline: reference method of differences.
        target: also report when the metric reached this value.
        pooled: also report the mean in which clients weigh by their examples: of accuracies, that over all examples together.
        equal: compare at equal ``flops``, ``bytes`` or ``rounds``.
        between: two methods, the lower and the upper reference between which the positions of the others are reported.
        budgets: budgets in MiB, for a table of what methods reach with each.
    """

    metric: str | None = None
    at: str = "last"
    baseline: str | None = None
    target: float | None = None
    pooled: bool = False
    equal: Literal["rounds", "bytes", "flops"] | None = None
    between: Sequence[str] | None = None
    budgets: Sequence[float] | None = None


@dataclass(frozen=True)
class Sweep:
    """A comparison: methods × points of a grid × seeds, with one base configuration.

    Args:
        base: an ordinary configuration of ``lightning-fed fit``.
        folder: folder of the runs.
        methods: overrides by the method's name in the tables. In a value, ``{seed}`` is the run's seed and ``{partition}`` that of
            its partition.
        seeds: each gives the same partition to every method; or seeds of the partition and of everything else, crossed.
        grid: axes; an axis is an option and its values, or a name and named groups of overrides.
        tune: for each tuned method, options and the values to try. Every combination is run with the first seeds, and then all
            seeds with the combination that is best on validation data.
        published: published numbers to print with the results.
        report: what its table shows, unless ``lightning-fed report`` gets other options.
        threads: number of torch threads of a run, fixed because sums depend on it in their last bits.
    """

    base: Path
    folder: Path
    methods: dict[str, Overrides]
    seeds: Seeds
    grid: dict[str, dict[str, Overrides]] = field(default_factory=dict)
    tune: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    published: list[Published] = field(default_factory=list)
    report: ReportOptions = ReportOptions()
    threads: int = 1

    @property
    def settings(self) -> dict[str, Overrides]:
        """The points of the grid by name; a single one without a name if there is no grid."""
        points = itertools.product(*(axis.items() for axis in self.grid.values()))
        return {", ".join(name for name, _ in point): _merged(overrides for _, overrides in point) for point in points}

    @property
    def draws(self) -> list[tuple[int | None, int]]:
        """Seeds of the partition (None: the run's) and of the run. All partitions come first: results may not hold for others."""
        if isinstance(self.seeds, list):
            return [(None, seed) for seed in self.seeds]
        return [(partition, seed) for seed in self.seeds["training"] for partition in self.seeds["partition"]]

    @property
    def cells(self) -> list[Cell]:
        """All runs, before anything is tuned; see :meth:`cells_with`."""
        return self.cells_with({})

    def cells_with(self, chosen: Mapping[tuple[str, str], str]) -> list[Cell]:
        """All runs, seed by seed, so that a sweep that is stopped early has compared all methods; with the chosen value of each
        tuned method, by setting and method.
        """
        return [
            self._cell(setting, method, draw, chosen.get((setting, method), ""))
            for draw in self.draws
            for setting in self.settings
            for method in self.methods
        ]

    @property
    def trials(self) -> list[Cell]:
        """The runs that determine the best values, with the first partition and training seed."""
        return [
            self._cell(setting, method, self.draws[0], value)
            for setting in self.settings
            for method in self.tune
            for value in self.values(method)
        ]

    def values(self, method: str) -> dict[str, Overrides]:
        """The values to try for a method, by name: every combination of its options' values."""
        tried = self.tune.get(method, {})
        axes = [{label(option, value, tried): {option: value} for value in values} for option, values in tried.items()]
        points = itertools.product(*(axis.items() for axis in axes)) if axes else ()
        return {", ".join(name for name, _ in point): _merged(overrides for _, overrides in point) for point in points}

    def _cell(self, setting: str, method: str, draw: tuple[int | None, int], value: str) -> Cell:
        overrides = self.methods[method] | self.settings[setting] | self.values(method).get(value, {})
        return Cell(method, setting, draw[1], _of_draw(overrides, *draw), draw[0], value)

    @property
    def varied(self) -> set[str]:
        """The keys in which the runs differ by the sweep file."""
        return self.varied_in_setting | {plain(key) for overrides in self.settings.values() for key in overrides}

    @property
    def varied_in_setting(self) -> set[str]:
        """The keys in which runs of one setting differ."""
        given = (*self.methods.values(), *self.tune.values())
        return {plain(key) for overrides in given for key in overrides} | self.varied_by_seed

    @property
    def varied_by_seed(self) -> set[str]:
        """The keys in which runs of one method and setting differ."""
        groups = (*self.methods.values(), *self.settings.values(), *self.tune.values())
        given = [item for overrides in groups for item in flat({plain(key): value for key, value in overrides.items()}).items()]
        return {SEED, plain(PARTITION_SEED)} | {key for key, value in given if OF_SEED in str(value) or OF_PARTITION in str(value)}


def _of_draw(overrides: Overrides, partition: int | None, seed: int) -> Overrides:
    """Overrides of a run with these seeds."""
    named = {OF_SEED: str(seed), OF_PARTITION: str(seed if partition is None else partition)}
    return {key: _replaced(value, named) for key, value in overrides.items()}


def _replaced(value: Any, by: Mapping[str, str]) -> Any:
    """A value, in whose texts names are replaced."""
    if isinstance(value, Mapping):
        return {key: _replaced(inner, by) for key, inner in value.items()}
    if isinstance(value, list):
        return [_replaced(inner, by) for inner in value]
    for name, text in by.items() if isinstance(value, str) else ():
        value = value.replace(name, text)
    return value


def _merged(groups: Iterable[Overrides]) -> Overrides:
    return {key: value for group in groups for key, value in group.items()}


def arguments(sweep: Sweep, cell: Cell, run_dir: Path) -> list[str]:
    """The arguments of ``lightning-fed`` for a cell."""
    given = [f"--{option}={_text(value)}" for option, value in cell.overrides.items()]
    seeds = [f"--{SEED}={cell.seed}"] + ([] if cell.partition is None else [f"--{PARTITION_SEED}={cell.partition}"])
    return ["fit", "--config", str(sweep.base), *given, *seeds, f"--federation.run_dir={run_dir}"]


def file_name(name: str) -> str:
    """A name without characters that file systems and shells treat specially, and not ``..``."""
    return re.sub(r"[^\w.=+-]+|^\.+$", "_", name)


def label(option: str, value: Any, options: Iterable[str] = ()) -> str:
    """A value as a name, with the last part of its option's, or as many as tell the option from others."""
    parts, others = plain(option).split("."), [f".{plain(other)}" for other in options if other != option]
    ends = (".".join(parts[place:]) for place in reversed(range(len(parts))))
    end = next((end for end in ends if not any(other.endswith(f".{end}") for other in others)), plain(option))
    return f"{end}={_text(value)}"


def number_of(value: object) -> float:
    """A number, also one that YAML reads as text (``1e-3``); NaN for anything else."""
    try:
        return math.nan if isinstance(value, bool) else float(str(value))
    except ValueError:
        return math.nan


def _text(value: Any) -> str:
    """A value as it is written on the command line."""
    return str(value) if isinstance(value, str | date) else json.dumps(value, default=str)  # YAML reads 2024-01-31 as a date
