"""Tables as Markdown, LaTeX, HTML and terminal output, and a report as a single HTML file without external resources."""

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape

from rich.console import Group
from rich.table import Table as RichTable
from rich.text import Text

from lightning_fed.experiments.report.layout import Entry, Layout

GREEK = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon phi chi psi omega"
"""Names of the small letters in LaTeX."""

CAPITALS = "Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"
"""Names of the capitals that no Latin letter looks like."""

TEX = str.maketrans(
    {sign: rf"\{sign}" for sign in "%&#_${}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "|": r"\textbar{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "[": "{[}", "*": "{*}"}  # the latter two mean something after a line's end
    | {"±": r"$\pm$", "−": "$-$", "×": r"$\times$", "–": "--", "→": r"$\to$", "≤": r"$\leq$", "≥": r"$\geq$", "≈": r"$\approx$"}
    | {letter: rf"$\{name}$" for letter, name in zip("αβγδεζηθικλμνξπρστυφχψω", GREEK.split(), strict=True)}
    | {letter: rf"$\{name}$" for letter, name in zip("ΓΔΘΛΞΠΣΦΨΩ", CAPITALS.split(), strict=True)}
    | {mark: f"$^{number}$" for number, mark in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}
    | {mark: f"$_{number}$" for number, mark in enumerate("₀₁₂₃₄₅₆₇₈₉")}
)
"""LaTeX code of its special characters, and of signs that a plain font lacks."""

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
body { color: #1a1a1a; background: #fff; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
.lead { font-size: 1.1rem; color: #1a1a1a; } summary { font-weight: bold; cursor: pointer; margin-top: 2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .85rem; }
th, td { padding: .3rem .5rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th { white-space: normal; vertical-align: bottom; } th:first-child, td:first-child { text-align: left; }
p { font-size: .9rem; color: #444; }
pre { background: #f5f5f5; padding: .8rem; font-size: .8rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr)); gap: 1rem; }
figure { margin: 0; } img { width: 100%; max-width: 30rem; } figcaption { font-size: .85rem; color: #444; }
"""


def markdown(table: Layout) -> str:
    """A table for GitHub and Sphinx."""
    table = table.marked()
    lines = [
        [f"**{said}**" if entry.bold and (said := in_markdown(entry.text)) else in_markdown(entry.text) for entry in row]
        for row in table.rows
    ]
    for place, name in sorted(table.groups.items(), reverse=True):
        lines.insert(place, [f"*{in_markdown(name)}*", *[""] * (len(table.columns) - 1)])
    rows = [f"| {' | '.join(row)} |" for row in ([in_markdown(column) for column in table.columns], *lines)]
    header, *body = [re.sub(r"\|  (?=\|)", "| ", row) for row in rows]
    grid = "\n".join([header, f"|{'|'.join(['---', *['---:'] * (len(table.columns) - 1)])}|", *body])
    title, notes = in_markdown(table.title), in_markdown(" ".join(table.notes))
    return "\n\n".join(filter(None, (f"**{title}**" if title else "", grid, notes))) + "\n"


def latex(table: Layout) -> str:
    """A float for a paper that loads booktabs, with the notes in its caption."""
    table = table.marked()
    lines = [
        " & ".join(rf"\textbf{{{in_latex(entry.text)}}}" if entry.bold else in_latex(entry.text) for entry in row) + r" \\"
        for row in table.rows
    ]
    for place, name in sorted(table.groups.items(), reverse=True):
        lines.insert(place, rf"\multicolumn{{{len(table.columns)}}}{{l}}{{\textit{{{in_latex(name)}}}}} \\")
    header = " & ".join(map(in_latex, table.columns)) + r" \\"
    begin = rf"\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}"
    caption = " ".join(f"{in_latex(line).rstrip('.')}." for line in filter(None, (table.title, *table.notes)))
    above = [r"\begin{table}", r"\centering", *([rf"\caption{{{caption}}}"] if caption else [])]
    grid = [begin, r"\toprule", header, r"\midrule", *lines, r"\bottomrule", r"\end{tabular}"]
    return "\n".join([*above, *grid, r"\end{table}"]) + "\n"


def html(table: Layout) -> str:
    """A ``table`` element and its notes."""
    table = table.marked()
    header = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = [f"<tr>{''.join(f'<td>{_html(entry)}</td>' for entry in row)}</tr>" for row in table.rows]
    for place, name in sorted(table.groups.items(), reverse=True):
        rows.insert(place, f'<tr><th colspan="{len(table.columns)}"><i>{escape(name)}</i></th></tr>')
    title = f"<h2>{escape(table.title)}</h2>\n" if table.title else ""
    notes = f"<p>{escape(' '.join(table.notes))}</p>" if table.notes else ""
    body = "\n".join(rows)
    whole = f"<table>\n<thead><tr>{header}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"
    return f'{title}<div class="wide">{whole}</div>\n{notes}'


def page(
    title: str,
    findings: Sequence[str],
    tables: Sequence[Layout],
    pictures: Mapping[str, bytes],
    settings: Layout,
    commands: Sequence[str],
    notes: Sequence[str] = (),
) -> str:
    """The HTML of a report: the results in sentences, tables, pictures (PNG files by caption), the table of the settings, commands
    that repeat the runs, and further notes, such as runs that were left out.
    """
    shown = [
        f'<figure><img alt="{escape(name)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
        f"<figcaption>{escape(name)}</figcaption></figure>"
        for name, png in pictures.items()
    ]
    parts = [
        f"<h1>{escape(title)}</h1>",
        *(f'<p class="lead">{escape(finding)}</p>' for finding in findings),
        *map(html, tables),
        *(f"<p>{escape(note)}</p>" for note in notes),
        *(['<h2>Pictures</h2>\n<div class="pictures">', *shown, "</div>"] if shown else []),
        f"<details><summary>{escape(settings.title)}</summary>\n{html(replace(settings, title=''))}\n</details>",
        *(["<h2>Commands</h2>", f"<pre>{escape(chr(10).join(commands))}</pre>"] if commands else []),
    ]
    head = f'<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">\n<title>{escape(title)}</title>'
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n'


def terminal(table: Layout, width: int) -> Group:
    """Output for rich: transposed if it is wider than the terminal and narrower that way, and split into several tables, one below
    the other, so that no line is broken.
    """
    table = table.marked()
    grid, groups = [[Entry(column) for column in table.columns], *table.rows], table.groups
    if (
        not groups
        and _width(grid) > width
        and _width(turned := [list(column) for column in zip(*grid, strict=True)]) < _width(grid)
    ):
        grid = turned
    names, *columns = zip(*grid, strict=True)
    parts: list[list[tuple[Entry, ...]]] = [[names]]
    for column in columns:
        if len(parts[-1]) > 1 and _width(list(zip(*parts[-1], column, strict=True))) > width:
            parts.append([names])
        parts[-1].append(column)
    tables = [_for_rich(list(zip(*part, strict=True)), groups) for part in parts]
    tables[0].title, tables[-1].caption = Text(table.title, "table.title"), Text(" ".join(table.notes), "table.caption")
    return Group(*tables)


def _for_rich(grid: Sequence[Sequence[Entry]], groups: Mapping[int, str]) -> RichTable:
    header, *rows = grid
    table = RichTable(title_justify="left", caption_justify="left")
    for place, column in enumerate(header):
        table.add_column(Text(column.text), justify="right" if place else "left")
    for place, row in enumerate(rows):
        if place in groups:
            table.add_section()
            table.add_row(Text(groups[place], "italic"))
        table.add_row(*(Text(entry.text, "bold" if entry.bold else "") for entry in row))
    return table


def _width(grid: Sequence[Sequence[Entry]]) -> int:
    """Width of a table in characters without broken lines."""
    return sum(max(len(entry.text) for entry in column) + 3 for column in zip(*grid, strict=True)) + 1


def _html(entry: Entry) -> str:
    text = escape(entry.text)
    return f"<b>{text}</b>" if entry.bold else text


def in_latex(text: str) -> str:
    """Text with LaTeX's special characters escaped."""
    return " ".join(text.split()).translate(TEX)


def in_markdown(text: str) -> str:
    """Text with Markdown's special characters escaped; underscores only if they are not inside a word."""
    return re.sub(r"[\\|*`<\[\]~$]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", " ".join(text.split()))
