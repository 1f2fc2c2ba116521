"""The context of a run: which messages Lightning may print, and the number of threads."""

import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_EXPECTED = (
    r".*does not have many workers.*",  # the data are in memory; worker processes would only slow it down
    r".*isinstance\(treespec, LeafSpec\).*",  # Lightning 2.6 with torch 2.15
    r".*GPU available but not used.*",  # as the trainer block says
    r".*`self.log\(\)` but the `self.trainer` reference.*",  # of a copy of a module, on which FLOPs are counted
)


@contextmanager
def quieter(level: int, *names: str) -> Iterator[None]:
    """A context in which loggers of these names only log messages of this level or above."""
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, own in zip(loggers, before, strict=True):
            logger.setLevel(own)


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Silence device lines, tips and expected warnings; all other messages are printed."""
    with quieter(logging.WARNING, "lightning.pytorch", "lightning.fabric"), warnings.catch_warnings():
        for message in _EXPECTED:
            warnings.filterwarnings("ignore", message)
        yield


@contextmanager
def no_second_traceback() -> Iterator[None]:
    """Suppress the traceback of a thread that stores the exception that ended it (``thread.exception``). TensorBoard's writer does,
    and the next call of a logger raises the exception, which is then reported in a line. Other threads are not affected.
    """
    before = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is None or getattr(args.thread, "exception", None) is not args.exc_value:
            before(args)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


@contextmanager
def torch_threads(number: int | None) -> Iterator[None]:
    """A context with this number of torch threads; None: the current number."""
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
