"""All options by verb and by class, kept in the user's cache: what help, completion and questions for a misspelt option look into
without waiting for torch.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lightning_fed.cli.help.page import Option
from lightning_fed.experiments.configs import shipped

SHAPES_OPTIONS = ("jsonargparse", "lightning", "torch", "torchvision", "transformers", "peft")
"""Packages whose options are listed."""


@dataclass(frozen=True)
class OptionIndex:
    """What can be set.

    Attributes:
        texts: what each verb does.
        verbs: the options of each.
        classes: the options of the library's classes, by the last part of the option that names one (``model``, ``backbone``), and
            by the class's name.
    """

    texts: Mapping[str, str]
    verbs: Mapping[str, Sequence[Option]]
    classes: Mapping[str, Mapping[str, Sequence[Option]]]

    def options(self, verb: str, chosen: Mapping[str, str]) -> dict[str, Option]:
        """The options of a verb, and of the classes that were chosen, by name.

        Args:
            verb: its name.
            chosen: values of options, of which only classes' names count.
        """
        found = {option.name: option for option in self.verbs[verb]}
        for name, value in sorted(chosen.items(), key=lambda item: item[0].count(".")):
            own = self.classes.get(name.rpartition(".")[2], {}).get(value, []) if name in found else []
            found |= {option.name: option for option in (option.under(name) for option in own)}
        return found


def read() -> OptionIndex | None:
    """The index of this installation, if it was written and can be read: one does without where there is no home, or where somebody
    has damaged it.
    """
    with suppress(OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError):
        return _of(json.loads(_path().read_text()))
    return None


def _of(content: Mapping[str, Any]) -> OptionIndex:
    verbs = {verb: [Option(**option) for option in options] for verb, options in content["verbs"].items()}
    classes = {
        key: {name: [Option(**option) for option in options] for name, options in named.items()}
        for key, named in content["classes"].items()
    }
    return OptionIndex(content["texts"], verbs, classes)


def write(made: OptionIndex) -> None:
    """Write it into the user's cache."""
    with suppress(OSError, RuntimeError):  # where nothing can be written, it is made the next time, too
        path = _path()
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(f".{os.getpid()}")
        aside.write_text(json.dumps(asdict(made)))
        aside.replace(path)


def _path() -> Path:
    """Where the user's programs keep what they can make again, by the XDG specification, under the fingerprint of all that decides
    what stands in it. The package's own files count by when they were changed, for those who change them.
    """
    package = Path(__file__).parents[2]
    files = [*package.rglob("*.py"), *shipped().values()]
    newest = max(file.stat().st_mtime_ns for file in files)
    parts = (*map(version, SHAPES_OPTIONS), sys.version, package, len(files), newest)
    name = sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning-fed" / f"{name}.json"
