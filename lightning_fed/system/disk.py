"""Writing to a disk that may be full, read-only or gone: errors become one line, and existing files are not lost."""

import errno
import itertools
import logging
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_fed.errors import DamagedError, FederationError

log = logging.getLogger(__name__)

WHILE_WRITING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE})
"""Errors of a disk while an open file is written; the operating system does not name the file."""

ABANDONED = 3600.0
"""Seconds after which nobody is still writing a small file."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """A context that adds the path to errors of a disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in WHILE_WRITING:
            error.filename = str(path)
        raise


@contextmanager
def in_one_line(remedy: Callable[[], str], *folders: Path) -> Iterator[None]:
    """A context that turns errors of a disk into a :class:`FederationError`. Errors of other files (the user's data), of networks
    and pipes are not changed.

    Args:
        remedy: returns a sentence about what is left and what to do; called on an error.
        *folders: the folders that are written to.
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


def write_synced(path: Path, data: bytes, becomes: Path | None = None) -> None:
    """Write a file and return once it is on the disk, not only in the cache. An incomplete file is removed. Errors name the file
    that it ``becomes``, if that is another.
    """
    try:
        with naming(becomes or path), path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        with suppress(OSError):
            path.unlink()
        raise


def write_whole(path: Path, text: str) -> None:
    """Write a file under another name and rename it: readers on any machine see all of it, or the previous file, also after a power
    failure. What processes that were killed meanwhile have left is removed after an hour.
    """
    aside = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}")  # several may write at once
    write_synced(aside, text.encode(), becomes=path)
    now = aside.stat().st_mtime  # of the file system: clocks of machines differ
    aside.replace(path)
    for left in path.parent.glob(f".{path.name}.*"):
        with suppress(OSError):  # another process removes it, or it is another user's
            if now - left.stat().st_mtime > ABANDONED:
                left.unlink()


def sync_folder(folder: Path) -> None:
    """Write the names in a folder to the disk, too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with naming(folder):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a folder with its contents, a file, or a link (not its target), if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def move_aside(path: Path) -> None:
    """Rename a foreign file or folder whose name is needed, and print a warning."""
    if os.path.lexists(path):
        names = (path.with_name(f"{path.name}.other{number}") for number in itertools.count(1))
        aside = next(name for name in names if not os.path.lexists(name))
        path.rename(aside)
        log.warning(f"{path} is in the way and does not belong to this run: it has been renamed to {aside.name}.")
