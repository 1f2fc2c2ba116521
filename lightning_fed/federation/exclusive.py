"""One run at a time per process: its turns seed the global random generators and set threads, memory and loggers."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_fed.errors import FederationError

_RUNNING, _DEPTH = threading.RLock(), threading.local()  # global, like what they guard


@contextmanager
def only_run() -> Iterator[bool]:
    """A context in which no other thread can start a run. A nested run (in a callback, for example) is allowed in the same thread;
    yields whether this is the outermost one.

    Raises:
        FederationError: if another thread has a run.
    """
    if not _RUNNING.acquire(blocking=False):
        raise FederationError(
            "Another thread of this process has a run in progress, and both would use the same random generators: start this run "
            "when that one has ended, or in another process."
        )
    depth = getattr(_DEPTH, "value", 0)
    _DEPTH.value = depth + 1
    try:
        yield depth == 0
    finally:
        _DEPTH.value = depth
        _RUNNING.release()
