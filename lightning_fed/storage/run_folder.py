"""Folders of runs: ``run_dir/version_<n>``, numbered like those of Lightning's loggers."""

import os
from pathlib import Path

from lightning_fed.errors import FederationError
from lightning_fed.storage.checkpoint import Checkpoint, Checkpoints
from lightning_fed.system.folders import numbered

LONGEST = 100
"""Maximum number of characters of a path in a message."""


def versions(run_dir: Path) -> list[Path]:
    """Folders of all runs, oldest first."""
    return [path for path in numbered(run_dir.glob("version_*")) if path.is_dir()]


def refuse_run_dir(run_dir: Path) -> None:
    """Refuse a path where no folder can be created, without creating one.

    Raises:
        FederationError: names the cause.
    """
    folder = run_dir / "version_0"
    try:
        os.stat(folder)  # noqa: PTH116 - Path.exists() returns False for invalid names
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise FederationError(
            f"The folder of runs is {_short(run_dir)}, in which no folder can be created ({why}): set another run_dir."
        ) from error
    place = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.exists())
    if not place.is_dir():
        raise FederationError(f"The folder of runs is {_short(run_dir)}, but {place} is not a folder: set another run_dir.")
    if not os.access(place, os.W_OK | os.X_OK):
        raise FederationError(f"The folder of runs is {_short(run_dir)}, but {place} is not writable: set another run_dir.")


def _short(path: Path) -> str:
    return text if len(text := repr(str(path))) <= LONGEST else f"{text[:LONGEST]}… ({len(text)} characters)"


def new_run_folder(run_dir: Path) -> Path:
    """Create the folder of the next run."""
    number = max(numbered(versions(run_dir)).values(), default=-1) + 1
    while os.path.lexists(folder := run_dir / f"version_{number}"):  # it may be a file
        number += 1
    try:
        folder.mkdir(parents=True)
    except FileExistsError:  # created by another process just now
        return new_run_folder(run_dir)
    except OSError as error:
        raise FederationError(
            f"The folder of runs is {_short(run_dir)}, in which no folder can be created ({error.strerror}): set another run_dir."
        ) from error
    return folder


def without_a_round(run_dir: Path) -> list[Path]:
    """Folders of runs without a checkpoint: they were killed in their first round, or are still in it."""
    return [path for path in versions(run_dir) if not (path / "metrics.csv").is_file() and not Checkpoints(path).paths()]


def newest_run(run_dir: Path, method: str) -> Path | None:
    """The newest run of a method that has a checkpoint. A run whose checkpoints cannot be read is not skipped, so that an error
    reports it.
    """
    for path in reversed(versions(run_dir)):
        checkpoints = Checkpoints(path)
        if checkpoints.paths() and checkpoints.method() in (method, None):
            return path
    return None


def run_folder_of(path: Path) -> Path:
    """The folder of the run from which :func:`load_checkpoint` loads a checkpoint.

    Raises:
        FederationError: if there is none.
    """
    if (path / "checkpoints").is_dir():  # first: the folder of runs may be called checkpoints, too
        return path
    if path.name == "best" and (path.parent / "checkpoints").is_dir():
        return path.parent
    if path.absolute().parent.name == "checkpoints" and path.is_dir():
        return path.absolute().parent.parent
    raise FederationError(
        f"No checkpoint at {path}: give the folder of a run (…/version_0), of one checkpoint "
        "(…/version_0/checkpoints/round_000010), of a run and 'best' (…/version_0/best), 'last' or 'best'."
    )


def load_checkpoint(path: Path) -> tuple[Checkpoint, list[str]]:
    """Load a checkpoint: for the folder of a run, its newest complete one; for the folder of a checkpoint, that one; for the folder
    of a run and ``best``, that of its best round.

    Returns:
        The checkpoint, and a line for each damaged one that was skipped.
    """
    folder = run_folder_of(path)
    checkpoints = Checkpoints(folder)
    if folder == path:
        return checkpoints.latest()
    return (checkpoints.best() if folder == path.parent else checkpoints.load(path)), []
