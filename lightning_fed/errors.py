"""The exception for errors that a user can cause, and texts of other exceptions."""

import os
import sys
import sysconfig
import traceback
from collections.abc import Mapping
from pathlib import Path

LIBRARIES = ("torch", "torchvision", "torchmetrics", "lightning", "transformers", "huggingface_hub", "peft", "jsonargparse")
"""Packages in which the location of an error does not help the user."""

LONGEST = 200
"""Maximum number of characters of another library's message: some list all known names."""


class FederationError(ValueError):
    """An error that the user can correct.

    The message says what was got, what was expected and what to do. The command line prints it as one line and exits with code 2.
    """


class DamagedError(FederationError):
    """A file is missing, truncated, or changed; another one may be intact."""


def print_error(message: str) -> None:
    """Print an error of the command line in one line; if LIGHTNING_FED_DEBUG is 1, after the traceback of the current exception."""
    if os.environ.get("LIGHTNING_FED_DEBUG") == "1" and sys.exception() is not None:
        traceback.print_exc()
    print(f"lightning-fed: error: {message}", file=sys.stderr)


def refuse_given(who: str, given: Mapping[str, object], option: str, why: str) -> None:
    """Raise :class:`FederationError` if an option is among the arguments that a class passes on, and sets itself.

    Args:
        who: the class.
        given: the arguments, by name.
        option: the option.
        why: it cannot be set, as a part of the message.
    """
    require(option not in given, f"{who} got {option}={given.get(option)}, but {why}: leave {option} out.")


def require(condition: bool, message: str) -> None:
    """Raise a FederationError unless the condition holds."""
    if not condition:
        raise FederationError(message)


def one_line(error: BaseException) -> str:
    """The message of an error, in one line."""
    return " ".join(str(error).split())


def error_text(error: BaseException) -> str:
    """The message of an error in one line, cut if it is too long, with the error's type unless it is a ValueError."""
    said = one_line(error)
    said = said if isinstance(error, ValueError) else f"{type(error).__name__}: {said}"
    return said if len(said) <= LONGEST else f"{said[:LONGEST]}…"


def place_of(error: BaseException) -> str:
    """The line of the user's code (outside libraries and this package) that raised an error; empty if there is none."""
    package, standard = str(Path(__file__).parent), sysconfig.get_path("stdlib")
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((package, "<"))
        and not set(Path(frame.filename).parts) & set(LIBRARIES)
        and ("site-packages" in frame.filename or not frame.filename.startswith(standard))
    ]
    return f", in {Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""
