"""What a disk refuses: full, read-only or gone, it is said in one line."""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_fed.errors import DamagedError, FederationError

REFUSALS = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG),  # full
        *(errno.EROFS, errno.EACCES, errno.EPERM),  # read-only
        *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP),  # gone, or something else
        *(errno.EIO, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.ENAMETOOLONG),
    }
)
"""What the operating system says of files and disks; other errors that Python has as :class:`OSError` are of networks and pipes."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have an error say of which file it is. That of a disk that is full does not."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def in_one_line(path: Path, remedy: Callable[[], str]) -> Iterator[None]:
    """Say what a disk refuses, or does not have any more, as a :class:`FederationError`.

    Args:
        path: where things are written, for errors that name no file.
        remedy: a sentence about what is left and what to do; asked when there is an error.
    """
    try:
        yield
    except DamagedError as error:
        raise FederationError(f"{error}. {remedy()}") from error
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        notes = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
        raise FederationError(f"{error.filename or path}: {error.strerror}.{notes} {remedy()}") from error
