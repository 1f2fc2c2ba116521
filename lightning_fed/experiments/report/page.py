"""A report as a single HTML file without external resources."""

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_fed.experiments.report.layout import Layout
from lightning_fed.experiments.report.writers import html as written

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


def page(
    title: str,
    findings: Sequence[str],
    tables: Sequence[Layout],
    pictures: Mapping[str, bytes],
    settings: Layout,
    commands: Sequence[str],
    notes: Sequence[str] = (),
) -> str:
    """The HTML of a report.

    Args:
        title: title of the report.
        findings: the results, in sentences.
        tables: tables, in order.
        pictures: PNG files by caption.
        settings: table of the settings.
        commands: commands that repeat the runs.
        notes: further notes, such as runs that were left out.
    """
    shown = [
        f'<figure><img alt="{html.escape(name)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
        f"<figcaption>{html.escape(name)}</figcaption></figure>"
        for name, png in pictures.items()
    ]
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        *(f'<p class="lead">{html.escape(finding)}</p>' for finding in findings),
        *map(written, tables),
        *(f"<p>{html.escape(note)}</p>" for note in notes),
        *(['<h2>Pictures</h2>\n<div class="pictures">', *shown, "</div>"] if shown else []),
        f"<details><summary>{html.escape(settings.title)}</summary>\n{written(replace(settings, title=''))}\n</details>",
        *(["<h2>Commands</h2>", f"<pre>{html.escape(chr(10).join(commands))}</pre>"] if commands else []),
    ]
    head = f'<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">\n<title>{html.escape(title)}</title>'
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n'
