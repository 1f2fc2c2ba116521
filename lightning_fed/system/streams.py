"""Standard streams that are closed, or whose reader leaves."""

import errno
import os
import sys
from pathlib import Path
from typing import TextIO

LEFT = (errno.EPIPE, errno.EIO)
"""Errors of writing to a pipe or a terminal that nobody reads any more."""


def open_closed_streams() -> None:
    """Open the null device in place of streams that were closed when Python started (``>&-``)."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115 - its number is the lowest free one, its own
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def discard_rest(stream: TextIO) -> None:
    """Send to nowhere what is written from now on, and what Python still holds."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
