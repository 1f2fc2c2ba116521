"""Command lines of verbs that need no torch: argparse with one-line errors."""

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from typing import NoReturn, TypeVar

from lightning_fed.experiments.renames import OPTIONS, hint
from lightning_fed.formatting import nearest
from lightning_fed.options import NonNegativeInt, PositiveFloat, PositiveInt
from lightning_fed.system.streams import discard_rest

T = TypeVar("T")


class Options(argparse.ArgumentParser):
    """A parser of a verb's own options."""

    def __init__(self, verb: str, text: str) -> None:
        super().__init__(f"lightning-fed {verb}", description=text, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with code 2."""
        if unknown := re.fullmatch(r"unrecognized arguments: --([^=\s]+).*", message):
            names = [option[2:] for action in self._actions for option in action.option_strings if option.startswith("--")]
            message += hint(unknown[1], OPTIONS) or nearest(unknown[1], names, "--")
        self.exit(2, f"lightning-fed: error: {message}; see {self.prog} --help\n")


def restricted(kind: Callable[[str], T], name: str) -> Callable[[str], T]:
    """An option type with a name: all values for which ``kind`` raises no :class:`ValueError`."""

    def read(text: str) -> T:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a {name}") from None

    read.__name__ = name
    return read


positive = restricted(PositiveInt, "number from 1 on")
whole = restricted(NonNegativeInt, "number from 0 on")
above_zero = restricted(PositiveFloat, "number above 0")


def say(lines: Iterable[str]) -> None:
    """Print lines, until the reader stops reading: ``lightning-fed configs | head`` is no error."""
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:
        discard_rest(sys.stdout)
