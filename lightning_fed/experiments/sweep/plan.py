"""What a sweep plays: a file of settings to a list of runs."""

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lightning_fed.errors import FederationError
from lightning_fed.experiments.sweep.settings import PARTITION_SEED, SEED, plain, read_yaml, within

Overrides = dict[str, Any]
"""Options of ``lightning-fed fit`` without their dashes, and their values."""

RESERVED = {SEED, PARTITION_SEED, "data.partition_seed", "federation.run_dir", "config", "ckpt_path"}

OF_SEED, OF_PARTITION = "{seed}", "{partition}"
"""What stands for a run's seeds in the values of overrides: paths to something that has been made for each."""

Seeds = list[int] | dict[str, list[int]]
"""Of a sweep: whole numbers, or those of ``partition`` and of ``training``, of which every pair is played."""

LARGEST_SEED = 2**32 - 1
"""NumPy's."""

LONGEST_NAME = 255
"""Bytes that the name of a folder may have."""

REPORTED: dict[str, tuple[Any, str]] = {
    "metric": (str, "a column of metrics.csv"),
    "baseline": (str, "a method"),
    "target": ((int, float), "a number"),
    "pooled": (bool, "true or false"),
}
"""What keys of a sweep's report have to be."""

VIEWS = re.compile(r"last|selected|best|mean([1-9]\d*)")
"""Which rounds of a run can be reported."""


@dataclass(frozen=True)
class Cell:
    """One run of a sweep.

    Args:
        method: its name in the tables.
        setting: the point of the grid, as ``alpha=0.1``; empty without a grid.
        seed: of everything random, the partition included unless that has a seed of its own.
        overrides: what it changes in the base configuration.
        partition: the partition's own seed; None: it is drawn with ``seed``.
        value: of what the method is tuned in, as ``lr=0.1``; empty if it is not.
    """

    method: str
    setting: str
    seed: int
    overrides: Overrides
    partition: int | None = None
    value: str = ""

    @property
    def name(self) -> str:
        """What it is called, and its folder in the sweep's."""
        seeds = f"seed_{self.seed}" if self.partition is None else f"partition_{self.partition}_seed_{self.seed}"
        return "/".join(filter(None, (file_name(self.setting), file_name(self.method), file_name(self.value), seeds)))

    @property
    def draw(self) -> tuple[int, int]:
        """The seeds of its partition and of all else."""
        return (self.seed if self.partition is None else self.partition), self.seed


@dataclass(frozen=True)
class Published:
    """A number that somebody else reports.

    Args:
        method: the method's name in the sweep.
        mean: the number, in the unit of the table: percent for an accuracy.
        std: its standard deviation, if there is one.
        setting: the point of the grid; empty without a grid.
        source: who reports it.
    """

    method: str
    mean: float
    std: float | None = None
    setting: str = ""
    source: str = ""


@dataclass(frozen=True)
class ReportOptions:
    """What the table of a comparison shows, as the options of ``lightning-fed report`` say it.

    Args:
        metric: column of ``metrics.csv``, or ``monitor``; None: see :func:`lightning_fed.experiments.report.load_runs`.
        at: which round: ``last``, ``selected``, ``best``, ``mean10``.
        baseline: the method that differences are to.
        target: value of which to say when it was reached.
        pooled: also the accuracy over all clients' examples together.
        equal: compare at equal ``flops``, ``bytes`` or ``rounds``.
        room: two methods, the lower and the upper reference between which the others stand.
    """

    metric: str | None = None
    at: str = "last"
    baseline: str | None = None
    target: float | None = None
    pooled: bool = False
    equal: Literal["rounds", "bytes", "flops"] | None = None
    room: Sequence[str] | None = None


