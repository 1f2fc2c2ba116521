"""Processes that Python's own start-up code would let the working directory, or a long TMPDIR, disturb."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_fed.errors import FederationError

SAFE = "PYTHONSAFEPATH"
"""The environment variable by which Python leaves the working directory out of ``sys.path``."""

OURS = "lightning_fed"
"""Its value if it was set here: any text has the same effect."""

ROOM = 107 - len("/pymp-xxxxxxxx/listener-xxxxxxxx")
"""The longest TMPDIR, in bytes: the path of a socket may have 107."""


@contextmanager
def safe_path() -> Iterator[None]:
    """A context in which servers of :mod:`multiprocessing` start without the working directory in their ``sys.path``: a file
    ``random.py`` or ``datasets.py`` there would be imported instead of the library. What they fork gets this process's path.

    Raises:
        FederationError: if TMPDIR is too long for their sockets.
    """
    if len(os.fsencode(folder := tempfile.gettempdir())) > ROOM:
        raise FederationError(
            f"The folder for temporary files has a path of {len(os.fsencode(folder))} bytes ({folder}), and those of sockets in it "
            f"must fit into 107: set TMPDIR to one of at most {ROOM}, such as /tmp."
        )
    if os.environ.get(SAFE) or started_in_folder():
        yield
        return
    os.environ[SAFE] = OURS
    try:
        yield
    finally:
        os.environ.pop(SAFE, None)


def forget_safe_path() -> None:
    """In what was started there: leave the variable to those who have set it."""
    if os.environ.get(SAFE) == OURS:
        del os.environ[SAFE]


def started_in_folder() -> bool:
    """Whether the working directory is in this process's path, because it was started with ``python -m``."""
    if sys.flags.safe_path or not sys.path:
        return False
    return sys.path[0] == "" or (Path(sys.path[0]).is_dir() and Path(sys.path[0]).samefile("."))
