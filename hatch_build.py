"""What pyproject.toml cannot say: the README as a package index shows it, where links into the repository have to be whole."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

README = Path(__file__).with_name("README.md")
LINK = re.compile(r"(?P<before>\]\(|src=\")(?P<path>(?![a-z]+:|#)[^)\s\"]+)")


def readme(home: str) -> str:
    """README.md with whole links: to pages, and, for pictures, to the files themselves.

    Args:
        home: address of the repository.
    """

    def whole(match: re.Match[str]) -> str:
        kind = "raw" if match["before"].startswith("src") else "blob"
        return f"{match['before']}{home}/{kind}/main/{match['path']}"

    return LINK.sub(whole, README.read_text())


class ReadmeHook(MetadataHookInterface):
    """Hands it to the build."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set what the project's metadata say under ``readme``."""
        metadata["readme"] = {"content-type": "text/markdown", "text": readme(metadata["urls"]["Repository"])}
