"""The methods, from the head of each page in docs/methods: README's table, and the gallery of the site.

A page begins, between two lines of dashes, with the key ``methods``. Below it is the name of each method's class, and below that
what a table says: ``kind``, one of :data:`KINDS`; ``year`` of the first publication, if there is one; ``networks`` of the clients;
what ``travels``.

``python docs/generators/gallery.py`` writes README's table again.
"""

import inspect
import re
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "methods"
TABLE = re.compile(r"(<!-- methods: [^>]* -->\n).*?(<!-- end -->)", re.DOTALL)

KINDS = {
    "one network": "One network for all clients",
    "a network each": "A personal network for each client, guided by the others",
    "a part stays": "A part of the network stays with its client",
    "architectures": "Networks of different architectures",
    "model_size": "Clients with models of different sizes",
    "fine-tuning": "Parameter-efficient fine-tuning of transformers",
    "references": "References without federated training",
}
"""Sections of the gallery, in its order."""


@dataclass(frozen=True)
class Method:
    """What a table says of a method.

    Args:
        name: its class.
        page: its file in ``docs/methods``, without the suffix.
        kind: a key of :data:`KINDS`.
        networks: of the clients.
        travels: what does.
        year: of the first publication; None: there is none.
    """

    name: str
    page: str
    kind: str
    networks: str
    travels: str
    year: int | None = None


def head(page: Path) -> dict:
    """What stands between the dashes at the beginning of a page."""
    found = re.match(r"---\n(.*?)\n---\n", page.read_text(), re.DOTALL)
    return yaml.safe_load(found[1]) if found else {}


def methods(folder: Path = PAGES) -> list[Method]:
    """All methods, by kind, year and name."""
    found = [
        Method(name, page.stem, **facts)
        for page in sorted(folder.glob("*.md"))
        for name, facts in head(page).get("methods", {}).items()
    ]
    return sorted(found, key=lambda method: (list(KINDS).index(method.kind), method.year or 9999, method.name))


def table(found: list[Method]) -> str:
    """Rows of README's table: methods of a kind that differ neither in networks nor in what travels share one."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for method in found:
        link = f"[`{method.name}`](docs/methods/{method.page}.md)"
        rows.setdefault((method.kind, method.networks, method.travels), []).append(link)
    lines = ["| method | clients' networks | what travels |", "|---|---|---|"]
    lines += [f"| {', '.join(links)} | {networks} | {travels} |" for (_, networks, travels), links in rows.items()]
    return "\n".join(lines)


def rendered(readme: str, found: list[Method]) -> str:
    """README with its table written again."""
    return TABLE.sub(lambda match: f"{match[1]}\n{table(found)}\n\n{match[2]}", readme)


def cards(found: list[Method]) -> str:
    """The gallery: a section for each kind, a card for each method, with the first sentence of its class."""
    parts = []
    for kind, group in groupby(found, key=lambda method: method.kind):
        parts += [f"## {KINDS[kind]}", "::::{grid} 1 2 2 3\n:gutter: 3\n"]
        parts += [card(method) for method in group]
        parts.append("::::")
    return "\n\n".join(parts)


def card(method: Method) -> str:
    """One method: what it does, its clients' networks, what travels, the year."""
    year = f" {{bdg-light}}`{method.year}`" if method.year else ""
    return (
        f":::{{grid-item-card}} {method.name}\n:link: {method.page}\n:link-type: doc\n\n{sentence(method.name)}\n\n"
        f"*Travels:* {method.travels}\n\n{{bdg-secondary}}`networks: {method.networks}`{year}\n:::"
    )


def facts(page: Path) -> str:
    """Lines below the title of a method's page: what the gallery says, and where its options and its class are."""
    lines = []
    for method in methods(page.parent):
        if method.page == page.stem:
            name = method.name
            lines.append(
                f"`{name}` · *networks:* {method.networks} · *travels:* {method.travels} · "
                f"[options](../reference/methods.md#{name.lower()}) · {{py:class}}`API <lightning_fed.methods.{name}>`\n"
            )
    return "\n".join(lines)


def sentence(name: str) -> str:
    """The first sentence of a class, its reStructuredText as Markdown."""
    import lightning_fed.methods  # waits for torch

    text = markdown(inspect.cleandoc(getattr(lightning_fed.methods, name).__doc__).split("\n\n")[0])
    text = re.sub(r", \$[^$]{15,}\$", "", text)  # a formula that repeats the sentence, and would not fit a card
    return re.split(r"(?<=[.:;])\s", text)[0].rstrip(":;.") + "."


def markdown(text: str) -> str:
    """A paragraph of reStructuredText, as docstrings have it, as Markdown in one line."""
    text = " ".join(text.split())
    text = re.sub(r":math:`([^`]*)`", r"$\1$", text)
    text = re.sub(r":\w+:`[~.]*([^`]*)`", lambda match: f"`{match[1].split('.')[-1]}`", text)
    text = re.sub(r"`([^`<]+) <(https?://[^>]+)>`__?", r"[\1](\2)", text)
    return text.replace("``", "`")


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(rendered(path.read_text(), methods()))
