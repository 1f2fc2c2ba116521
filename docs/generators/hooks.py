"""What the hooks of a method do, by their docstrings: a table below that of the guide, which says which of them to override."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from generators.gallery import markdown
from lightning_fed.core import FederatedModule, PersonalServer, PublicDistillation, Server

GUIDE = Path(__file__).parents[2] / "CONTRIBUTING.md"
HOMES: tuple[Any, ...] = (FederatedModule, Server, PersonalServer, PublicDistillation)
"""Where a hook is looked for."""


def named() -> list[str]:
    """The names in the second column of the guide's table, in its order."""
    section = GUIDE.read_text().partition("### Which hook to override")[2].partition("What a method may know")[0]
    rows = [row.split("|")[2] for row in section.splitlines()[4:] if row.startswith("|")]
    return list(dict.fromkeys(name for row in rows for name in re.findall(r"`([a-z_]\w*)(?:\(\))?`", row)))


def table() -> str:
    """Each hook with the class whose method it is, and the first sentences of its docstring."""
    return "\n".join(["| hook | of | what it is |", "|---|---|---|", *rows()])


def rows() -> Iterator[str]:
    """Lines of the table. What is no method or property of a class is not in it."""
    for name in named():
        for home in HOMES:
            text = inspect.getdoc(getattr(home, name)) if callable(getattr(home, name, None)) or is_property(home, name) else None
            if text:
                said = markdown(text.split("\n\n")[0]).replace("|", "\\|")
                yield f"| `{name}` | `{home.__name__}` | {said} |"
                break


def is_property(home: Any, name: str) -> bool:
    """Whether a class has a property of that name."""
    return isinstance(inspect.getattr_static(home, name, None), property)
