"""Links. Pages are read in the repository and on the site; what is no page of the site is named there, and not linked to.

``python docs/generators/links.py FOLDER`` looks in a built site for links and anchors that lead nowhere.
"""

import os
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Files outside ``docs`` that the site shows, and where."""

LINK = re.compile(
    r"(?P<before>\[(?P<text>[^\[\]]*)\]\(|src=\")(?P<path>(?![a-z]+:|[#/<])[^)\s#\"]+)(?P<anchor>#[^)\s\"]*)?(?P<after>[)\"])"
)


def rebased(text: str, home: Path, page: Path) -> str:
    """The text of a file as it stands on a page of the site.

    Args:
        text: Markdown, with links as seen from ``home``.
        home: the folder of the file.
        page: the page of the site.
    """

    def link(match: re.Match[str]) -> str:
        target = (home / match["path"]).resolve()
        if not target.exists() or not target.is_relative_to(ROOT):
            return match[0]  # no link, or one that the build complains of
        inside = str(target.relative_to(ROOT))
        if inside in PAGES:
            target = DOCS / PAGES[inside]
        elif not target.is_relative_to(DOCS) or target.suffix not in {".md", ".png"}:
            return str(match["text"])
        return f"{match['before']}{os.path.relpath(target, page.parent)}{match['anchor'] or ''}{match['after']}"

    return LINK.sub(link, text)


class Page(HTMLParser):
    """A page's anchors, and what it refers to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag is called and where it leads."""
        for name, value in attrs:
            if name == "id" or (name == "name" and tag == "a"):
                self.ids.add(value or "")
            elif name in ("href", "src") and value:
                self.links.add(value)


def broken(site: Path) -> list[str]:
    """Links inside a built site that lead nowhere."""
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    found = []
    for path, page in pages.items():
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            missing = not target.exists()
            if missing or (parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids):
                found.append(f"{path.relative_to(site.resolve())}: {link}")
    return found


if __name__ == "__main__":
    wrong = broken(Path(sys.argv[1]))
    sys.exit("\n".join(["Links that lead nowhere:", *wrong]) if wrong else None)
