"""Checks of the paths of data."""

from collections.abc import Iterable
from pathlib import Path

from lightning_fed.errors import require


def refuse_shared(train: Iterable[Path], test: Iterable[Path]) -> None:
    """Refuse a file that belongs to the training and to the test set: it would be trained and tested on."""
    trained = {file.resolve() for file in train}
    shared = next((file for file in test if file.resolve() in trained), None)
    require(
        shared is None,
        f"{shared} belongs to path and to test_path, so it would be trained and tested on: give a path without the test files.",
    )


def is_hidden(file: Path, folder: Path) -> bool:
    """Whether a file, or a folder on the way to it from the given one, has a name that begins with a dot, as Jupyter's copies."""
    return any(part.startswith(".") for part in file.relative_to(folder).parts)
