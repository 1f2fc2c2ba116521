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

import yaml

from lightning_fed.cli.help.page import Option
from lightning_fed.errors import FederationError
from lightning_fed.experiments.configs import is_yaml, shipped
from lightning_fed.experiments.sweep.settings import flat, read_yaml
from lightning_fed.system.folders import from_home

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
        """The options of a verb and of the chosen classes, by name. Of the chosen values of options, only names of classes are
        used.
        """
        found = {option.name: option for option in self.verbs[verb]}
        for name, value in sorted(chosen.items(), key=lambda item: item[0].count(".")):
            own = self.classes.get(name.rpartition(".")[2], {}).get(value, []) if name in found else []
            found |= {option.name: option for option in (option.under(name) for option in own)}
        return found


def chosen(given: Sequence[str]) -> dict[str, str]:
    """The values of options in a line's words and in the configurations that they name or hold; later ones take precedence."""
    found: dict[str, str] = {}
    for name, value in pairwise(given):
        if name.startswith("--"):
            values = flat(_configuration(value)) if name == "--config" else {plain_name(name): value}
            found |= {key.removesuffix(".class_path"): str(of_key) for key, of_key in values.items()}
    return found


def _configuration(given: str) -> Mapping[str, Any]:
    """A configuration by the name of its file, or YAML; empty if it cannot be read, which is reported when it is used."""
    with suppress(FederationError, yaml.YAMLError):
        content = yaml.safe_load(given) if is_yaml(given) else read_yaml(shipped().get(given, from_home(given)))
        return content if isinstance(content, Mapping) else {}
    return {}


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
    parts = (*map(version, SHAPES_OPTIONS), sys.version, sys.flags.optimize, package, len(files), newest)
    name = sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning-fed" / f"{name}.json"
