"""All options by verb and by class, stored in the user's cache, so that help and completion need not wait for torch."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_fed.cli.help.page import Option
from lightning_fed.errors import FederationError
from lightning_fed.experiments.configs import shipped
from lightning_fed.experiments.sweep.settings import flat, read_yaml

SHAPES_OPTIONS = ("jsonargparse", "lightning", "torch", "torchvision", "transformers", "peft")
"""Packages whose options are listed."""


@dataclass(frozen=True)
class OptionIndex:
    """All options.

    Attributes:
        texts: description of each verb.
        verbs: options of each verb.
        classes: options of the library's classes, by the last part of the option that names one (``model``, ``backbone``), and by
            the class's name.
    """

    texts: Mapping[str, str]
    verbs: Mapping[str, Sequence[Option]]
    classes: Mapping[str, Mapping[str, Sequence[Option]]]

    def options(self, verb: str, chosen: Mapping[str, str]) -> dict[str, Option]:
        """The options of a verb and of the chosen classes, by name.

        Args:
            verb: name of the verb.
            chosen: values of options; only names of classes are used.
        """
        found = {option.name: option for option in self.verbs[verb]}
        for name, value in sorted(chosen.items(), key=lambda item: item[0].count(".")):
            own = self.classes.get(name.rpartition(".")[2], {}).get(value, []) if name in found else []
            found |= {option.name: option for option in (option.under(name) for option in own)}
        return found


def chosen(given: Sequence[str]) -> dict[str, str]:
    """The values of options in the configurations that a line's words name, overridden by those on the line."""
    pairs = [(plain_name(name), value) for name, value in pairwise(given) if name.startswith("--")]
    found: dict[str, str] = {}
    for name, value in pairs:
        if name == "config":
            path = shipped().get(value, Path(value).expanduser())
            with suppress(FederationError):  # errors of the file are reported when it is used
                found |= {key.removesuffix(".class_path"): str(value) for key, value in flat(read_yaml(path)).items()}
    return found | dict(pairs)


def plain_name(flag: str) -> str:
    """An option's name as in the index."""
    return flag.removeprefix("--").replace(".init_args", "")


def read() -> OptionIndex | None:
    """The index of this installation; None if it does not exist or cannot be read."""
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
    """Write the index into the user's cache."""
    with suppress(OSError, RuntimeError):  # without a writable cache it is made anew each time
        path = _path()
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(f".{os.getpid()}")
        aside.write_text(json.dumps(asdict(made)))
        aside.replace(path)


def _path() -> Path:
    """The path in the user's cache, by the XDG specification. Its name is a fingerprint of all that determines the content; the
    package's own files count by their modification times, for developers.
    """
    package = Path(__file__).parents[2]
    files = [*package.rglob("*.py"), *shipped().values()]
    newest = max(file.stat().st_mtime_ns for file in files)
    parts = (*map(version, SHAPES_OPTIONS), sys.version, package, len(files), newest)
    name = sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning-fed" / f"{name}.json"
