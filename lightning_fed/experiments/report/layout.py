"""A table as cells, and how it is written for Markdown, LaTeX, HTML and a terminal."""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Group
from rich.table import Table as RichTable
from rich.text import Text

TEX = str.maketrans(
    {sign: rf"\{sign}" for sign in "%&#_${}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "|": r"\textbar{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "[": "{[}", "*": "{*}"}  # the latter two mean something after a line's end
    | {"±": r"$\pm$", "−": "$-$", "×": r"$\times$", "–": "--", "α": r"$\alpha$"}
)
"""How LaTeX writes what means something else to it, and signs that a plain font lacks."""


@dataclass(frozen=True)
class Entry:
    """A cell of a table.

    Args:
        text: what it says.
        bold: whether it stands out.
    """

    text: str
    bold: bool = False


@dataclass(frozen=True)
class Layout:
    """A table: names on the left, numbers right-aligned beside them.

    Args:
        title: what it shows; may be empty.
        columns: the header.
        rows: of as many entries.
        notes: what must be known to read it.
    """

    title: str
    columns: list[str]
    rows: list[list[Entry]]
    notes: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        """For GitHub and Sphinx."""
        marks = ["---", *["---:"] * (len(self.columns) - 1)]
        texts = [
            [f"**{said}**" if entry.bold and (said := _markdown(entry.text)) else _markdown(entry.text) for entry in row]
            for row in self.rows
        ]
        header = [_markdown(column) for column in self.columns]
        lines = [f"| {' | '.join(row)} |".replace("|  |", "| |").replace("|  |", "| |") for row in (header, *texts)]
        table = "\n".join([lines[0], f"|{'|'.join(marks)}|", *lines[1:]])
        title, notes = _markdown(self.title), _markdown(" ".join(self.notes))
        return "\n\n".join(filter(None, (f"**{title}**" if title else "", table, notes))) + "\n"

    def latex(self) -> str:
        """For a paper that loads booktabs."""
        texts = [[rf"\textbf{{{_tex(entry.text)}}}" if entry.bold else _tex(entry.text) for entry in row] for row in self.rows]
        body = [" & ".join(row) + r" \\" for row in texts]
        header = " & ".join(map(_tex, self.columns)) + r" \\"
        lines = [rf"\begin{{tabular}}{{l{'r' * (len(self.columns) - 1)}}}", r"\toprule", header, r"\midrule", *body]
        comments = [f"% {' '.join(line.split())}" for line in filter(None, (self.title, *self.notes))]
        return "\n".join([*comments, *lines, r"\bottomrule", r"\end{tabular}"]) + "\n"

    def html(self) -> str:
        """A ``table`` element and its notes."""
        header = "".join(f"<th>{html.escape(column)}</th>" for column in self.columns)
        rows = ["".join(f"<td>{_html(entry)}</td>" for entry in row) for row in self.rows]
        body = "\n".join(f"<tr>{row}</tr>" for row in rows)
        title = f"<h2>{html.escape(self.title)}</h2>\n" if self.title else ""
        notes = f"<p>{html.escape(' '.join(self.notes))}</p>" if self.notes else ""
        table = f"<table>\n<thead><tr>{header}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"
        return f'{title}<div class="wide">{table}</div>\n{notes}'

    def terminal(self, width: int) -> Group:
        """For rich to print: turned on its side where it is wider than the terminal and narrower so, and in as many tables,
        one below the other, as it takes that no line is broken.

        Args:
            width: of the terminal, in characters.
        """
        grid = [[Entry(column) for column in self.columns], *self.rows]
        if _width(grid) > width and _width(turned := [list(column) for column in zip(*grid, strict=True)]) < _width(grid):
            grid = turned
        names, *columns = zip(*grid, strict=True)
        parts: list[list[tuple[Entry, ...]]] = [[names]]
        for column in columns:
            if len(parts[-1]) > 1 and _width(list(zip(*parts[-1], column, strict=True))) > width:
                parts.append([names])
            parts[-1].append(column)
        tables = [_for_rich(list(zip(*part, strict=True))) for part in parts]
        tables[0].title, tables[-1].caption = self.title or None, " ".join(self.notes)
        return Group(*tables)


def _for_rich(grid: Sequence[Sequence[Entry]]) -> RichTable:
    header, *rows = grid
    table = RichTable(title_justify="left", caption_justify="left")
    for place, column in enumerate(header):
        table.add_column(Text(column.text), justify="right" if place else "left")
    for row in rows:
        table.add_row(*(Text(entry.text, "bold" if entry.bold else "") for entry in row))
    return table


def _width(grid: Sequence[Sequence[Entry]]) -> int:
    """Characters that a table takes if nothing is broken."""
    return sum(max(len(entry.text) for entry in column) + 3 for column in zip(*grid, strict=True)) + 1


def _html(entry: Entry) -> str:
    text = html.escape(entry.text)
    return f"<b>{text}</b>" if entry.bold else text


def _tex(text: str) -> str:
    """Text with LaTeX's own characters escaped."""
    return " ".join(text.split()).translate(TEX)


def _markdown(text: str) -> str:
    """Text with Markdown's own characters escaped, of underscores those that are not inside a word."""
    return re.sub(r"[\\|*`<\[\]~$]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", " ".join(text.split()))
