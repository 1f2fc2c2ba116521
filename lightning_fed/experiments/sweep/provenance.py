"""What results depend on besides their configuration."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version

from lightning_fed import __version__


def installed() -> dict[str, str | None]:
    """Versions of this package and of the libraries that affect results; None: not installed."""
    found: dict[str, str | None] = {"lightning-fed": __version__}
    for name in ("torch", "lightning", "torchvision", "transformers", "peft"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def versions() -> str:
    """Versions of Python and of what is :func:`installed`, as text."""
    found = {"python": platform.python_version()} | installed()
    return ", ".join(f"{name} {number}" for name, number in found.items() if number)


def commit() -> str:
    """The commit of the working directory, ``+changes`` if tracked files differ from it; empty outside a repository."""
    head = _git("rev-parse", "--short=12", "HEAD")
    return head + ("+changes" if head and _git("status", "--porcelain", "--untracked-files=no") else "")


def machine() -> str:
    """System, processor and cores."""
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"


def _git(*args: str) -> str:
    try:
        done = subprocess.run(["git", *args], capture_output=True, text=True, check=False)
    except OSError:
        return ""  # git is not installed
    return done.stdout.strip() if done.returncode == 0 else ""
