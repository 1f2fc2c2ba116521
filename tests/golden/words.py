"""Names of golden records in the words of one commit or another: the table ``renames.yaml``."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

KINDS = ("options", "values", "metrics", "tensors", "classes")
Pairs = list[tuple[str, str]]


@dataclass(frozen=True)
class Renames:
    """What is called differently in a tree than in the golden cases; see the head of ``renames.yaml``."""

    pairs: dict[str, Pairs] = field(default_factory=dict)
    absent: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def read(path: Path) -> "Renames":
        """The table in a file; an empty one where there is none."""
        content = (yaml.safe_load(path.read_text()) or {}) if path.is_file() else {}
        if unknown := content.keys() - {*KINDS, "absent", "left_out"}:
            raise SystemExit(f"{path} has {', '.join(sorted(unknown))}: expected {', '.join(KINDS)}, absent, left_out.")
        pairs = {kind: [(str(original), str(today)) for original, today in content.get(kind) or ()] for kind in KINDS}
        return Renames(pairs, content.get("absent") or {}, content.get("left_out") or {})

    def today(self, name: str, kind: str) -> str:
        """An original name as the tree has it."""
        return replaced(name, self.pairs.get(kind, []))

    def original(self, name: str, kind: str) -> str:
        """A name of the tree as the golden cases have it."""
        return replaced(name, [(today, original) for original, today in self.pairs.get(kind, [])])

    def value_today(self, option: str, value: Any) -> Any:
        """A value of an option, whose original name is given, as the tree has it."""
        return self._value(option, value, self.today)

    def original_value(self, option: str, value: Any) -> Any:
        """A value of an option, given by its original name, as the golden cases have it."""
        return self._value(option, value, self.original)

    @staticmethod
    def _value(option: str, value: Any, words: Any) -> Any:
        if not isinstance(value, str):
            return value
        last = option.rpartition(".")[2]
        return words(words(f"{last}={value}", "values").removeprefix(f"{last}="), "classes")

    def is_absent(self, option: str, value: Any) -> bool:
        """Whether an option is as good as not there."""
        nothings = [nothing for name, nothing in self.absent.items() if has(option, name)]
        return any(value in nothing if isinstance(nothing, list) else value == nothing for nothing in nothings)

    def is_left_out(self, name: str) -> bool:
        """Whether something, given by its original name, is not compared."""
        return any(has(name, part) for part in self.left_out)


def whole(name: str) -> str:
    return rf"(?<!\w){re.escape(name)}(?!\w)"


def has(name: str, part: str) -> bool:
    """Whether a name has another one in it, as whole words."""
    return re.search(whole(part), name) is not None


def replaced(name: str, pairs: Pairs) -> str:
    """A name in which every place that is an old name, as whole words, has the new one."""
    if not pairs:
        return name
    new = dict(reversed(pairs))
    return re.sub("|".join(whole(old) for old, _ in pairs), lambda match: new[match[0]], name)


def flat(tree: Any, name: str = "", separator: str = ".") -> dict[str, Any]:
    """The leaves of dicts and lists by their paths; what is empty is a leaf."""
    if isinstance(tree, dict | list) and tree:
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        paths = (flat(value, f"{name}{separator}{key}" if name else str(key), separator) for key, value in items)
        return {path: value for found in paths for path, value in found.items()}
    return {name: tree}


def deep(leaves: dict[str, Any]) -> Any:
    """What :func:`flat` was made of, given paths with dots: dicts whose keys are all numbers are lists."""
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        *parents, last = path.split(".")
        place = tree
        for key in parents:
            place = place.setdefault(key, {})
        place[last] = value

    def listed(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        inner = {key: listed(value) for key, value in node.items()}
        return list(inner.values()) if inner and all(key.isdecimal() for key in inner) else inner

    return listed(tree)
