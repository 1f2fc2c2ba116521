"""Ctrl-C and SIGTERM end a run, SIGUSR1 at its next checkpoint; what a run holds is let go on the way out."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(SystemExit):
    """The process was asked to end (SIGTERM). Uncaught, it ends with exit code 143, as shells expect."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


class Preempted(SystemExit):
    """The process was asked to make room (SIGUSR1), and has stopped at a checkpoint. Uncaught, it ends with exit code 75, which
    ``sysexits.h`` calls ``EX_TEMPFAIL``: whoever is asked again goes on.
    """

    def __init__(self) -> None:
        super().__init__(os.EX_TEMPFAIL)


class _Stop(BaseException):
    """What travels up instead of a KeyboardInterrupt, which a Trainer would take for itself: it would end the process with code 1
    and without a word.
    """


@contextmanager
def first_signal(handle: Callable[[int], None]) -> Iterator[None]:
    """Within the block, the first SIGINT or SIGTERM is handled so; a second one does what it did before the block."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def caught(number: int, frame: FrameType | None) -> None:
        restore()
        handle(number)

    for number in before:
        signal.signal(number, caught)
    try:
        yield
    finally:
        restore()


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Within the block, SIGINT raises :class:`KeyboardInterrupt` and SIGTERM :class:`Terminated`, past every client's Trainer,
    which would swallow them. A second signal does what it did before the block. In other threads than the main one nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []

    def stop(number: int) -> None:
        caught.append(number)
        raise _Stop

    try:
        with first_signal(stop):
            yield
    except _Stop:
        raise (KeyboardInterrupt if caught[0] == signal.SIGINT else Terminated()) from None


@contextmanager
def preemption() -> Iterator[Callable[[], bool]]:
    """Within the block, SIGUSR1 is noted; gives whether it has come. Where somebody else handles it, and in other threads than the
    main one, nothing changes.
    """
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGUSR1) != signal.SIG_DFL:
        yield lambda: False
        return
    signal.signal(signal.SIGUSR1, lambda number, frame: caught.append(number))
    try:
        yield lambda: bool(caught)
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
