"""Reading and checking the file of a sweep."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_fed.errors import FederationError
from lightning_fed.experiments.sweep.plan import (
    LARGEST_SEED,
    VIEWS,
    Overrides,
    Published,
    ReportOptions,
    Seeds,
    Sweep,
    label,
    number_of,
)
from lightning_fed.experiments.sweep.settings import PARTITION_SEED, SEED, plain, read_yaml, within
from lightning_fed.system.folders import from_home

RESERVED = {SEED, PARTITION_SEED, "data.partition_seed", "federation.run_dir", "config", "ckpt_path"}

LONGEST_NAME = 255
"""Maximum number of bytes of a folder's name."""

REPORTED: dict[str, tuple[Any, str]] = {
    "metric": (str, "a column of metrics.csv"),
    "baseline": (str, "a method"),
    "target": ((int, float), "a number"),
    "pooled": (bool, "true or false"),
}
"""Types of the keys of a sweep's report."""


def read_sweep(path: Path) -> Sweep:
    """Read and check a sweep file. Raises :class:`FederationError` with the invalid key."""
    content = read_yaml(path)
    known = list(Sweep.__dataclass_fields__)
    if unknown := [key for key in content if key not in known]:
        raise FederationError(f"{path}: {unknown[0]!r} is not a key of a sweep; known are {', '.join(known)}.")
    if missing := [key for key in ("base", "folder", "methods", "seeds") if not content.get(key)]:
        raise FederationError(f"{path}: {missing[0]!r} is missing; a sweep has base, folder, methods, seeds, and may have a grid.")
    for key, example in (("base", "configs/quickstart.yaml"), ("folder", "runs/my-sweep")):
        if not isinstance(content[key], str) or "\0" in content[key]:
            raise FederationError(f"{path}: {key} is {content[key]!r}, expected a path, such as {example}.")
    methods, grid = _mapping(path, "methods", content), _mapping(path, "grid", content)
    sweep = Sweep(
        base=from_home(content["base"]),
        folder=from_home(content["folder"]),
        methods={str(name): _overrides(path, f"methods.{name}", options) for name, options in methods.items()},
        seeds=_seeds(path, content["seeds"]),
        grid={str(axis): _axis(path, str(axis), values, grid) for axis, values in grid.items()},
        tune=_tune(path, _mapping(path, "tune", content), list(map(str, methods))),
        published=[_published(path, entry) for entry in _listed(path, "published", content)],
        report=_report_options(path, _mapping(path, "report", content)),
        threads=content.get("threads", 1),
    )
    if not _is_whole(sweep.threads) or sweep.threads < 1:
        raise FederationError(f"{path}: threads is {sweep.threads!r}: give a number of torch threads, at least 1.")
    _refuse_conflicts(path, sweep)
    rows = [(entry.method, entry.setting) for entry in sweep.published]
    if doubles := [method for method, setting in rows if rows.count((method, setting)) > 1]:
        raise FederationError(f"{path}: published has several entries for {doubles[0]!r}, expected one for each row: leave one.")
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
    _refuse_unquoted(path, key, value)
    return value


def _refuse_unquoted(path: Path, key: str, names: Iterable[Any]) -> None:
    """Refuse names that YAML has read as something else than a text or a number."""
    if wrong := [name for name in names if name is None or isinstance(name, bool)]:
        raise FederationError(f"{path}: {key} has the name {wrong[0]}, as YAML reads No, Off, Yes or Null: put it in quotes.")


def _overrides(path: Path, key: str, value: Any) -> Overrides:
    value = {} if value is None else value
    if not isinstance(value, Mapping):
        raise FederationError(f"{path}: {key} is {value!r}, expected options as on the command line, such as {{model: FedAvg}}.")
    if taken := [option for option in value if option in RESERVED]:
        raise FederationError(f"{path}: {key} sets {taken[0]}, which the sweep sets for every run: use seeds and folder.")
    return {str(option): setting for option, setting in value.items()}


def _seeds(path: Path, value: Any) -> Seeds:
    """Seeds as given, checked."""
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


def _axis(path: Path, axis: str, values: Any, axes: Iterable[Any]) -> dict[str, Overrides]:
    """An axis as named groups of overrides."""
    if isinstance(values, Mapping) and values:
        _refuse_unquoted(path, f"grid.{axis}", values)
        return {str(name): _overrides(path, f"grid.{axis}.{name}", overrides) for name, overrides in values.items()}
    if isinstance(values, list) and values and _differ(axis, values):
        return {label(axis, value, map(str, axes)): _overrides(path, f"grid.{axis}", {axis: value}) for value in values}
    raise FederationError(f"{path}: grid.{axis} is {values!r}, expected a list of different values, or names and their overrides.")


def _differ(option: str, values: Sequence[Any]) -> bool:
    """Whether all values differ; 1e-1, which YAML reads as text, is 0.1."""
    numbers = map(number_of, values)
    return len({label(option, v if math.isnan(n) else n) for v, n in zip(values, numbers, strict=True)}) == len(values)


def _tune(path: Path, content: Mapping[str, Any], methods: Sequence[str]) -> dict[str, dict[str, list[Any]]]:
    """The values to try for each method; a list without methods applies to all."""
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
            if not isinstance(values, list) or not values or not _differ(option, values):
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
    texts = {key: str(entry[key]) for key in ("method", "setting", "source") if entry.get(key) is not None}  # of YAML: 2019
    return Published(**{**entry, **texts})


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
    if options.between is not None and (not isinstance(options.between, list) or len(options.between) != 2):
        raise FederationError(
            f"{path}: report.between is {options.between!r}, expected a list of two methods, the lower one first."
        )
    budgets = [] if options.budgets is None else options.budgets
    if not isinstance(budgets, list) or not all(isinstance(budget, int | float) and budget > 0 for budget in budgets):
        raise FederationError(f"{path}: report.budgets is {options.budgets!r}, expected a list of MiB, numbers above 0.")
    return options


def _refuse_conflicts(path: Path, sweep: Sweep) -> None:
    for name in (sweep.report.baseline, *(sweep.report.between or ())):
        if name is not None and name not in sweep.methods:
            raise FederationError(f"{path}: report names method {name!r}; the sweep has {', '.join(sweep.methods)}.")
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
    groups = {f"method {name}": set(map(plain, overrides)) for name, overrides in sweep.methods.items()}
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