@dataclass(frozen=True)
class Sweep:
    """A comparison: methods × points of a grid × seeds, on one base configuration.

    Args:
        base: an ordinary configuration of ``lightning-fed fit``.
        folder: where the runs go.
        methods: overrides by the method's name in the tables. In a value ``{seed}`` is the run's seed, ``{partition}`` that of its
            partition.
        seeds: each gives the same partition to every method; or those of the partition and of everything else, crossed.
        grid: axes; an axis is an option and its values, or a name and named groups of overrides.
        tune: for each method that is tuned, options and the values to try. Every combination is played with the first seeds, and
            then all seeds with the one that is best on validation data.
        published: numbers to print beside ours.
        report: what its table shows, unless ``lightning-fed report`` is told something else.
        threads: torch threads of a run. Sums depend on it in their last bits, so it does not depend on the machine.
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
        """The points of the grid by name; one without a name if there is none."""
        points = itertools.product(*(axis.items() for axis in self.grid.values()))
        return {", ".join(name for name, _ in point): _merged(overrides for _, overrides in point) for point in points}

    @property
    def draws(self) -> list[tuple[int | None, int]]:
        """Seeds of the partition (None: the run's) and of the run. All partitions first: what holds on one need not on others."""
        if isinstance(self.seeds, list):
            return [(None, seed) for seed in self.seeds]
        return [(partition, seed) for seed in self.seeds["training"] for partition in self.seeds["partition"]]

    @property
    def cells(self) -> list[Cell]:
        """All runs, before anything is tuned; see :meth:`cells_with`."""
        return self.cells_with({})

    def cells_with(self, chosen: Mapping[tuple[str, str], str]) -> list[Cell]:
        """All runs, draw by draw, so that a sweep that is stopped early has compared all methods.

        Args:
            chosen: the value with which a method that is tuned is played, by setting and method.
        """
        return [
            self._cell(setting, method, draw, chosen.get((setting, method), ""))
            for draw in self.draws
            for setting in self.settings
            for method in self.methods
        ]

    @property
    def trials(self) -> list[Cell]:
        """The runs that say with which values methods are played, on the first partition and training seed."""
        return [
            self._cell(setting, method, self.draws[0], value)
            for setting in self.settings
            for method in self.tune
            for value in self.values(method)
        ]

    def values(self, method: str) -> dict[str, Overrides]:
        """What is tried of a method, by name: every combination of its options' values."""
        axes = [{label(option, value): {option: value} for value in values} for option, values in self.tune.get(method, {}).items()]
        points = itertools.product(*(axis.items() for axis in axes)) if axes else ()
        return {", ".join(name for name, _ in point): _merged(overrides for _, overrides in point) for point in points}

    def _cell(self, setting: str, method: str, draw: tuple[int | None, int], value: str) -> Cell:
        overrides = self.methods[method] | self.settings[setting] | self.values(method).get(value, {})
        return Cell(method, setting, draw[1], _of_draw(overrides, *draw), draw[0], value)

    @property
    def varied(self) -> set[str]:
        """The keys in which the runs differ because the file says so."""
        given = (*self.methods.values(), *self.settings.values(), *self.tune.values())
        keys = {plain(key) for overrides in given for key in overrides}
        return keys | {SEED, plain(PARTITION_SEED)}

    @property
    def varied_by_seed(self) -> set[str]:
        """The keys in which runs of one method and setting differ."""
        groups = (*self.methods.values(), *self.settings.values())
        given = [(key, value) for overrides in groups for key, value in overrides.items() if isinstance(value, str)]
        return {SEED, plain(PARTITION_SEED)} | {plain(key) for key, value in given if OF_SEED in value or OF_PARTITION in value}


def read_sweep(path: Path) -> Sweep:
    """Read and check a sweep file. Raises :class:`FederationError` naming the key that is wrong."""
    content = read_yaml(path)
    known = list(Sweep.__dataclass_fields__)
    if unknown := [key for key in content if key not in known]:
        raise FederationError(f"{path}: {unknown[0]!r} is no key of a sweep; known are {', '.join(known)}.")
    if missing := [key for key in ("base", "folder", "methods", "seeds") if not content.get(key)]:
        raise FederationError(f"{path}: {missing[0]!r} is missing; a sweep has base, folder, methods, seeds, and may have a grid.")
    for key, example in (("base", "configs/quickstart.yaml"), ("folder", "runs/my-sweep")):
        if not isinstance(content[key], str) or "\0" in content[key]:
            raise FederationError(f"{path}: {key} is {content[key]!r}, expected a path, such as {example}.")
    methods = _mapping(path, "methods", content)
    sweep = Sweep(
        base=Path(content["base"]),
        folder=Path(content["folder"]),
        methods={str(name): _overrides(path, f"methods.{name}", options) for name, options in methods.items()},
        seeds=_seeds(path, content["seeds"]),
        grid={str(axis): _axis(path, str(axis), values) for axis, values in _mapping(path, "grid", content).items()},
        tune=_tune(path, _mapping(path, "tune", content), list(map(str, methods))),
        published=[_published(path, entry) for entry in _listed(path, "published", content)],
        report=_report_options(path, _mapping(path, "report", content)),
        threads=content.get("threads", 1),
    )
    if not _is_whole(sweep.threads) or sweep.threads < 1:
        raise FederationError(f"{path}: threads is {sweep.threads!r}: give a number of torch threads, at least 1.")
    _refuse_conflicts(path, sweep)
    return sweep


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _listed(path: Path, key: str, content: Mapping[str, Any]) -> list[Any]:
    value = content.get(key) or []
    if not isinstance(value, list):
        raise FederationError(f"{path}: {key} is {value!r}, expected a list.")
    return value


def _mapping(path: Path, key: str, content: Mapping[str, Any]) -> Mapping[str, Any]:
    value = content.get(key) or {}
    if not isinstance(value, Mapping):
        raise FederationError(f"{path}: {key} is {value!r}, expected names and what belongs to them.")
    return value


def _overrides(path: Path, key: str, value: Any) -> Overrides:
    value = {} if value is None else value
    if not isinstance(value, Mapping):
        raise FederationError(f"{path}: {key} is {value!r}, expected options as on the command line, such as {{model: FedAvg}}.")
    if taken := [option for option in value if option in RESERVED]:
        raise FederationError(f"{path}: {key} sets {taken[0]}, which the sweep sets for every run: use seeds and folder.")
    return {str(option): setting for option, setting in value.items()}


def _seeds(path: Path, value: Any) -> Seeds:
    """Seeds as they are given, checked."""
    if isinstance(value, Mapping):
        if value.keys() != {"partition", "training"}:
            raise FederationError(f"{path}: seeds has {', '.join(map(str, value))}, expected partition and training.")
        return {kind: _numbers(path, f"seeds.{kind}", value[kind]) for kind in ("partition", "training")}
    return _numbers(path, "seeds", value)


def _numbers(path: Path, key: str, value: Any) -> list[int]:
    good = isinstance(value, list) and value and all(_is_whole(seed) and 0 <= seed <= LARGEST_SEED for seed in value)
    if not good or len(set(value)) != len(value):
        raise FederationError(
            f"{path}: {key} is {value!r}, expected different numbers from 0 to {LARGEST_SEED}, such as [0, 1, 2]."
        )
    return list(value)


def _axis(path: Path, axis: str, values: Any) -> dict[str, Overrides]:
    """An axis as named groups of overrides."""
    if isinstance(values, Mapping) and values:
        return {str(name): _overrides(path, f"grid.{axis}.{name}", overrides) for name, overrides in values.items()}
    if isinstance(values, list) and values:
        return {label(axis, value): _overrides(path, f"grid.{axis}", {axis: value}) for value in values}
    raise FederationError(f"{path}: grid.{axis} is {values!r}, expected a list of values, or names and their overrides.")


def _tune(path: Path, content: Mapping[str, Any], methods: Sequence[str]) -> dict[str, dict[str, list[Any]]]:
    """What is tried of each method: of an option with a list, of all of them."""
    for_all = {option: values for option, values in content.items() if isinstance(values, list)}
    own = {str(method): options for method, options in content.items() if not isinstance(options, list)}
    for method, options in own.items():
        if method not in methods or not isinstance(options, Mapping):
            raise FederationError(
                f"{path}: tune.{method} is {options!r}, expected an option and its values, or a method ({', '.join(methods)}) and "
                "options with their values."
            )
    found = {}
    for method in methods:
        options = _overrides(path, f"tune.{method}", for_all | dict(own.get(method, {})))
        for option, values in options.items():
            if not isinstance(values, list) or not values or len({label(option, value) for value in values}) < len(values):
                raise FederationError(f"{path}: tune.{option} is {values!r}, expected a list of different values.")
        if options:
            found[method] = options
    return found


def _published(path: Path, entry: Any) -> Published:
    known = list(Published.__dataclass_fields__)
    if not isinstance(entry, Mapping) or not {"method", "mean"} <= entry.keys() <= set(known):
        raise FederationError(f"{path}: published has the entry {entry!r}, expected {', '.join(known)} (the first two at least).")
    for key in ("mean", "std"):
        value = entry.get(key)
        if not (key == "std" and value is None) and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise FederationError(f"{path}: published has {key} {value!r} of {entry['method']!r}, expected a number.")
    return Published(**entry)


def _report_options(path: Path, entry: Mapping[str, Any]) -> ReportOptions:
    known = list(ReportOptions.__dataclass_fields__)
    if unknown := [key for key in entry if key not in known]:
        raise FederationError(f"{path}: report has the key {unknown[0]!r}, expected {', '.join(known)}.")
    options = ReportOptions(**entry)
    for key, (kinds, expected) in REPORTED.items():
        value = getattr(options, key)
        if value is not None and (not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool)):
            raise FederationError(f"{path}: report.{key} is {value!r}, expected {expected}.")
    if options.equal not in (None, "rounds", "bytes", "flops"):
        raise FederationError(f"{path}: report.equal is {options.equal!r}, expected rounds, bytes or flops.")
    if not VIEWS.fullmatch(str(options.at)):
        raise FederationError(f"{path}: report.at is {options.at!r}, expected last, selected, best or, say, mean10.")
    if options.room is not None and (not isinstance(options.room, list) or len(options.room) != 2):
        raise FederationError(f"{path}: report.room is {options.room!r}, expected a list of two methods, the lower one first.")
    return options


