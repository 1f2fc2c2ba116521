"""What makes a run that builds thousands of Trainers bearable: neither their messages nor their search for plugins."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import entry_points
from unittest.mock import patch

_EXPECTED = (
    r".*does not have many workers.*",  # the data is in memory; a worker process could only slow it down
    r".*isinstance\(treespec, LeafSpec\).*",  # Lightning 2.6 with torch 2.15
    r".*GPU available but not used.*",  # the user said so in the trainer block
)


@contextmanager
def plugins_searched_once() -> Iterator[None]:
    """Every Trainer asks all installed packages for callback plugins, which takes longer than the rest of its construction; the
    answer does not change during a run.
    """
    with patch("lightning.fabric.utilities.registry.entry_points", cache(entry_points)):
        yield


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
