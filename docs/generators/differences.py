"""What public code does differently: the sections of the methods' pages, and what a difference comes to.

``python docs/generators/differences.py`` writes the table of docs/differences.md again, of what ``bench/differences.py`` measured.
"""

import csv
import re
from itertools import groupby
from pathlib import Path
from statistics import mean, stdev

if __name__ == "__main__":
    import gallery
    import links
else:
    from generators import gallery, links

DOCS = gallery.ROOT / "docs"
RESULTS = DOCS / "differences.csv"
TITLE = "What public code does differently"
SECTION = re.compile(rf"^## {TITLE}\n(.*?)(?=^## )", re.DOTALL | re.MULTILINE)
TABLE = re.compile(r"(<!-- measured: [^>]* -->\n).*?(<!-- end -->)", re.DOTALL)


def section(page: Path) -> str | None:
    """What a method's page says of public code; None: nothing."""
    found = SECTION.search(page.read_text())
    return found[1].strip() if found else None


def sections() -> str:
    """Those of all pages, each below the names of its methods, in the gallery's order."""
    parts, seen = [], set()
    for method in gallery.methods():
        if method.page not in seen and (text := section(gallery.PAGES / f"{method.page}.md")):
            seen.add(method.page)
            names = ", ".join(other.name for other in gallery.methods() if other.page == method.page)
            tests = sorted(set(re.findall(r"`(tests/[\w/]+\.py)`", (gallery.PAGES / f"{method.page}.md").read_text())))
            own = [f"`{test}`" for test in tests if "every_method" not in test]
            text = links.rebased(text, gallery.PAGES, DOCS / "differences.md")
            parts.append(f"### [{names}](methods/{method.page}.md)\n\n{text}\n\nHeld here by {', '.join(own)}.")
    return "\n\n".join(parts)


def measured() -> str:
    """A row for each deviation: the means over seeds, and the mean difference of pairs with its standard deviation."""
    rows = list(csv.DictReader(RESULTS.read_text().splitlines()))
    lines = ["| method | code | what it does | paper | deviation | difference | told apart by |", "|---|---|---|---|---|---|---|"]
    for (name, code, what, test), group in groupby(
        rows, key=lambda row: tuple(row[key] for key in ("method", "code", "what", "test"))
    ):
        pairs = [(100 * float(row["ours"]), 100 * float(row["theirs"])) for row in group]
        apart = [theirs - ours for ours, theirs in pairs]
        ours, theirs = (mean(values) for values in zip(*pairs, strict=True))
        lines.append(
            f"| {name} | {code} | {what} | {ours:.1f} | {theirs:.1f} | {mean(apart):+.1f} ± {stdev(apart):.1f} | `{test}` |"
        )
    return "\n".join(lines)


def rendered(page: str) -> str:
    """The page with its table written again."""
    return TABLE.sub(lambda match: f"{match[1]}\n{measured()}\n\n{match[2]}", page)


if __name__ == "__main__":
    path = DOCS / "differences.md"
    path.write_text(rendered(path.read_text()))
