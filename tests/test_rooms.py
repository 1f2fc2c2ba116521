"""What knows what: the rooms of the package, read from its source; and what an object has, it has from the start."""

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1] / "lightning_fed"

GROUND = {"errors", "formatting", "options", "seeding", "tensors"}
"""Small files at the root. They import nothing above themselves; nothing else lies there."""

STOREYS = [
    {"system"},
    {"nn", "experiments"},
    {"tasks"},
    {"data"},
    {"models"},
    {"core"},
    {"methods", "privacy", "storage"},
    {"engines"},
    {"callbacks"},
    {"federation"},
    {"deployment"},
    {"testing"},
    {"cli"},
    {"__main__"},
]
"""Rooms from the ground up. What a room imports lies below it; rooms of one storey do not know each other."""

CROWDED = {"methods"}
"""Folders that may hold more than twenty files, ``__init__`` included: one file per method."""

COMPOSITION = {"lightning_fed.methods", "lightning_fed.models", "lightning_fed.data"}
"""What the command line imports so that short names of classes work."""


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}
MODULES = sorted(SOURCES)
assert {"lightning_fed", "lightning_fed.federation.run", "lightning_fed.data.vision.images"} <= SOURCES.keys()


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text())


def room(module: str) -> str:
    """The file or folder in the package that a module is, or is in."""
    return module.split(".")[1] if "." in module else module


def folder(module: str) -> str:
    """The folder that a module is in: the file of a package belongs to its folder."""
    return module if SOURCES[module].name == "__init__.py" else module.rpartition(".")[0]


@cache
def imports(module: str) -> frozenset[str]:
    """Modules of the package that a module imports anywhere: at the top, in functions, for type checkers."""
    found = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in SOURCES else str(node.module) for name in names}
    return frozenset(found & SOURCES.keys() - {module})


def libraries(module: str) -> set[str]:
    """What a module imports from outside the package."""
    return set[str]().union(*map(names_of, ast.walk(tree(module))))


def names_of(node: ast.AST) -> set[str]:
    """The packages that a statement imports."""
    named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    named += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
    return {name.split(".")[0] for name in named}


def rooms_of(modules: Iterable[str]) -> set[str]:
    return {room(module) for module in modules}


def reach(module: str) -> set[str]:
    """What is imported with a module, directly or not."""
    found, waiting = set[str](), {module}
    while waiting:
        one = waiting.pop()
        found.add(one)
        waiting |= imports(one) - found
    return found - {module}


# ---------------------------------------------------------------------------------------------------------------- imports


def test_the_root_holds_the_ground_alone() -> None:
    assert {path.stem for path in ROOT.glob("*.py")} == GROUND | {"__init__", "__main__"}
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} | {"__main__"} == set().union(*STOREYS)


def test_a_room_imports_what_lies_below_it() -> None:
    height = {name: number for number, storey in enumerate(STOREYS, start=1) for name in storey}
    height |= dict.fromkeys(GROUND, 0) | {"lightning_fed": 0}
    wrong = {
        (module, other)
        for module in MODULES
        for other in imports(module)
        if room(other) != room(module) and height[room(other)] >= height[room(module)] > 0
    }
    assert wrong == set()


def test_imports_go_in_no_circle() -> None:
    TopologicalSorter({module: imports(module) for module in MODULES}).prepare()


def test_folders_import_each_other_in_no_circle() -> None:
    """Those inside a room, too. A folder's own file, which gathers what is in it, is not counted for it, nor is the root."""
    folders: dict[str, set[str]] = {}
    for module in MODULES:
        if SOURCES[module].name != "__init__.py" and folder(module) != "lightning_fed":
            folders.setdefault(folder(module), set()).update({folder(other) for other in imports(module)} - {folder(module)})
    TopologicalSorter(folders).prepare()


def test_no_folder_is_crowded() -> None:
    sizes: dict[str, int] = {}
    for module in MODULES:
        sizes[folder(module)] = sizes.get(folder(module), 0) + 1
    assert {name for name, size in sizes.items() if size > 20} <= {f"lightning_fed.{name}" for name in CROWDED}


def test_a_start_imports_what_lightning_imports() -> None:
    """What only some data, metrics, networks or reports need is imported where it is needed: each takes half a second and more."""
    slow = {"datasets", "diffusers", "pandas", "peft", "scipy", "sklearn", "statsmodels"}
    found = {
        (module, name)
        for module in MODULES
        if not module.startswith("lightning_fed.experiments.report")
        for node in tree(module).body
        for name in names_of(node) & slow
    }
    assert found == set()