def _refuse_conflicts(path: Path, sweep: Sweep) -> None:
    names = [cell.name for cell in (*sweep.cells, *sweep.trials)]
    if long := next((part for name in names for part in name.split("/") if len(part.encode()) > LONGEST_NAME), None):
        raise FederationError(
            f"{path}: {long[:40]}… would be the name of a folder, with {len(long)} characters: shorten the method's name, or give "
            f"the points of the grid names, up to {LONGEST_NAME} characters."
        )
    if double := next((name for name in names if names.count(name) > 1), None):
        raise FederationError(f"{path}: two runs would be called {double}: give methods and points of the grid different names.")
    axes = list(sweep.grid.values())
    points = [{plain(key) for overrides in axis.values() for key in overrides} for axis in axes]
    groups = {f"method {name}": {plain(key) for key in overrides if key != "model"} for name, overrides in sweep.methods.items()}
    for method, options in sweep.tune.items():
        given = {*sweep.methods[method], *(key for point in sweep.settings.values() for key in point)}
        if both := sorted(set(map(plain, options)) & set(map(plain, given))):
            raise FederationError(f"{path}: tune and method {method} or the grid both set {both[0]}: leave it to one of them.")
    groups |= {f"axis {name}": keys for name, keys in zip(sweep.grid, points, strict=True)}
    for (one, keys), (axis, others) in itertools.product(groups.items(), zip(sweep.grid, points, strict=True)):
        if one != f"axis {axis}" and (both := sorted(key for key in keys if within(key, others))):
            raise FederationError(f"{path}: {one} and grid.{axis} both set {both[0]}: leave it to one of them.")
    for entry in sweep.published:
        if entry.method not in sweep.methods or entry.setting not in sweep.settings:
            raise FederationError(
                f"{path}: published names method {entry.method!r} and setting {entry.setting!r}; the sweep has methods "
                f"{', '.join(sweep.methods)} and settings {', '.join(map(repr, sweep.settings))}."
            )


