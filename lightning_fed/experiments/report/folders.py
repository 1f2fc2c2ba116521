"""Folders of runs: finding them, their names in a comparison, and whether they can be compared."""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning_fed.errors import FederationError
from lightning_fed.experiments.sweep.folder import CellFolder
from lightning_fed.experiments.sweep.plan import Cell, Sweep
from lightning_fed.experiments.sweep.run_files import read_facts, read_settings
from lightning_fed.experiments.sweep.settings import PARTITION_SEED, SEED, Settings, differences, plain, within
from lightning_fed.experiments.sweep.sweep_file import read_sweep
from lightning_fed.experiments.sweep.tuning import chosen, trials
from lightning_fed.system.folders import from_home, numbered, walked

NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.])")
"""A number in a name."""

SEEDS = (SEED, plain(PARTITION_SEED))


@dataclass(frozen=True)
class RunFolder:
    """A run on disk.

    Args:
        path: its folder, with ``metrics.csv``, ``clients.csv``, ``config.yaml`` and ``run.json``.
        settings: its configuration.
        method: its name in the tables.
        setting: point of the grid; empty without one.
        sweep: its sweep and the sweep's folder; None without a sweep.
        equal: seeds of partitions with the same result, if the seed of its partition is not the only one.
    """

    path: Path
    settings: Settings
    method: str
    setting: str
    sweep: tuple[Path, Sweep] | None
    equal: tuple[int, ...] = ()

    @property
    def seed(self) -> int:
        """Seed of all randomness, unless the partition has its own seed."""
        return int(self.settings[SEED])

    @property
    def partition(self) -> int:
        """Seed of the partition; of equal ones the first."""
        own = self.equal[0] if self.equal else self.settings.get(plain(PARTITION_SEED))
        return self.seed if own is None else int(own)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Content of ``run.json``."""
        return read_facts(self.path)

    @property
    def planned_rounds(self) -> int:
        """Number of rounds of the finished run, which may be less than configured."""
        return max(rounds_to_come(self.path), int(self.facts.get("rounds") or self.settings["federation.rounds"]))

    @property
    def monitor(self) -> str:
        """The column of ``metrics.csv`` with the method's monitored metric."""
        return str(self.facts["monitor"])

    @property
    def made_with(self) -> str:
        """Versions and commit; empty if no sweep has recorded them."""
        if (record := CellFolder(self.path.parent).result) is None:
            return ""
        return ", ".join(filter(None, (record.versions, record.commit and f"commit {record.commit}")))

    @property
    def label(self) -> tuple[str, str]:
        return self.method, self.setting


Played = tuple[Sweep, dict[Path, Cell]]
"""A sweep and its runs by their folders."""


def run_folders(folders: Iterable[Path | str], vary: Collection[str] = ()) -> list[RunFolder]:
    """All runs below some folders that have finished a round, in the order of their sweep.

    Args:
        folders: folders of runs, of sweeps, or parents of these.
        vary: keys in which the runs may differ even if no sweep says so; each value is a separate setting.

    Raises:
        FederationError: if there is no run, or if they cannot be compared.
    """
    vary = [plain(key) for key in vary]
    sweeps: dict[Path, Played] = {}
    found = [_labelled(path, vary, sweeps) for path in _with_tables(map(from_home, folders))]
    runs = [run for run in found if run is not None]
    if not runs:
        why = ": give folders with metrics.csv and config.yaml in them"
        if found:
            why = " is one of its sweep: they have tried values that were not chosen, or the sweep no longer has them"
        raise FederationError(f"No run below {', '.join(map(str, folders))}{why}.")
    if unknown := [key for key in vary if not any(within(name, [key]) for run in runs for name in run.settings)]:
        raise FederationError(
            f"No run has the setting {unknown[0]}: --vary takes one of config.yaml, such as data.partition.alpha."
        )
    _refuse_doubles(runs)
    _refuse_incomparable(runs, vary)
    _refuse_changed_data(runs)
    return _without_equal_partitions(sorted(runs, key=_place))


def _with_tables(folders: Iterable[Path]) -> list[Path]:
    """Folders of runs; for a sweep's cell the newest."""
    found = sorted(path for path, files in walked(folders) if {"metrics.csv", "config.yaml"} <= files)
    numbers, cells = numbered(found), dict[Path, list[Path]]()
    for path in found:
        in_cell = (path.parent / "cell.json").is_file()
        if not in_cell or path in numbers:  # otherwise a copy
            cells.setdefault(path.parent if in_cell else path, []).append(path)
    return [max(paths, key=lambda path: numbers.get(path, 0)) for paths in cells.values()]


def _labelled(path: Path, vary: Sequence[str], sweeps: dict[Path, Played]) -> RunFolder | None:
    """A run with its name in the comparison; None if its sweep no longer has it, or tried it without choosing it. Values of the
    keys to ``vary`` are separate settings; ``sweeps`` are those known so far, with the folders of their runs.
    """
    settings = read_settings(path)
    settings["federation.rounds"] = max(rounds_to_come(path), settings["federation.rounds"])
    values = {key: settings.get(key, str(settings.get(f"{key}.class_path")).rpartition(".")[2]) for key in vary}
    varied = ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in values.items())
    root = next((parent for parent in path.absolute().parents if (parent / "sweep.yaml").is_file()), None)
    if root is None:
        return RunFolder(path, settings, str(settings["model.class_path"]).rpartition(".")[2], varied, None)
    if root not in sweeps:
        read = read_sweep(root / "sweep.yaml")
        sweeps[root] = read, {root / cell.name: cell for cell in read.cells_with(chosen(trials(read, root)))}
    sweep, cells = sweeps[root]
    cell = cells.get(path.absolute().parent)
    if cell is None:
        return None
    return RunFolder(path, settings, cell.method, ", ".join(filter(None, (cell.setting, varied))), (root, sweep))


