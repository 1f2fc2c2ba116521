"""Where data of one's own are."""

from pathlib import Path

from lightning_fed.errors import FederationError, require


def find_files(path: str, endings: tuple[str, ...]) -> list[Path]:
    """A file, or all files anywhere in a folder that end so, in order of their paths.

    Args:
        path: of the file or the folder.
        endings: in lower case, with the dot.
    """
    place = Path(path).expanduser()
    if place.is_file():
        return [place]
    if not place.is_dir():
        raise FederationError(f"Found neither a file nor a folder {place.absolute()}: check the path in --data.init_args.")
    found = sorted(file for file in place.rglob("*") if file.suffix.lower() in endings and file.is_file())
    kinds = " or ".join(endings)
    require(len(found) > 0, f"The folder {place.absolute()} has no files that end in {kinds}: check the path in --data.init_args.")
    return found


def sets_of(path: str, test_path: str | None, endings: tuple[str, ...]) -> tuple[list[Path], list[str] | None]:
    """The files of a training set and of a test set, if there is one, and the set that each file is of; None: there is one set."""
    train = find_files(path, endings)
    if test_path is None:
        return train, None
    test = find_files(test_path, endings)
    return train + test, ["train"] * len(train) + ["test"] * len(test)
