"""Runs the cells of a sweep, each in a process, several in parallel."""

import csv
import io
import itertools
import json
import os
import shlex
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing import connection
from pathlib import Path
from statistics import mean

from lightning_fed.errors import FederationError
from lightning_fed.experiments.sweep.folder import OVER, CellFolder, CellRecord
from lightning_fed.experiments.sweep.plan import Cell
from lightning_fed.experiments.sweep.processes import Start
from lightning_fed.experiments.sweep.progress import SweepProgress
from lightning_fed.system.disk import write_whole
from lightning_fed.system.signals import Preempted, Terminated, first_signal

PATIENCE = 20.0
"""Seconds that a run gets to end when it is asked to."""

LOOK = 0.05
"""Seconds between checks of the running cells, unless one of them ends; the display is updated every twenty of them."""

STOPPED = {os.EX_TEMPFAIL, *(code for number in (signal.SIGTERM, signal.SIGUSR1) for code in (128 + number, -number))}
"""Exit codes of a run that was stopped by a signal and has not failed."""

Paces = dict[tuple[str, str], list[float]]
"""Seconds per round by method and point of the grid."""


@dataclass(frozen=True)
class CellJob:
    """A cell and what is needed to run it.

    Args:
        cell: the cell.
        folder: its folder.
        args: arguments of ``lightning-fed``.
        rounds: number of its rounds; 0 if it is only listed.
        threads: number of torch threads.
        grows: its run was started with fewer rounds.
    """

    cell: Cell
    folder: CellFolder
    args: list[str]
    rounds: int
    threads: int
    grows: bool = False

    @property
    def command(self) -> str:
        """A shell command that runs the cell."""
        return shlex.join([f"OMP_NUM_THREADS={self.threads}", "lightning-fed", *self.args])

    @property
    def names(self) -> dict[str, str]:
        """Environment variables for W&B and MLflow: the run is named after the cell, its group after the sweep's folder."""
        group = self.folder.path.parents[self.cell.name.count("/")].name
        tags = {"mlflow.runName": self.cell.name, "sweep": group, "method": self.cell.method, "seed": str(self.cell.seed)}
        tags |= {"setting": self.cell.setting} if self.cell.setting else {}
        return {"WANDB_NAME": self.cell.name, "WANDB_RUN_GROUP": group, "MLFLOW_RUN_CONTEXT": json.dumps(tags)}


class Attempt:
    """A job that is running.

    Args:
        job: the job.
        lock: the open lock file of its folder, which the process inherits.
        holding: releases the lock.
        facts: a record with the versions, commit and machine.
        start: starts its process.
    """

    def __init__(self, job: CellJob, lock: int, holding: ExitStack, facts: CellRecord, start: Start) -> None:
        before = job.folder.result
        self.job = job
        self.played = job.folder.rounds  # before this attempt
        self._spent = before.seconds if before else 0.0
        self._start = time.monotonic()
        self._outcome = replace(facts, command=job.command, rounds=job.rounds)
        job.folder.record(replace(self._outcome, status="interrupted", seconds=self._spent))  # until it ends
        args = [*job.args, "--ckpt_path=last"] if job.folder.run else job.args
        self._process = start(args, job.folder.log, lock, job.names)
        self._holding = holding.pop_all()  # until it ends; at once if it could not be started

    @property
    def seconds(self) -> float:
        """Seconds since the attempt started."""
        return time.monotonic() - self._start

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def sentinel(self) -> int | None:
        """See :class:`.CellProcess`."""
        return self._process.sentinel

    def ask_to_end(self, number: int = signal.SIGTERM) -> None:
        """Send the run a signal, to stop at once or (SIGUSR1) at its next checkpoint."""
        if not self.ended:
            self._process.send_signal(number)

    def conclude(self) -> CellRecord:
        """Wait for the process, record the result and release the cell."""
        code = self._wait()
        status = "finished" if code == 0 else "interrupted" if code in STOPPED else "failed"
        said = f"killed by {signal.Signals(-code).name}" if code < 0 else self.job.folder.last_line or f"exit code {code}"
        error = said.removeprefix("lightning-fed: error: ") if status == "failed" else ""
        result = replace(self._outcome, status=status, seconds=round(self._spent + self.seconds, 1), error=error)
        with self._holding:
            self.job.folder.record(result)
        return result

    def _wait(self) -> int:
        try:
            return self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(PATIENCE)
            return -signal.SIGTERM  # it was asked to end


