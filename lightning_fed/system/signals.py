"""Signals: Ctrl-C, SIGTERM and SIGHUP end a run, SIGUSR1 ends it at its next checkpoint; resources are released."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(SystemExit):
    """The process was asked to end (SIGTERM, or SIGHUP). Uncaught, it exits with code 143, as shells expect."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


class Preempted(SystemExit):
    """The process was asked to stop (SIGUSR1) and has stopped at a checkpoint. Uncaught, it exits with code 75, ``EX_TEMPFAIL`` in
    ``sysexits.h``: it can be started again to continue.
    """

    def __init__(self) -> None:
        super().__init__(os.EX_TEMPFAIL)


class _Stop(BaseException):
    """Raised instead of a KeyboardInterrupt, which a Trainer would handle itself: it would silently end the process with code 1."""


@contextmanager
def first_signal(handle: Callable[[int], None]) -> Iterator[None]:
    """A context in which the first SIGINT, SIGTERM or SIGHUP is handled by ``handle``; a second one has its usual effect. SIGHUP
    comes from a terminal that is closed and stays ignored if it is (``nohup``).
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        before[signal.SIGHUP] = signal.getsignal(signal.SIGHUP)

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
    """A context in which SIGINT raises :class:`KeyboardInterrupt`, SIGTERM and SIGHUP :class:`Terminated`, past the clients'
    Trainers, which would swallow them. A second signal has its usual effect. In threads other than the main thread nothing changes.
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
    """A context that yields a function which says whether SIGUSR1 has arrived. Nothing changes if it has another handler, and in
    threads other than the main thread.
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


@contextmanager
def without_preemption(*others: int) -> Iterator[None]:
    """A context whose processes never get SIGUSR1, which a queueing system may send to all: it is meant for the one that runs the
    federation.

    Args:
        *others: further signals that they do not get.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, *others})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
