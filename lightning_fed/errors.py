"""The one exception a user can cause, and what is said of the others."""

import os
import sys
import sysconfig
import traceback
from pathlib import Path

LIBRARIES = ("torch", "torchvision", "torchmetrics", "lightning", "transformers", "huggingface_hub", "peft", "jsonargparse")
"""Packages in whose code an error does not say where the user's is."""

LONGEST = 200
"""Characters of somebody else's message, beyond which it is cut: some list all that they know."""


class FederationError(ValueError):
    """Something the user asked for cannot be done.

    The message says what was got, what was expected and what to do. The command line prints it as one line and exits with code 2.
    """


class DamagedError(FederationError):
    """A file is missing, cut short, or not as it was written; another one may be whole."""


def print_error(message: str) -> None:
    """Print an error of the command line in one line; where LIGHTNING_FED_DEBUG is 1, after the traceback of the exception that is
    being handled.
    """
    if os.environ.get("LIGHTNING_FED_DEBUG") == "1" and sys.exception() is not None:
        traceback.print_exc()
    print(f"lightning-fed: error: {message}", file=sys.stderr)


def require(condition: bool, message: str) -> None:
    """Raise a FederationError unless the condition holds."""
    if not condition:
        raise FederationError(message)


def one_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split())


def error_text(error: BaseException) -> str:
    """The same, cut where it is too long, and with its kind where the message alone is no sentence."""
    said = one_line(error)
    said = said if isinstance(error, ValueError) else f"{type(error).__name__}: {said}"
    return said if len(said) <= LONGEST else f"{said[:LONGEST]}…"


def place_of(error: BaseException) -> str:
    """The line of code outside libraries, and outside this package, in which an error arose; nothing if there is none."""
    package, standard = str(Path(__file__).parent), sysconfig.get_path("stdlib")
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((package, "<"))
        and not set(Path(frame.filename).parts) & set(LIBRARIES)
        and ("site-packages" in frame.filename or not frame.filename.startswith(standard))
    ]
    return f", in {Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""
