"""Reading the files of a run for a sweep or a report. Errors name the file and end with the given remedy."""

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_fed.errors import FederationError, one_line
from lightning_fed.experiments.sweep.settings import PARTITION_SEED, SEED, Settings, flat, plain, read_yaml

OWN = plain(PARTITION_SEED)

NEEDED_SETTINGS: dict[str, type] = {SEED: int, "federation.rounds": int, "model.class_path": str}
"""Settings that every run has."""

UNCHANGED = "Give folders as runs have written them."
"""The remedy for folders that were given by a user."""


def read_settings(run: Path, remedy: str = UNCHANGED) -> Settings:
    """``config.yaml`` as a flat table; checks the settings that a sweep and a report need."""
    path = run / "config.yaml"
    try:
        settings = flat(read_yaml(path))
    except RecursionError:
        raise FederationError(f"{path} is nested without end. {remedy}") from None
    needed = NEEDED_SETTINGS | ({OWN: int} if settings.get(OWN) is not None else {})
    for key, kind in needed.items():
        if not isinstance(settings.get(key), kind):
            raise FederationError(f"{path} has {key} = {str(settings.get(key))[:40]!r}, expected {kind.__name__}. {remedy}")
    return settings


def read_facts(run: Path, remedy: str = UNCHANGED) -> dict[str, Any]:
    """``run.json``; checks the facts that a sweep and a report need."""
    path = run / "run.json"
    try:
        facts = json.loads(path.read_text())
        kinds = isinstance(facts["monitor"], str) and isinstance(facts["higher_is_better"], bool)
        texts = [facts.get("data", ""), *facts.get("lower_is_better", ())]  # missing in files of earlier versions
        numbers = [facts.get(name, 0) for name in ("rounds", "evaluate_every", "clients")]  # the same
        kinds = kinds and all(isinstance(text, str) for text in texts) and all(isinstance(number, int) for number in numbers)
        fits = kinds and all(_is_phase(phase) for phase in (*facts["training"], *facts["fine_tuning"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        fits = False
    if not fits:
        raise FederationError(
            f"{path} does not say what a run writes there (its monitored metric, and the phases of training and fine-tuning). "
            f"{remedy}"
        )
    return dict(facts)


def read_measured(run: Path, column: str, remedy: str = UNCHANGED) -> dict[int, float]:
    """A column of ``metrics.csv`` by round, where it was measured, read without pandas, whose import takes long."""
    path = run / "metrics.csv"
    try:
        with path.open(newline="") as file:
            return {int(float(row["round"])): float(row[column]) for row in csv.DictReader(file) if row.get(column)}
    except (ValueError, OverflowError, KeyError, TypeError, csv.Error) as error:
        raise FederationError(f"{path} is damaged ({one_line(error)}), expected numbers. {remedy}") from error


def refuse_cut_clients(run: Path, remedy: str = UNCHANGED) -> None:
    """Raise :class:`FederationError` if ``clients.csv`` lacks some of the clients that a run has measured."""
    facts, path, found = read_facts(run, remedy), run / "clients.csv", 0
    if path.is_file():
        with path.open(newline="", errors="replace") as file:
            found = max(0, sum(1 for _ in csv.reader(file)) - 1)
    of_run = facts.get("clients", 0)  # missing in files of earlier versions
    if found < of_run and read_measured(run, facts["monitor"], remedy):
        raise FederationError(f"{path} has {found} clients of a run with {of_run}: it was cut. {remedy}")


def _is_phase(phase: Any) -> bool:
    if not isinstance(phase, Mapping) or not isinstance(phase.get("phase"), str):
        return False
    return isinstance(phase.get("epochs", phase.get("steps")), int)
