"""What pyproject.toml cannot say: the README as a package index shows it, where nothing of the repository is."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

README = Path(__file__).with_name("README.md")
LINK = re.compile(r"\[(?P<text>[^\[\]]*)\]\((?![a-z]+:|#)[^)\s]+\)")
PICTURE = re.compile(r"<img src=\"(?![a-z]+:)[^>]*>\n?")


class ReadmeHook(MetadataHookInterface):
    """Hands it to the build."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set what the project's metadata say under ``readme``: links into the repository are their text, pictures are left out."""
        text = PICTURE.sub("", LINK.sub(lambda link: link["text"], README.read_text()))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
