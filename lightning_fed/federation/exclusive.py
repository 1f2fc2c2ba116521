"""One run at a time in a process: its turns seed the process's random generators, and set its threads, memory and loggers."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_fed.errors import FederationError

_RUNNING, _DEPTH = threading.RLock(), threading.local()  # of the process, as what they guard


@contextmanager
def only_run() -> Iterator[bool]:
    """Within the block no other thread can have a run. A run within a run, as of a callback, is in its thread: the block has
    whether it is the outer one.

    Raises:
        FederationError: if another thread has one.
    """
    if not _RUNNING.acquire(blocking=False):
        raise FederationError(
            "Another thread of this process has a run under way, and both would draw from the same random generators: start this "
            "one when that has ended, or in a process of its own."
        )
    depth = getattr(_DEPTH, "value", 0)
    _DEPTH.value = depth + 1
    try:
        yield depth == 0
    finally:
        _DEPTH.value = depth
        _RUNNING.release()