def rounds_to_come(path: Path) -> int:
    """Number of rounds that a sweep's unfinished run is to have, which may be more than it was started with; otherwise 0."""
    record = CellFolder(path.parent).result
    return record.rounds if record is not None and record.status != "finished" else 0


def _place(run: RunFolder) -> tuple[Any, ...]:
    """Sort key of a run: the order of its sweep; runs without a sweep come first."""
    if run.sweep is None:
        return "", 0, 0, by_numbers(run.setting), by_numbers(run.method), run.partition, run.seed
    root, sweep = run.sweep
    settings, methods = list(sweep.settings), list(sweep.methods)
    whole = f"{run.setting}, "  # alpha=1 is not a prefix of alpha=10
    setting = next((index for index, name in enumerate(settings) if not name or whole.startswith(f"{name}, ")), 0)
    names = by_numbers(run.setting), by_numbers(run.method)
    return str(root), setting, methods.index(run.method), *names, run.partition, run.seed


def by_numbers(name: str) -> list[tuple[str, float]]:
    """Sort key of names, by which numbers in them are in order: 0.5 before 10."""
    texts, numbers = NUMBER.split(name), NUMBER.findall(name)
    return list(zip(texts, [*map(float, numbers), 0.0], strict=True))


def _refuse_doubles(runs: Iterable[RunFolder]) -> None:
    seen: dict[tuple[str, str, int, int], RunFolder] = {}
    for run in runs:
        other = seen.setdefault((*run.label, run.partition, run.seed), run)
        if other is not run:
            said = f"seed {run.seed}" + (f", partition {run.partition}" if run.partition != run.seed else "")
            apart = dict.fromkeys(key.removesuffix(".class_path") for key in differences(other.settings, run.settings, SEEDS))
            vary = f", or --vary what they differ in ({', '.join(apart)})" if apart else ""
            raise FederationError(
                f"{other.path} and {run.path} are both {run.method} with {said}: name the folders of the runs that are meant{vary}."
            )


def _refuse_incomparable(runs: Sequence[RunFolder], vary: Sequence[str]) -> None:
    """Runs of one method and setting may only differ in their seeds, those of one setting also in what sweeps give their methods,
    others in all that is meant to vary.
    """
    first, peers = runs[0], dict[tuple[str, str], dict[frozenset[str], RunFolder]]()
    of_setting: dict[str, RunFolder] = {}
    for run in runs:
        known = peers.setdefault(run.label, {})  # a run for each set of options, which differ between versions of the library
        for peer in known.values():
            _refuse_differences(peer, run, run.sweep[1].varied_by_seed if run.sweep else SEEDS)
        known.setdefault(frozenset(run.settings), run)
        other = of_setting.setdefault(run.setting, run)
        methods = {key for one in (other, run) for key in (one.sweep[1].varied_in_setting if one.sweep else {"model"})}
        _refuse_differences(other, run, [*methods, *SEEDS])
        declared = {key for one in (first, run) for key in (one.sweep[1].varied if one.sweep else {"model"})}
        _refuse_differences(first, run, [*declared, *vary, *SEEDS])


def _refuse_changed_data(runs: Iterable[RunFolder]) -> None:
    """Runs with the same options of data and the same partition must have had the same data. Unseen clients that are drawn depend
    on the training seed.
    """
    seen: dict[tuple[object, ...], RunFolder] = {}
    for run in (run for run in runs if "data" in run.facts):  # missing in files of earlier versions
        of_data = {key: value for key, value in run.settings.items() if key.startswith(("data.", "federation.unseen"))}
        seed = run.seed if isinstance(of_data.get("federation.unseen"), float) else None
        other = seen.setdefault((run.setting, run.partition, seed, str(sorted(of_data.items()))), run)
        if other.facts["data"] != run.facts["data"]:
            raise FederationError(
                f"{other.path} and {run.path} have the same options and partition, but not the same data: the files changed in "
                "between; compare runs on the same data."
            )


def _without_equal_partitions(runs: Sequence[RunFolder]) -> list[RunFolder]:
    """The runs, of which those on equal partitions are runs on one; of two with the same training seed as well, the first stays."""
    equal: dict[object, dict[int, None]] = {}
    for run in runs:
        equal.setdefault((run.setting, run.facts.get("data", run.partition)), {})[run.partition] = None
    found: dict[object, RunFolder] = {}
    for run in runs:
        seeds = tuple(equal[run.setting, run.facts.get("data", run.partition)])
        of_one = replace(run, equal=seeds) if len(seeds) > 1 else run
        found.setdefault((*run.label, of_one.partition, run.seed), of_one)
    return list(found.values())


def _refuse_differences(one: RunFolder, other: RunFolder, but: Iterable[str]) -> None:
    if different := differences(one.settings, other.settings, but):
        key, values = next(iter(different.items()))
        raise FederationError(
            f"{one.path} and {other.path} differ in {key} ({values[0]!r} and {values[1]!r}), which was not to vary: compare runs "
            f"that agree in it, or add --vary {key}."
        )