def play(
    jobs: Sequence[CellJob],
    workers: int,
    facts: CellRecord,
    progress: SweepProgress,
    changed: Callable[[], None],
    start: Start,
    preempted: Callable[[], bool] = lambda: False,
    wait: bool = False,
) -> None:
    """Run all jobs that are not finished, also those that another process has begun and left. The results are in their folders.

    Args:
        jobs: jobs to run.
        workers: number of parallel runs.
        facts: a record with the versions, commit and machine.
        progress: display of the progress.
        changed: called after each change: :func:`write_cells`.
        start: starts processes.
        preempted: whether the process was asked to stop.
        wait: wait for jobs that are running in other processes.

    Raises:
        FederationError: if one could not be started, when those that had been have ended.
        KeyboardInterrupt: at Ctrl-C, or :class:`lightning_fed.system.signals.Terminated` at SIGTERM, when all processes have ended.
        Preempted: after SIGUSR1, when all runs have stopped at a checkpoint and some are unfinished.
    """
    waiting, elsewhere, playing, paces = deque(jobs), list[CellJob](), list[Attempt](), Paces()
    caught: list[int] = []
    refused: FederationError | None = None
    stopping = left_over = False
    with first_signal(caught.append):  # the start of a process must not be interrupted
        try:
            with progress:
                for look in itertools.count():
                    for attempt in [attempt for attempt in playing if attempt.ended]:
                        playing.remove(attempt)
                        note_pace(paces, attempt)
                        result = attempt.conclude()
                        left_over |= result.status == "interrupted"
                        if attempt.job.folder.status == "playing":  # a fork without its server
                            elsewhere.append(attempt.job)
                        progress.ended(attempt.job.cell.name, result, attempt.job.rounds)
                        changed()
                    if preempted() and not stopping:
                        stopping, left_over = True, left_over or bool(waiting)
                        waiting.clear()
                        elsewhere.clear()
                        for attempt in playing:
                            attempt.ask_to_end(signal.SIGUSR1)
                    while waiting and len(playing) < workers and not caught:
                        job = waiting.popleft()
                        try:
                            begun = attempted(job, facts, start)
                        except FederationError as error:
                            refused = error
                            waiting.clear()
                            elsewhere.clear()
                            break
                        if begun:
                            playing.append(begun)
                            progress.began(job.cell.name)
                        else:
                            progress.passed_over(job.cell.name, status := job.folder.status, job.rounds)
                            elsewhere += [] if status in OVER else [job]
                    if caught or not (playing or waiting or elsewhere):
                        break
                    if look % 20 == 0:  # it reads the files of all runs
                        states = [(job, job.folder.status) for job in elsewhere]
                        for job, status in states:
                            if status in OVER:
                                progress.passed_over(job.cell.name, status, job.rounds)
                        waiting.extend(job for job, status in states if status in ("waiting", "interrupted"))
                        elsewhere = [job for job, status in states if status == "playing" and (wait or playing or waiting)]
                        progress.left = time_left(waiting, playing, paces, workers)
                        progress.at({attempt.job.cell.name: (attempt.job.folder.rounds, attempt.job.rounds) for attempt in playing})
                    connection.wait([attempt.sentinel for attempt in playing if attempt.sentinel is not None], LOOK)
        finally:
            with ExitStack() as last:  # all of it, also if the disk is full
                last.callback(changed)
                for attempt in playing:
                    attempt.ask_to_end()
                    last.callback(attempt.conclude)
        if caught:
            raise KeyboardInterrupt if caught[0] == signal.SIGINT else Terminated()
        if refused:
            raise refused
        if stopping and left_over:
            raise Preempted


def attempted(job: CellJob, facts: CellRecord, start: Start) -> Attempt | None:
    """Start a job; None if it is finished, or running in another process."""
    if job.folder.status == "finished":
        return None  # also if it is another user's
    with ExitStack() as holding:
        lock = holding.enter_context(job.folder.locked())
        if lock is None or job.folder.status == "finished" or job.folder.record_end():
            return None
        return Attempt(job, lock, holding, facts, start)


def note_pace(paces: Paces, attempt: Attempt) -> None:
    """Record how long a round of an attempt took."""
    if (rounds := attempt.job.folder.rounds - attempt.played) > 0:
        paces.setdefault((attempt.job.cell.method, attempt.job.cell.setting), []).append(attempt.seconds / rounds)


def time_left(waiting: Iterable[CellJob], playing: Sequence[Attempt], paces: Paces, workers: int) -> float | None:
    """Expected seconds for the remaining runs, at the pace of the same method so far, or of all; None if nothing is known."""
    known = {key: list(values) for key, values in paces.items()}
    for attempt in playing:
        note_pace(known, attempt)
    if not known:
        return None
    usual = mean(value for values in known.values() for value in values)
    jobs = [*waiting, *(attempt.job for attempt in playing)]
    left = [(job.rounds - job.folder.rounds) * mean(known.get((job.cell.method, job.cell.setting), [usual])) for job in jobs]
    return max(sum(left) / workers, max(left, default=0.0))


def write_cells(path: Path, jobs: Sequence[CellJob]) -> None:
    """Write ``cells.csv``, a row per cell."""
    rows = []
    for job in jobs:
        result = job.folder.result or CellRecord("waiting", command=job.command)
        partition, seed = job.cell.draw
        row: dict[str, object] = {"method": job.cell.method, "setting": job.cell.setting, "value": job.cell.value}
        row |= {"partition": partition, "seed": seed, "status": job.folder.status, "seconds": result.seconds}
        row |= {"folder": job.folder.path, "command": result.command, "error": result.error}
        rows.append(row | {"versions": result.versions, "commit": result.commit, "machine": result.machine})
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue())
