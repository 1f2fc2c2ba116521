"""The verb ``sweep``: checks all runs of a comparison, then runs them."""

import gc
import logging
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import yaml
from rich.console import Console

from lightning_fed.cli.options import Options, positive, say, whole
from lightning_fed.errors import FederationError, error_text, print_error, require
from lightning_fed.experiments.configs import SWEEP, found
from lightning_fed.experiments.sweep.board import BOARD, write_board
from lightning_fed.experiments.sweep.folder import CellFolder, CellRecord
from lightning_fed.experiments.sweep.forks import ForkServer
from lightning_fed.experiments.sweep.plan import Cell, ReportOptions, Sweep, arguments
from lightning_fed.experiments.sweep.player import CellJob, play, write_cells
from lightning_fed.experiments.sweep.processes import CellProcess, Start, own_processes
from lightning_fed.experiments.sweep.progress import SweepProgress
from lightning_fed.experiments.sweep.provenance import commit, machine, versions
from lightning_fed.experiments.sweep.run_files import read_facts, read_settings
from lightning_fed.experiments.sweep.settings import PARTITION_SEED, SEED, Settings, differences, plain, read_yaml
from lightning_fed.experiments.sweep.sweep_file import read_sweep
from lightning_fed.experiments.sweep.tuning import chosen, trials
from lightning_fed.system.console import UnreadConsole
from lightning_fed.system.disk import in_one_line, naming, write_whole
from lightning_fed.system.folders import from_home
from lightning_fed.system.logs import each_line_once
from lightning_fed.system.ranks import forget_rank
from lightning_fed.system.signals import Preempted, preemption

log = logging.getLogger(__name__)

TEXT = """Run a comparison: methods × settings × seeds, each run in a process. Finished runs are not repeated.
Exit code 0: all are finished, or run elsewhere; 1: some have failed; 2: something has to be changed first; 75: stopped at
checkpoints (SIGUSR1); 130, 143: stopped (Ctrl-C, SIGTERM). To continue after a stop, give the same command again."""

ROOM = "Runs continue from their last checkpoints if you make room and give the same command again."


