"""Public names are those of the field: what Flower, peft, Lightning and the papers call a thing. Words that only this project had
are not used again.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_fed

ROOT = Path(lightning_fed.__file__).parent

OLD = {
    *("adapt", "alone", "asked", "blank", "capacities", "capacity", "carried_out", "copied_names", "copies_of", "crew", "died"),
    *(
        "headline",
        "heard",
        "hear",
        "heap",
        "keep_in",
        "keeps_received",
        "kept",
        "lean",
        "leading",
        "lesson",
        "lone",
        "lost",
        "measured_on",
    ),
    *("misfit", "misfits", "more_is_better", "muster", "mustered", "of_models", "of_other_networks", "open_round", "outcome"),
    *(
        "payload_varies",
        "received",
        "recipe",
        "rehearsal",
        "rehearse",
        "review",
        "reviewed",
        "reviews",
        "review_step",
        "said",
        "scratch",
        "since",
    ),
    *(
        "slope",
        "slopes",
        "starting_from",
        "statistics_names",
        "staying",
        "study",
        "sureness",
        "taught",
        "teach",
        "ticket",
        "told",
        "twin",
    ),
    *("twins", "unheard", "way"),
}
"""Each of them has an entry in the table of what is called otherwise now, or none would look for it."""

BRITISH = re.compile(r"(central|custom|factor|general|initial|normal|optim|organ|parametr|personal)is(e|ed|er|es|able|ation|ing)?$")
"""How torch and Lightning do not spell."""


def public_names(source: str) -> Iterator[tuple[str, int]]:
    """Names of classes, functions, their parameters and attributes, that do not begin with an underscore."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            yield node.attr, node.lineno
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.lineno


def words_of(name: str) -> set[str]:
    """A name, and the words that it is made of, in lower case."""
    apart = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    return {apart, *apart.split("_")}


def old_words(source: str) -> list[str]:
    """Where public names have words that are not used."""
    found = {
        f"{name} (line {line})"
        for name, line in public_names(source)
        if not name.startswith("_") and any(word in OLD or BRITISH.match(word) for word in words_of(name))
    }
    return sorted(found)


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_public_names_have_words_of_the_field(path: Path) -> None:
    assert not words_of(path.stem) & OLD
    assert old_words(path.read_text()) == []


def test_an_old_word_is_found_wherever_it_stands_in_a_name() -> None:
    source = "class Outcome: ...\ndef f(lone_example, normalised): ...\nclass A:\n    recipe: int\n    def g(self): self.kept = 1\n"
    assert [name.split()[0] for name in old_words(source)] == ["Outcome", "kept", "lone_example", "normalised", "recipe"]
