"""Pages of the public names: what a package exports, or, of a module that exports nothing by name, what it defines.

``python docs/generators/api.py FOLDER`` looks in a built site for public names that are not on it.
"""

import ast
import importlib
import inspect
import pkgutil
import sys
import types
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import lightning_fed

MODULES = (
    *("core.aggregation", "core.client_modules", "core.messages", "core.predictions", "core.schedules", "core.shared_state"),
    *("experiments.report", "federation.run", "federation.settings", "federation.turns", "storage.export"),
)
"""Modules beside the packages from which a method or a callback imports."""


def packages() -> list[str]:
    """The package, and those in it that say what they export."""
    inside = [f"lightning_fed.{found.name}" for found in pkgutil.iter_modules(lightning_fed.__path__) if found.ispkg]
    first = ["lightning_fed", "lightning_fed.core"]
    return first + [name for name in inside if name not in first and getattr(importlib.import_module(name), "__all__", None)]


def pages() -> list[str]:
    """What has a page, by the name that one imports."""
    return [*packages(), *(f"lightning_fed.{name}" for name in MODULES)]


def names(module: str) -> list[str]:
    """The public names of a module that no page before its own has, sorted without regard to case."""
    before = pages()[: pages().index(module)] if module in pages() else []
    known = {id(getattr(importlib.import_module(page), name)) for page in before for name in exported(page)}
    home = importlib.import_module(module)
    return [name for name in exported(module) if id(getattr(home, name)) not in known]


@cache
def exported(module: str) -> list[str]:
    """All public names of a module, sorted without regard to case."""
    home = importlib.import_module(module)
    said = getattr(home, "__all__", None)
    return sorted(said or (name for name, value in vars(home).items() if defines(home, name, value)), key=str.lower)


def defines(home: types.ModuleType, name: str, value: object) -> bool:
    """Whether a public class or function is of this module."""
    return not name.startswith("_") and (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == home.__name__


def public_names() -> Iterator[str]:
    """All of them, with their modules."""
    for module in pages():
        yield from (f"{module}.{name}" for name in names(module))


def page(module: str) -> str:
    """A module's docstring, and directives for its names."""
    home = importlib.import_module(module)
    blocks = [f".. automodule:: {module}\n   :no-members:\n", f".. currentmodule:: {module}\n", f"{listing(module)}\n"]
    blocks += [directive(home, name) for name in names(module)]
    return "```{eval-rst}\n" + "\n".join(blocks) + "\n```"


def listing(module: str) -> str:
    """What a reader sees first: each name with its first sentence."""
    return ".. autosummary::\n\n" + "\n".join(f"   {name}" for name in names(module)) + "\n"


def directive(home: types.ModuleType, name: str) -> str:
    """The directive that shows one name."""
    value = getattr(home, name)
    if inspect.isclass(value):
        return f".. autoclass:: {name}\n   :members:\n   :show-inheritance:\n"
    return f".. autofunction:: {name}\n" if inspect.isroutine(value) else f".. autodata:: {name}\n"


@cache
def defined() -> frozenset[str]:
    """Every name that the package gives to something: modules, classes, functions, what is assigned, attributes too."""
    home = Path(lightning_fed.__file__).parent
    found = {path.stem for path in home.rglob("*.py")}
    for path in home.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    return frozenset(found)


@cache
def comments() -> dict[str, list[str]]:
    """What stands below assignments of modules, by the name that is assigned: Sphinx finds it in the module at hand alone, and of a
    name that comes from another one takes what the value's type says of itself.
    """
    found = {}
    for path in Path(lightning_fed.__file__).parent.rglob("*.py"):
        for node, text in pairwise(ast.parse(path.read_text()).body):
            assigned = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str):
                lines = inspect.cleandoc(text.value.value).splitlines()
                found |= {name.id: lines for name in assigned if isinstance(name, ast.Name)}
    return found


def undocumented(inventory: Path) -> list[str]:
    """Public names that a built site does not have."""
    from sphinx.util.inventory import InventoryFile

    found = InventoryFile.loads(inventory.read_bytes(), uri="").data
    there = {name for kind, names in found.items() if kind.startswith("py:") for name in names}
    return [name for name in public_names() if name not in there]


if __name__ == "__main__":
    missing = undocumented(Path(sys.argv[1]) / "objects.inv")
    sys.exit("\n".join(["Public names that the site does not have:", *missing]) if missing else None)