def parser() -> Options:
    """The verb's command line."""
    parser = Options("sweep", TEXT)
    parser.add_argument(
        "--config", type=from_home, required=True, metavar="FILE", help="a file, or a name of lightning-fed configs"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--workers", type=positive, default=1, metavar="N", help="number of parallel runs (default: 1)")
    which.add_argument("--cell", type=whole, metavar="N", help="only the run with this number in the list of --dry_run")
    parser.add_argument("--dry_run", action="store_true", help="check all runs and print their commands, without running them")
    text = "start a new process for each run, with all imports, instead of forking one that has them"
    parser.add_argument("--isolate", action="store_true", help=text)
    return parser


def run(args: Sequence[str]) -> None:
    """Run the verb."""
    given = parser().parse_args(args[1:])
    forget_rank()  # srun -n 4 bash -c 'lightning-fed sweep … --cell $SLURM_PROCID' starts four sweeps
    console = UnreadConsole()
    config = found(given.config, SWEEP)
    sweep = read_sweep(config)
    try:
        found(sweep.base)
    except FederationError as error:
        raise FederationError(f"{config}: there is no base {sweep.base}. {error}") from error
    again = shlex.join(["lightning-fed", *args])
    if given.dry_run:
        best = decided(sweep, console)
        say(commands(sweep, checked(sweep, known_cells(sweep, best), console), best))
        return
    with preemption() as preempted:
        if given.cell is not None:
            play_cell(sweep, given.cell, console, again, preempted)
        elif given.isolate or sys.platform != "linux":  # beyond Linux the state of system libraries does not survive a fork
            play_all(sweep, given.workers, console, own_processes(sweep.threads), again, preempted)
        else:
            with ForkServer(sweep.threads) as start:
                play_all(sweep, given.workers, console, start, again, preempted, start.name_libraries)


def unless_changed(base: Path, start: Start) -> Start:
    """Starts processes as long as the base configuration, which each of them reads, is as it is now.

    Raises:
        FederationError: when a process is started after a change.
    """
    before = read_yaml(base)

    def start_checked(args: Sequence[str], log: Path, lock: int, variables: Mapping[str, str]) -> CellProcess:
        require(
            read_yaml(base) == before,
            f"{base} has changed since the runs were checked: give the same command again, which checks all of them.",
        )
        return start(args, log, lock, variables)

    return start_checked


def known_cells(sweep: Sweep, best: Mapping[tuple[str, str], str]) -> list[Cell]:
    """The runs that try values, and all others whose settings are known, each once: the best trial is also one of the others.
    ``best`` has the best value of each tuned method, by setting and method.
    """
    cells = (*sweep.trials, *(cell for cell in sweep.cells_with(best) if cell.value or cell.method not in sweep.tune))
    return list({cell.name: cell for cell in cells}.values())


def decided(sweep: Sweep, console: Console) -> dict[tuple[str, str], str]:
    """The best value of each tuned method, by setting and method, whose trials have ended with as many rounds as the sweep has."""
    best = chosen(trials(sweep, sweep.folder))
    ended = [cell for cell in sweep.trials if (cell.setting, cell.method) in best]
    jobs = checked(sweep, ended, console, build=False) if ended else []
    growing = {(job.cell.setting, job.cell.method) for job in jobs if job.grows}
    return {key: value for key, value in best.items() if key not in growing}


def commands(sweep: Sweep, jobs: Sequence[CellJob], best: Mapping[tuple[str, str], str]) -> Iterator[str]:
    """The commands of all runs whose settings are known, and the number of the others."""
    cells = [*sweep.trials, *sweep.cells_with(best)]
    numbers = {cell.name: number for number, cell in reversed([*enumerate(cells)])}
    for job in jobs:
        state = f"to continue after round {job.folder.rounds}" if job.grows else job.folder.status
        yield f"# {numbers[job.cell.name]} {job.cell.name}: {state}\n{job.command}"
    for method in sweep.tune:
        unknown = [cell for cell in cells if cell.method == method and not cell.value]
        if more := sum((cell.partition, cell.seed) != sweep.draws[0] for cell in unknown):  # a trial is the first one's run
            yield f"# {more} more of {method}, with the best of {len(sweep.values(method))} values"
    if sweep.tune:
        yield f"# --cell takes 0 to {len(cells) - 1}"


def play_all(
    sweep: Sweep,
    workers: int,
    console: Console,
    start: Start,
    again: str,
    preempted: Callable[[], bool],
    after_check: Callable[[], None] = lambda: None,
) -> None:
    """Run what is not finished: first the runs that try values, then all. ``after_check`` is called after each one that is built.

    Raises:
        FederationError: if all values of a method have ended, none with a number.
    """
    start = unless_changed(found(sweep.base), start)
    jobs = checked(sweep, known_cells(sweep, {}), console, after_check=after_check)
    reopen(jobs)
    write_sweep(sweep)
    tried = [job for job in jobs if job.cell.value]
    played(sweep, tried, known_cells(sweep, {}), workers, console, start, preempted, wait=True)
    if preempted():
        raise Preempted
    best = chosen(trials(sweep, sweep.folder))
    if tried:
        cells = [cell for cell in sweep.cells_with(best) if cell.method not in sweep.tune or cell.value]
        jobs = checked(sweep, cells, console)
        reopen(jobs)
    played(sweep, jobs, known_cells(sweep, best), workers, console, start, preempted)
    undecided = [job for job in tried if (job.cell.setting, job.cell.method) not in best]
    conclude(sweep, [*undecided, *jobs], again)
    if undecided and all(job.folder.status == "finished" for job in undecided):
        names = ", ".join(job.cell.name for job in undecided)
        raise FederationError(
            f"{names} came to no number on validation data, so that no value was chosen: tune other values, or give clients more "
            "validation data (val_share)."
        )


def play_cell(sweep: Sweep, number: int, console: Console, again: str, preempted: Callable[[], bool]) -> None:
    """Run one cell, unless it is finished or being run. The runs that others have begun must have the sweep's settings, too.

    Raises:
        FederationError: if there is no such cell, or its settings are not known yet.
    """
    best = decided(sweep, console)
    cells = [*sweep.trials, *sweep.cells_with(best)]
    if number >= len(cells):
        raise FederationError(f"There is no run {number}: the sweep has {len(cells)}, from 0 on; --dry_run lists them.")
    cell = cells[number]
    if cell.method in sweep.tune and not cell.value:
        raise FederationError(
            f"Run {number} is one of {cell.method} with its best value, which is not known before its runs among 0 to "
            f"{len(sweep.trials) - 1} have ended: run them first."
        )
    begun = [one for one in known_cells(sweep, best) if one.name == cell.name or CellFolder(sweep.folder / one.name).run]
    jobs = [job for job in checked(sweep, begun, console, build=False) if job.cell.name == cell.name]
    reopen(jobs)
    write_sweep(sweep)
    played(sweep, jobs, known_cells(sweep, best), 1, console, own_processes(sweep.threads), preempted)
    conclude(sweep, jobs, again)


def played(
    sweep: Sweep,
    jobs: Sequence[CellJob],
    known: Sequence[Cell],
    workers: int,
    console: Console,
    start: Start,
    preempted: Callable[[], bool],
    wait: bool = False,
) -> None:
    """Run some cells in so many parallel processes, unless there are none. ``known`` are all cells for ``cells.csv``; ``preempted``
    says whether the process was asked to stop; ``wait`` waits for those that are running in other processes.
    """
    if not jobs:
        return
    folders = [CellFolder(sweep.folder / cell.name) for cell in known]
    args = [arguments(sweep, cell, folder.path) for cell, folder in zip(known, folders, strict=True)]
    listed = [CellJob(*one, rounds=0, threads=sweep.threads) for one in zip(known, folders, args, strict=True)]
    facts = CellRecord("interrupted", versions=versions(), commit=commit(), machine=machine())
    progress, drawn = SweepProgress(len(jobs), sum(job.rounds for job in jobs), console), set[str]()

    def note() -> None:
        try:
            write_cells(sweep.folder / "cells.csv", listed)
            finished = [job for job in listed if job.folder.status == "finished"]
            changed = {(job.cell.setting, job.cell.method) for job in finished if job.cell.name not in drawn}
            if changed:
                compared = {cell.name for cell in sweep.cells_with(chosen(trials(sweep, sweep.folder)))}  # without other trials
                redrawn = [job for job in finished if (job.cell.setting, job.cell.method) in changed and job.cell.name in compared]
                write_board(sweep.folder, [(job.cell, job.folder) for job in redrawn])
                drawn.update(job.cell.name for job in finished)
        except (FederationError, OSError) as error:  # runs go on
            log.warning(f"{sweep.folder / 'cells.csv'} and {BOARD} are not up to date: {error_text(error)}")

    with each_line_once(), in_one_line(lambda: ROOM, sweep.folder), naming(sweep.folder):
        play(jobs, workers, facts, progress, note, start, preempted, wait)


def write_sweep(sweep: Sweep) -> None:
    """Write ``sweep.yaml``, for reports. Only once: meanwhile another process may begin the same sweep with more seeds."""
    with in_one_line(lambda: ROOM, sweep.folder), naming(sweep.folder):
        sweep.folder.mkdir(parents=True, exist_ok=True)
        write_whole(sweep.folder / "sweep.yaml", yaml.safe_dump(as_config(sweep), sort_keys=False))


def conclude(sweep: Sweep, jobs: Sequence[CellJob], again: str) -> None:
    """Print the results. Exit code 1 if a run is neither finished nor being run elsewhere."""
    states = {job.cell.name: job.folder.status for job in jobs}
    log.info(f"{sum(state == 'finished' for state in states.values())} of {len(jobs)} runs are finished.")
    for job in jobs:
        result = job.folder.result
        if result is not None and states[job.cell.name] == "failed":
            log.error(f"{job.cell.name} failed: {result.error}; its whole output is in {job.folder.log}.")
    if not set(states.values()) <= {"finished", "playing"}:
        log.error(f"Try the rest again with: {again}")
        raise SystemExit(1)
    log.info(f"Tables and pictures: lightning-fed report {shlex.quote(str(sweep.folder))} --output report")
    log.info(f"Curves, a line and a band for each method: tensorboard --logdir {shlex.quote(str(sweep.folder / BOARD))}")


def checked(
    sweep: Sweep, cells: Sequence[Cell], console: Console, build: bool = True, after_check: Callable[[], None] = lambda: None
) -> list[CellJob]:
    """Parse all runs before the first one starts. Of those that differ only by seeds, one is parsed and, unless all are finished,
    built: the first finished one, whose data must be those of its run, or the first. ``after_check`` is called after each of
    these.

    Raises:
        SystemExit: with code 2, after a line for each error, with its runs.
    """
    jobs, known, wrong = list[CellJob](), dict[tuple[str, str], Settings](), dict[str, list[str]]()
    folders = {cell.name: CellFolder(sweep.folder / cell.name) for cell in cells}
    kinds = {cell.name: (cell.method, repr(cell.overrides)) for cell in cells}
    finished = [name for name, folder in folders.items() if folder.status == "finished"]
    first = {kinds[name]: name for name in (*reversed(folders), *reversed(finished))}
    to_build = {first[kind] for name, kind in kinds.items() if build and name not in finished}
    failed = set[tuple[str, str]]()
    with console.status("Checking the runs…"), each_line_once():  # messages about data are the same for each method
        from lightning_fed.cli.dry_run import LoadedData, check_start, read  # loads torch
        from lightning_fed.storage.run_folder import refuse_run_dir

        refuse_run_dir(sweep.folder)
        data = LoadedData()
        frozen = gc.get_freeze_count()
        gc.freeze()  # collecting looks at what the checks make alone: it takes milliseconds
        for cell in cells:
            folder, kind = folders[cell.name], kinds[cell.name]
            args = arguments(sweep, cell, folder.path)
            if kind in failed:
                continue
            failed.add(kind)  # unless it parses
            try:
                if cell.name in to_build and cell.name not in finished:
                    known[kind] = check_start(cell.name, args, tuned=bool(cell.value), loaded=data)
                elif kind not in known:
                    known[kind] = read(cell.name, args)
                failed.remove(kind)
                folder.refuse_cut()
                seeds = {SEED: cell.seed} | ({} if cell.partition is None else {plain(PARTITION_SEED): cell.partition})
                grows = folder.run is not None and gets_more_rounds(folder, folder.run, known[kind] | seeds)
                if cell.name in to_build and cell.name in finished:
                    check_start(cell.name, args, tuned=bool(cell.value), played=folder.run, loaded=data)
                jobs.append(CellJob(cell, folder, args, known[kind]["federation.rounds"], sweep.threads, grows))
            except FederationError as error:
                wrong.setdefault(str(error).removeprefix(f"{cell.name}: "), []).append(cell.name)
            if cell.name in to_build:
                gc.collect()  # its data, which are in cycles: those of many runs fill the memory
                after_check()
        if not frozen:  # else by someone who forks this process
            gc.unfreeze()
    for what, names in wrong.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        print_error(f"{names[0]}{more}: {what}")
    if wrong:
        raise SystemExit(2)
    return jobs


def gets_more_rounds(folder: CellFolder, run: Path, settings: Settings) -> bool:
    """Whether a cell's run is to be continued for more rounds than it was started with.

    Raises:
        FederationError: if it has other settings than the sweep, or more rounds, with which it would not end as a run that had them
            at first.
    """
    before, rounds = read_settings(run, folder.remedy), "federation.rounds"
    more = settings[rounds] > before[rounds]
    why = obstacle(run, before, folder.remedy) if more else ""
    if different := differences(before, settings, [rounds] if more and not why else []):
        key, (was, is_now) = next(iter(different.items()))
        was = f"{was!r}{why}" if key == rounds else repr(was)
        raise FederationError(
            f"It was run with {key} = {was}, the sweep has {is_now!r}: give the sweep another folder, or remove {folder.path}."
        )
    return more


def obstacle(run: Path, settings: Settings, remedy: str) -> str:
    """Why a run would not end as one that had more rounds at first; empty if it would. Errors in its files end with the remedy."""
    every = read_facts(run, remedy).get("evaluate_every", settings.get("federation.evaluate_every"))
    if not any(run.glob("checkpoints/round_*")):
        return " and has no checkpoint"
    if settings.get("federation.privacy.epsilon") is not None:
        return " and the noise for these"
    if not every or settings["federation.rounds"] % every or settings.get("model.fine_tuning.when") == "last":
        return " and measured after the last, as a longer run would not be"
    return ""


def reopen(jobs: Sequence[CellJob]) -> None:
    """Record finished runs that get more rounds as unfinished: all at once, so that no report compares them with longer ones."""
    for job in jobs:
        if job.grows:
            job.folder.reopen(job.rounds)


def as_config(sweep: Sweep) -> dict[str, object]:
    """A sweep as a file that can be read as the same sweep."""
    published = [{key: value for key, value in vars(entry).items() if value not in (None, "")} for entry in sweep.published]
    named = {"base": str(sweep.base), "folder": str(sweep.folder), "threads": sweep.threads, "seeds": sweep.seeds}
    options = {key: value for key, value in vars(sweep.report).items() if value != getattr(ReportOptions, key)}
    rest = {"methods": sweep.methods, "grid": sweep.grid, "tune": sweep.tune, "published": published, "report": options}
    return named | rest
