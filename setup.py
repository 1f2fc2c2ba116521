"""What pyproject.toml cannot say: the README as a package index shows it, where links into the repository have to be whole."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent
LINK = re.compile(r"(?P<before>\]\(|src=\")(?P<path>(?![a-z]+:|#)[^)\s\"]+)")


def readme() -> str:
    """README.md with whole links: to pages, and, for pictures, to the files themselves."""
    home = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]

    def whole(match: re.Match[str]) -> str:
        kind = "raw" if match["before"].startswith("src") else "blob"
        return f"{match['before']}{home}/{kind}/main/{match['path']}"

    return LINK.sub(whole, (ROOT / "README.md").read_text())


if __name__ == "__main__":  # as setuptools runs it
    from setuptools import setup

    setup(long_description=readme(), long_description_content_type="text/markdown")
