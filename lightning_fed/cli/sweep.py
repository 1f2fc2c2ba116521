"""The verb ``sweep``: check all runs of a comparison, then play them."""

import logging
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import yaml
from rich.console import Console

from lightning_fed.cli.options import Options, positive
from lightning_fed.errors import FederationError, print_error
from lightning_fed.experiments.configs import SWEEP, found
from lightning_fed.experiments.sweep.folder import CellFolder, CellRecord
from lightning_fed.experiments.sweep.plan import Cell, ReportOptions, Sweep, arguments, read_sweep
from lightning_fed.experiments.sweep.player import CellJob, play, write_cells
from lightning_fed.experiments.sweep.progress import SweepProgress
from lightning_fed.experiments.sweep.provenance import commit, machine, versions
from lightning_fed.experiments.sweep.settings import PARTITION_SEED, SEED, Settings, differences, flat, plain, read_yaml
from lightning_fed.experiments.sweep.tuning import chosen, trials

log = logging.getLogger(__name__)

TEXT = "Play a comparison: methods × settings × seeds, each run in a process of its own. Finished runs are not played again."


def parser() -> Options:
    """Of the verb's command line."""
    parser = Options("sweep", TEXT)
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="a file, or a name of lightning-fed configs")
    parser.add_argument("--workers", type=positive, default=1, metavar="N", help="runs side by side (default: 1)")
    parser.add_argument("--dry_run", action="store_true", help="check all runs and print their commands, without playing them")
    return parser


def run(args: Sequence[str]) -> None:
    """Do what the command line says."""
    given = parser().parse_args(args[1:])
    console = Console()
    config = found(given.config, SWEEP)
    sweep = read_sweep(config)
    try:
        found(sweep.base)
    except FederationError as error:
        raise FederationError(f"{config}: there is no base {sweep.base}. {error}") from error
    jobs = checked(sweep, [*sweep.trials, *(cell for cell in sweep.cells if cell.method not in sweep.tune)], console)
    tried = [job for job in jobs if job.cell.value]
    if given.dry_run:
        show(sweep, jobs)
        return
    sweep.folder.mkdir(parents=True, exist_ok=True)
    (sweep.folder / "sweep.yaml").write_text(yaml.safe_dump(as_config(sweep), sort_keys=False))
    again = shlex.join(["lightning-fed", *args])
    played(sweep, tried, tried, given.workers, console)
    best = chosen(trials(sweep, sweep.folder))
    if tried:
        cells = [cell for cell in sweep.cells_with(best) if cell.method not in sweep.tune or cell.value]
        jobs = checked(sweep, cells, console)
    played(sweep, jobs, [*tried, *jobs], given.workers, console)
    undecided = [job for job in tried if (job.cell.setting, job.cell.method) not in best]
    conclude(sweep, [*undecided, *jobs], again)


def show(sweep: Sweep, jobs: Sequence[CellJob]) -> None:
    """Print the commands of all runs that are known before something has been played."""
    for job in jobs:
        print(f"# {job.cell.name}: {job.folder.status}\n{job.command}")
    for method in sweep.tune:
        more = len(sweep.settings) * (len(sweep.draws) - 1)
        print(f"# {more} more of {method}, with the best of {len(sweep.values(method))} values")


def played(sweep: Sweep, jobs: Sequence[CellJob], known: Sequence[CellJob], workers: int, console: Console) -> None:
    """Play some runs.

    Args:
        sweep: what they are part of.
        jobs: the runs.
        known: all that are listed in ``cells.csv``.
        workers: how many to play at a time.
        console: where to show it.
    """
    if jobs:
        facts = CellRecord("interrupted", versions=versions(), commit=commit(), machine=machine())
        progress = SweepProgress(len(jobs), sum(job.rounds for job in jobs), console)
        listed = {job.cell.name: job for job in known}  # the best one of what was tried is one of the runs
        play(jobs, workers, facts, progress, partial(write_cells, sweep.folder / "cells.csv", list(listed.values())))


