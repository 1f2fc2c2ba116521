"""Command lines of verbs that need no torch: argparse with one line where something is wrong."""

import argparse
import os
import sys
from collections.abc import Iterable
from typing import NoReturn


class Options(argparse.ArgumentParser):
    """A parser of a verb's own options.

    Args:
        verb: its name.
        text: what it does.
    """

    def __init__(self, verb: str, text: str) -> None:
        super().__init__(f"lightning-fed {verb}", description=text, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with code 2."""
        self.exit(2, f"lightning-fed: error: {message}; see {self.prog} --help\n")


def positive(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def say(lines: Iterable[str]) -> None:
    """Print lines, and no more than whoever reads them wants: ``lightning-fed configs | head`` is no error."""
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
