"""Messages about a run: they go through the logger ``lightning_fed``, by default to the terminal."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_fed.system.streams import LEFT, discard_rest

LOGGER = logging.getLogger("lightning_fed")
"""The package's logger. Its modules log to children of it, such as ``lightning_fed.system.disk``."""


class Terminal(logging.Handler):
    """Prints messages without a prefix: errors to standard error, all others to standard output."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message, unless its reader has left."""
        stream = sys.stderr if record.levelno >= logging.ERROR else sys.stdout
        try:
            print(self.format(record), file=stream, flush=True)
        except OSError as error:
            if error.errno not in LEFT:
                raise
            discard_rest(stream)


@contextmanager
def lines_shown() -> Iterator[None]:
    """A context in which the package's messages are printed, from INFO on unless the logger has its own level. A user's handlers
    get them, too; the root logger's, which would print them again, do not. Nested contexts change nothing.
    """
    if any(isinstance(handler, Terminal) for handler in LOGGER.handlers):
        yield
        return
    level, propagates, terminal = LOGGER.level, LOGGER.propagate, Terminal()
    LOGGER.setLevel(level or logging.INFO)
    LOGGER.propagate = False
    LOGGER.addHandler(terminal)
    try:
        yield
    finally:
        LOGGER.removeHandler(terminal)
        LOGGER.propagate = propagates
        LOGGER.setLevel(level)


@contextmanager
def each_line_once() -> Iterator[None]:
    """A context in which each line is printed only once."""
    said = set[str]()

    def is_new(record: logging.LogRecord) -> bool:
        is_known = (line := record.getMessage()) in said
        said.add(line)
        return not is_known

    terminals = [handler for handler in LOGGER.handlers if isinstance(handler, Terminal)]
    for terminal in terminals:
        terminal.addFilter(is_new)
    try:
        yield
    finally:
        for terminal in terminals:
            terminal.removeFilter(is_new)
