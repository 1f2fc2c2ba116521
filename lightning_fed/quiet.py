"""What surrounds a run: no messages of thousands of Trainers, and a number of threads."""

import logging
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
def quiet_lightning() -> Iterator[None]:
    """Silence device lines, tips and the warnings that are expected here; everything else comes through."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            for message in _EXPECTED:
                warnings.filterwarnings("ignore", message)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


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
