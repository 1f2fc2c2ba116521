"""Files on a disk that may refuse: full, read-only or gone, it is said in one line; and what is in the way is not lost."""

import errno
import itertools
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_fed.errors import DamagedError, FederationError

log = logging.getLogger(__name__)

WHILE_WRITING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE})
"""What the operating system says of a disk while an open file is written; it does not say which file."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have an error of a disk say of which file it is."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in WHILE_WRITING:
            error.filename = str(path)
        raise


@contextmanager
def in_one_line(remedy: Callable[[], str], *folders: Path) -> Iterator[None]:
    """Say what a disk refuses, or does not have any more, as a :class:`FederationError`. Errors of files that are elsewhere (the
    user's data), of networks and pipes are left as they are.

    Args:
        remedy: a sentence about what is left and what to do; asked when there is an error.
        *folders: where things are written.
    """
    try:
        yield
    except DamagedError as error:
        raise FederationError(f"{error}. {remedy()}") from error
    except OSError as error:
        if not any(_is_in(error.filename, folder) for folder in folders):
            raise
        notes = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
        raise FederationError(f"{os.fsdecode(error.filename)}: {error.strerror}.{notes} {remedy()}") from error


def _is_in(file: object, folder: Path) -> bool:
    return isinstance(file, str | bytes | os.PathLike) and Path(os.fsdecode(file)).absolute().is_relative_to(folder.absolute())


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and return once it is on the disk, not only in its cache. Half a file does not stay: it takes room."""
    try:
        with naming(path), path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        with suppress(OSError):
            path.unlink()
        raise


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk, too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with naming(folder):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a folder with all that is in it, a file, or a link but not where it leads; nothing if there is nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def move_aside(path: Path) -> None:
    """Move what somebody else has put in a place where we have to write to another name, and say so."""
    if os.path.lexists(path):
        names = (path.with_name(f"{path.name}.other{number}") for number in itertools.count(1))
        aside = next(name for name in names if not os.path.lexists(name))
        path.rename(aside)
        log.warning(f"{path} is in the way and not of this run: it is {aside.name} now.")