def test_who_plays_and_compares_runs_knows_them_by_their_files() -> None:
    """Reports and sweeps wait for nothing that learns."""
    for module in MODULES:
        if room(module) == "experiments":
            assert rooms_of(reach(module)) <= {"lightning_fed", "errors", "experiments", "formatting", "system"}, module
            assert not {"torch", "lightning"} & libraries(module), module


def test_what_runs_methods_knows_none() -> None:
    """But the command line, which brings everything together: it imports the packages, and no method."""
    for module in MODULES:
        known = {other for other in imports(module) if room(other) == "methods"}
        if room(module) not in {"methods"}:
            assert known <= (COMPOSITION if room(module) == "cli" else set()), module


def test_a_family_knows_no_method() -> None:
    for module in MODULES:
        if module.startswith("lightning_fed.methods.families"):
            assert {other for other in imports(module) if room(other) == "methods"} <= {
                other for other in MODULES if other.startswith("lightning_fed.methods.families.")
            }, module


def test_core_is_gathered_for_those_above_it() -> None:
    """Its names are imported when they are used, and nobody inside it or below it does so: else phases would know federations."""
    below = {"core", *GROUND, *(name for storey in STOREYS[:5] for name in storey)}
    for module in MODULES:
        if room(module) in below and module != "lightning_fed.core":
            assert "lightning_fed.core" not in imports(module), module


def test_phases_know_no_federation() -> None:
    """They are of use to any LightningModule."""
    below = {
        "lightning_fed.errors",
        "lightning_fed.seeding",
        *(f"lightning_fed.core.{name}" for name in ("phase", "resume", "schedules")),
    }
    assert reach("lightning_fed.core.phased_module") == below
    assert imports("lightning_fed") == set()  # the package itself, which comes with each of its modules


def test_imports_by_a_string_are_where_public_names_are() -> None:
    """Elsewhere they would escape these tests. ``hub`` imports libraries that need not be there, the command its verb, the
    fork server what a sweep names.
    """
    calls = {(module, node) for module in MODULES for node in ast.walk(tree(module)) if isinstance(node, ast.Call)}
    named = {module for module, call in calls if ast.unparse(call.func).split(".")[-1] in {"import_module", "__import__"}}
    assert named == {
        "lightning_fed",
        "lightning_fed.__main__",
        "lightning_fed.cli.fork_server",
        "lightning_fed.core",
        "lightning_fed.methods",
        "lightning_fed.data.hub",
    }


# -------------------------------------------------------------------------------------------------------------- attributes

LATE = {"build", "configure_model"}
"""Methods that create networks late, which is their purpose: the metrics of ``configure_model`` are made for the networks, and
``FederatedModule.unbuilt_copy`` drops all that was not there before.
"""


@cache
def classes() -> dict[str, tuple[str, ast.ClassDef]]:
    return {node.name: (module, node) for module in MODULES for node in ast.walk(tree(module)) if isinstance(node, ast.ClassDef)}


def assigned(method: ast.FunctionDef) -> Iterator[str]:
    """Attributes of its first argument that a method sets, in whatever way."""
    me = method.args.args[0].arg if method.args.args else None
    for node in ast.walk(method):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == me:
            yield node.attr


def methods_of(name: str) -> list[ast.FunctionDef]:
    return [node for node in classes()[name][1].body if isinstance(node, ast.FunctionDef)]


def declared(name: str) -> set[str]:
    """Attributes that an object of a class has once it is made, its ancestors' included, and those with a setter."""
    if name not in classes():
        return set()  # of another library
    node = classes()[name][1]
    bases = [ast.unparse(base.value if isinstance(base, ast.Subscript) else base).split(".")[-1] for base in node.bases]
    found = set().union(*map(declared, bases))
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign):
            found.add(ast.unparse(statement.target))
        elif isinstance(statement, ast.Assign):
            found |= {ast.unparse(target) for target in statement.targets}
    for method in methods_of(name):
        if method.name in ("__init__", "_begin"):  # the first calls the second of a module, which also begins a copy
            found |= set(assigned(method))
        if any(ast.unparse(decorator).endswith(".setter") for decorator in method.decorator_list):
            found.add(method.name)
    return found


def test_names_of_classes_are_unique() -> None:
    """They stand for the classes here."""
    assert len(classes()) == sum(isinstance(node, ast.ClassDef) for module in MODULES for node in ast.walk(tree(module)))


def test_an_object_has_all_its_attributes_from_the_start() -> None:
    for name in classes():
        appear = {attribute for method in methods_of(name) if method.name not in LATE for attribute in assigned(method)}
        assert appear - declared(name) == set(), name
