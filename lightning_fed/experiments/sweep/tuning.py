"""Tuning: the value of each method that is best on validation data, from the files of its runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_fed.errors import FederationError
from lightning_fed.experiments.sweep.folder import OVER, CellFolder
from lightning_fed.experiments.sweep.plan import VIEWS, Cell, Sweep, number_of
from lightning_fed.experiments.sweep.run_files import read_facts, read_measured


@dataclass(frozen=True)
class Trial:
    """A value that was tried.

    Args:
        cell: the run.
        status: its status.
        score: the monitored metric on validation data, larger is better; NaN if the run has not finished.
        metric: the metric's column of ``metrics.csv``; empty if the run has not finished.
        higher_is_better: whether larger values of the metric are better; if not, the score is its negative.
    """

    cell: Cell
    status: str
    score: float = math.nan
    metric: str = ""
    higher_is_better: bool = True


def trials(sweep: Sweep, root: Path) -> list[Trial]:
    """All values to try, and their results so far.

    Raises:
        FederationError: if a run has finished without a number on validation data.
    """
    return [_trial(cell, CellFolder(root / cell.name), sweep.report.at) for cell in sweep.trials]


def grouped(tried: Sequence[Trial]) -> dict[tuple[str, str], list[Trial]]:
    """The trials by setting and method."""
    found: dict[tuple[str, str], list[Trial]] = {}
    for trial in tried:
        found.setdefault((trial.cell.setting, trial.cell.method), []).append(trial)
    return found


def chosen(tried: Sequence[Trial]) -> dict[tuple[str, str], str]:
    """The best value of each setting and method whose runs have all ended, at least one of them finished."""
    over = {key: of for key, of in grouped(tried).items() if all(trial.status in OVER for trial in of)}
    known = {key: [trial for trial in of if not math.isnan(trial.score)] for key, of in over.items()}
    return {key: max(of, key=lambda trial: trial.score).cell.value for key, of in known.items() if of}


def at_edges(sweep: Sweep, method: str, value: str) -> list[str]:
    """The options whose chosen value is the smallest or largest one, so that a better value may lie beyond."""
    found = []
    for option, given in sweep.values(method)[value].items():
        tried = [number for number in map(number_of, sweep.tune[method][option]) if not math.isnan(number)]
        if len(tried) > 1 and number_of(given) in (min(tried), max(tried)):
            found.append(option.rpartition(".")[2])
    return found


def inequality(*sweeps: Sweep) -> str:
    """A note that methods were tuned with different numbers of values; empty if they were not."""
    counts = dict.fromkeys((method, len(sweep.values(method))) for sweep in sweeps for method in sweep.methods)
    if len({count for _, count in counts}) < 2:
        return ""
    said = ", ".join(f"{method} {count or 'none'}" for method, count in counts)
    return f"Methods were tuned unequally; values tried: {said}."


def _trial(cell: Cell, folder: CellFolder, at: str) -> Trial:
    status = folder.status
    if status != "finished" or folder.run is None:
        return Trial(cell, status)
    folder.refuse_cut()
    facts = read_facts(folder.run, folder.remedy)
    metric = facts["monitor"].replace("test_", "val_")
    measured = read_measured(folder.run, metric, folder.remedy).values()
    if not measured:
        raise FederationError(
            f"{folder.run} has no {metric}: values are chosen on validation data, of which clients need some "
            "(data.init_args.val_share)."
        )
    sign = 1 if facts["higher_is_better"] else -1
    return Trial(cell, status, _score([sign * value for value in measured], at), metric, facts["higher_is_better"])


def _score(measured: Sequence[float], at: str) -> float:
    """The reported value of a run's rounds on validation data: if the best round is reported, the best of them."""
    match = VIEWS.fullmatch(at)
    if match and match[1]:
        last = measured[-int(match[1]) :]
        return sum(last) / len(last)
    return measured[-1] if at == "last" else max((value for value in measured if not math.isnan(value)), default=math.nan)
