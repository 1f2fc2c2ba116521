"""What surrounds a run: no messages of thousands of Trainers, and a number of threads."""

import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_EXPECTED = (
    r".*does not have many workers.*",  # the data is in memory; a worker process could only slow it down
    r".*isinstance\(treespec, LeafSpec\).*",  # Lightning 2.6 with torch 2.15
    r".*GPU available but not used.*",  # the user said so in the trainer block
)


@contextmanager
def quieter(level: int, *names: str) -> Iterator[None]:
    """Let loggers of these names say only what is of this level or above it."""
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
    """Silence device lines, tips and the warnings that are expected here; everything else comes through."""
    with quieter(logging.WARNING, "lightning.pytorch", "lightning.fabric"), warnings.catch_warnings():
        for message in _EXPECTED:
            warnings.filterwarnings("ignore", message)
        yield


@contextmanager
def no_second_traceback() -> Iterator[None]:
    """Let a thread that keeps what ended it (``thread.exception``) print no traceback: TensorBoard's writer does, and the next call
    of a logger raises it, where it becomes a line. Other threads say what they always say.
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
    """Compute with so many torch threads; None: with as many as there are."""
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
