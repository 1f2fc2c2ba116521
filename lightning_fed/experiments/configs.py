"""The configurations that come with the package, which can be given by name."""

import difflib
from pathlib import Path

from lightning_fed.errors import FederationError
from lightning_fed.system.folders import from_home

SWEEP = ".sweep"
"""Suffix of names of comparisons."""


def shipped() -> dict[str, Path]:
    """Files by name, such as ``quickstart``, ``quickstart.sweep`` and ``feddecomp/cifar10``, folder by folder."""
    package = Path(__file__).parents[1]
    installed, checkout = package / "configs", package.parent / "configs"
    folder = installed if installed.is_dir() else checkout
    found = {path.relative_to(folder).with_suffix("").as_posix(): path for path in folder.rglob("*.yaml")}
    return dict(sorted(found.items(), key=lambda item: (item[0].count("/"), item[0])))


def is_yaml(given: str) -> bool:
    """Whether the value of ``--config`` is a configuration itself, not the name of one."""
    return any(sign in given for sign in "{:\n")


def found(given: Path | str, ending: str = "") -> Path:
    """The file that is meant: a user's own, or one that comes with the package, with or without ``configs/`` and ``.yaml``.

    Args:
        given: a path, or a name of :func:`shipped`.
        ending: what a name without ``.yaml`` may omit: ``.sweep`` for comparisons.

    Raises:
        FederationError: if there is neither.
    """
    path, files = from_home(given), shipped()
    if path.is_file():
        return path
    if str(given) and path.is_dir():
        raise FederationError(f"{given} is a folder: give a file, or one of the names that lightning-fed configs lists.")
    name = path.as_posix().removeprefix("configs/").removesuffix(".yaml")
    for candidate in (name,) if path.suffix == ".yaml" else (f"{name}{ending}", name):
        if candidate in files:
            return files[candidate]
    offered = [known for known in files if ending or not known.endswith(SWEEP)]
    alike = difflib.get_close_matches(name, offered, n=3) or [known for known in offered if known.startswith(f"{name}/")][:3]
    meant = f"; did you mean {' or '.join(alike)}?" if alike else "."
    raise FederationError(
        f"There is no configuration {str(given)!r}: give a file, or one of the names that lightning-fed configs lists{meant}"
    )


def about(path: Path) -> str:
    """The description of a configuration: the first sentence of its comment, after the command in its first line."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = [line.removeprefix("#").strip() for line in lines if line.startswith("#")]
    text = " ".join(" ".join(line for line in comment if not line.startswith("lightning-fed ")).split())
    return text.partition(". ")[0].removesuffix(".")