def conclude(sweep: Sweep, jobs: Sequence[CellJob], again: str) -> None:
    """Say what came of it. Exit code 1 if a run is neither finished nor being played elsewhere."""
    states = {job.cell.name: job.folder.status for job in jobs}
    log.info(f"{sum(state == 'finished' for state in states.values())} of {len(jobs)} runs are finished.")
    for job in jobs:
        result = job.folder.result
        if result is not None and states[job.cell.name] == "failed":
            log.error(f"{job.cell.name} failed: {result.error}; all it said is in {job.folder.log}.")
    if not set(states.values()) <= {"finished", "playing"}:
        log.error(f"Try the rest again with: {again}")
        raise SystemExit(1)
    log.info(f"Tables and pictures: lightning-fed report {shlex.quote(str(sweep.folder))} --output report")


def checked(sweep: Sweep, cells: Sequence[Cell], console: Console) -> list[CellJob]:
    """Parse what is to be played, and build what it is made of, before the first run starts; what differs by its seeds alone, once.

    Raises:
        SystemExit: with code 2, after a line for everything that is wrong, with the runs in which it is.
    """
    jobs, known, wrong = list[CellJob](), dict[tuple[str, str], Settings](), dict[str, list[str]]()
    built, failed = set[tuple[str, str]](), set[tuple[str, str]]()
    with console.status("Checking the runs…"):
        from lightning_fed.cli.dry_run import check_start, read  # waits for torch
        from lightning_fed.storage.run_folder import refuse_run_dir

        refuse_run_dir(sweep.folder)

        for cell in cells:
            folder = CellFolder(sweep.folder / cell.name)
            args = arguments(sweep, cell, folder.path)
            kind = (cell.method, repr(cell.overrides))
            if kind in failed:
                continue
            failed.add(kind)  # until it has been understood
            try:
                if kind not in built and folder.status != "finished":
                    known[kind] = check_start(cell.name, args)
                    built.add(kind)
                elif kind not in known:
                    known[kind] = read(cell.name, args)
                failed.remove(kind)
                seeds = {SEED: cell.seed} | ({} if cell.partition is None else {plain(PARTITION_SEED): cell.partition})
                if folder.run is not None:
                    refuse_other(folder, folder.run, known[kind] | seeds)
                jobs.append(CellJob(cell, folder, args, known[kind]["federation.rounds"], sweep.threads))
            except FederationError as error:
                wrong.setdefault(str(error).removeprefix(f"{cell.name}: "), []).append(cell.name)
    for what, names in wrong.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        print_error(f"{names[0]}{more}: {what}")
    if wrong:
        raise SystemExit(2)
    return jobs


def refuse_other(folder: CellFolder, run: Path, settings: Settings) -> None:
    """A cell that was played must be the one that is to be played."""
    before = flat(read_yaml(run / "config.yaml"))
    known = before.keys() & settings.keys()  # not what another version of the library had in addition
    if different := differences({k: before[k] for k in known}, {k: settings[k] for k in known}):
        key, (was, is_now) = next(iter(different.items()))
        raise FederationError(
            f"It was played with {key} = {was!r}, the sweep has {is_now!r}: give the sweep another folder, or remove {folder.path}."
        )


def as_config(sweep: Sweep) -> dict[str, object]:
    """A sweep as a file that reads as the same sweep."""
    published = [{key: value for key, value in vars(entry).items() if value not in (None, "")} for entry in sweep.published]
    named = {"base": str(sweep.base), "folder": str(sweep.folder), "threads": sweep.threads, "seeds": sweep.seeds}
    options = {key: value for key, value in vars(sweep.report).items() if value != getattr(ReportOptions, key)}
    rest = {"methods": sweep.methods, "grid": sweep.grid, "tune": sweep.tune, "published": published, "report": options}
    return named | rest
