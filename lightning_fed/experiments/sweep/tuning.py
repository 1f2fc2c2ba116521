"""Which value a method is played with: the best one on validation data, by what its runs have written."""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_fed.errors import FederationError
from lightning_fed.experiments.sweep.folder import CellFolder
from lightning_fed.experiments.sweep.plan import VIEWS, Cell, Sweep
from lightning_fed.experiments.sweep.settings import read_json

OVER = ("finished", "failed")
"""How a run ends."""


@dataclass(frozen=True)
class Trial:
    """A value that was tried.

    Args:
        cell: the run.
        status: of it.
        score: the monitored metric on validation data, a larger one the better; NaN if the run has not finished.
        metric: the column of ``metrics.csv`` that it is of; empty if the run has not finished.
        higher_is_better: whether large values of that are good; where not, the score is its negative.
    """

    cell: Cell
    status: str
    score: float = math.nan
    metric: str = ""
    higher_is_better: bool = True


def trials(sweep: Sweep, root: Path) -> list[Trial]:
    """All values that are tried, and what came of them so far.

    Raises:
        FederationError: if a run has finished without a number on validation data.
    """
    return [_trial(cell, CellFolder(root / cell.name), sweep.report.at) for cell in sweep.trials]


def grouped(tried: Sequence[Trial]) -> dict[tuple[str, str], list[Trial]]:
    """What was tried, by setting and method."""
    found: dict[tuple[str, str], list[Trial]] = {}
    for trial in tried:
        found.setdefault((trial.cell.setting, trial.cell.method), []).append(trial)
    return found


def chosen(tried: Sequence[Trial]) -> dict[tuple[str, str], str]:
    """The best value of each setting and method of which all runs have come to their end, and one of them has finished."""
    over = {key: of for key, of in grouped(tried).items() if all(trial.status in OVER for trial in of)}
    known = {key: [trial for trial in of if not math.isnan(trial.score)] for key, of in over.items()}
    return {key: max(of, key=lambda trial: trial.score).cell.value for key, of in known.items() if of}


def at_edges(sweep: Sweep, method: str, value: str) -> list[str]:
    """The options of which a value is the smallest or largest that is tried, where the best one may lie beyond."""
    found = []
    for option, given in sweep.values(method)[value].items():
        tried = [other for other in sweep.tune[method][option] if isinstance(other, int | float)]
        if len(tried) > 1 and given in (min(tried), max(tried)):
            found.append(option.rpartition(".")[2])
    return found


def inequality(sweep: Sweep) -> str:
    """That some methods were tuned with more care than others; empty if they were not."""
    counts = {method: len(sweep.values(method)) for method in sweep.methods}
    if len(set(counts.values())) < 2:
        return ""
    said = ", ".join(f"{method} {count or 'none'}" for method, count in counts.items())
    return f"Methods were tuned unequally; values tried: {said}."


def _trial(cell: Cell, folder: CellFolder, at: str) -> Trial:
    status = folder.status
    if status != "finished" or folder.run is None:
        return Trial(cell, status)
    facts = read_json(folder.run / "run.json")
    metric = str(facts["monitor"]).replace("test_", "val_")
    with (folder.run / "metrics.csv").open(newline="") as file:
        measured = [float(row[metric]) for row in csv.DictReader(file) if row.get(metric)]
    if not measured:
        raise FederationError(
            f"{folder.run} has no {metric}: values are chosen on validation data, of which clients need some "
            "(data.init_args.val_share)."
        )
    sign = 1 if facts["higher_is_better"] else -1
    return Trial(cell, status, _score([sign * value for value in measured], at), metric, bool(facts["higher_is_better"]))


def _score(measured: Sequence[float], at: str) -> float:
    """What is reported of a run's rounds, on validation data: where that is the best round, the best of these."""
    match = VIEWS.fullmatch(at)
    if match and match[1]:
        last = measured[-int(match[1]) :]
        return sum(last) / len(last)
    return measured[-1] if at == "last" else max(measured)
