"""Help and completions that were printed before, printed again without waiting for torch."""

import io
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from lightning_fed.experiments.configs import shipped

SHAPES_HELP = ("jsonargparse", "lightning", "torch", "torchvision", "transformers", "peft", "rich")
"""Packages whose options are shown, or that show them."""


def asks_for_help(args: Sequence[str]) -> bool:
    """Whether a command line prints nothing but what this installation alone decides: the help of a verb, of a topic, or of one of
    the package's own classes, or what a shell completes.
    """
    match args:
        case ["completion", ("bash" | "zsh")] | [_, ("-h" | "--help")]:
            return True
        case [_, ("-h" | "--help"), name] | [_, name, "--help"]:
            return name.isidentifier()
        case [_, option, name]:
            return option.startswith("--") and option.endswith(".help") and name.isidentifier()
    return False


def print_help(args: Sequence[str], run: Callable[[], None]) -> None:
    """Print what ``run`` prints, or printed when it was asked the same the last time.

    Args:
        args: of the command line.
        run: prints it, and may leave by :class:`SystemExit`.
    """
    path = _folder() / f"{_fingerprint(args)}.txt"
    if path.is_file():
        sys.stdout.write(path.read_text())
        return
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            run()
    except SystemExit as ended:
        if ended.code:
            raise
    finally:
        sys.stdout.write(printed.getvalue())
    with suppress(OSError):  # where nothing can be kept, it takes as long the next time
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(f".{os.getpid()}")
        aside.write_text(printed.getvalue())
        aside.replace(path)


def _folder() -> Path:
    """Where the user's programs keep what they can make again, by the XDG specification."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning-fed"


def _fingerprint(args: Sequence[str]) -> str:
    """Of all that decides what is printed. The package's own files count by when they were changed, for those who change them."""
    package = Path(__file__).parents[1]
    files = [*package.rglob("*.py"), *shipped().values()]
    newest = max(file.stat().st_mtime_ns for file in files)
    parts = (*args, *map(version, SHAPES_HELP), sys.version, package, len(files), newest, shutil.get_terminal_size().columns)
    return sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]