def _of_draw(overrides: Overrides, partition: int | None, seed: int) -> Overrides:
    """Overrides of a run with these seeds."""
    named = {OF_SEED: str(seed), OF_PARTITION: str(seed if partition is None else partition)}
    return {key: _replaced(value, named) if isinstance(value, str) else value for key, value in overrides.items()}


def _replaced(text: str, by: Mapping[str, str]) -> str:
    for name, value in by.items():
        text = text.replace(name, value)
    return text


def _merged(groups: Iterable[Overrides]) -> Overrides:
    return {key: value for group in groups for key, value in group.items()}


def arguments(sweep: Sweep, cell: Cell, run_dir: Path) -> list[str]:
    """The arguments of ``lightning-fed`` that play a cell."""
    given = [f"--{option}={_text(value)}" for option, value in cell.overrides.items()]
    seeds = [f"--{SEED}={cell.seed}"] + ([] if cell.partition is None else [f"--{PARTITION_SEED}={cell.partition}"])
    return ["fit", "--config", str(sweep.base), *given, *seeds, f"--federation.run_dir={run_dir}"]


def file_name(name: str) -> str:
    """A name without what file systems and shells dislike."""
    return re.sub(r"[^\w.=+-]+", "_", name)


def label(option: str, value: Any) -> str:
    """A value as a name, with the last part of its option's."""
    return f"{option.rpartition('.')[2]}={_text(value)}"


def _text(value: Any) -> str:
    """A value as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value)
