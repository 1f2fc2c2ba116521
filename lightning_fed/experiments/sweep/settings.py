"""Configurations as flat tables of settings, and their differences."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from lightning_fed.errors import FederationError, one_line

Settings = dict[str, Any]
"""Dotted keys without ``init_args``, such as ``model.optimizer.lr``; a class is at ``model.class_path``."""

WITHOUT_EFFECT = (
    *("ckpt_path", "config", "federation.run_dir", "federation.store_limit_mb", "federation.engine"),
    *("federation.progress", "federation.logger", "federation.callbacks", "federation.checkpoint_every"),
    "federation.keep",
)
"""Settings of where and how a run is executed and shown, which do not affect results."""

UNUSED = (None, False, 0, "none", "fixed")
"""Values with which options of later versions have no effect."""

SEED = "seed_everything"

PARTITION_SEED = "data.init_args.partition_seed"
"""The option on the command line. If it is null, the partition is drawn with :data:`SEED`."""


class StrictLoader(yaml.SafeLoader):
    """PyYAML's loader, but duplicate keys are a :class:`yaml.YAMLError`: PyYAML silently takes the last one."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """A mapping with different keys."""
        node = super().compose_mapping_node(anchor)
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for place, key in enumerate(keys):
            if first := next((other for other in keys[:place] if other.value == key.value), None):
                lines = [one.start_mark.line + 1 for one in (first, key)]
                raise yaml.YAMLError(f"the key {key.value!r} is given twice, in lines {lines[0]} and {lines[1]}: keep one")
        return node


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file whose top level is a mapping. Raises :class:`FederationError` if it is missing or something else, or if it has
    duplicate keys.
    """
    try:
        if not path.is_file():  # which raises an OSError for a name that is too long
            raise FederationError(f"There is no file {path}: give a YAML file.")
        content = yaml.load(path.read_text(encoding="utf-8-sig"), Loader=StrictLoader)
    except OSError as error:
        raise FederationError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise FederationError(f"{path} is not text in UTF-8 (byte {error.start}): save it as UTF-8.") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # an invalid date is a ValueError
        said = " ".join(str(error).replace('in "<unicode string>", ', "in ").split()).rstrip(".")
        raise FederationError(f"{path} is not YAML: {said}.") from error
    if content is None:
        raise FederationError(f"{path} is empty, or has comments only: it is to be a mapping of settings.")
    if not isinstance(content, dict):
        raise FederationError(f"{path} holds {type(content).__name__}, not a mapping of settings.")
    return content


def read_json(path: Path, remedy: str = "") -> dict[str, Any]:
    """A JSON file that holds an object. Raises :class:`FederationError` for anything else; its message ends with the remedy."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # invalid UTF-8 and invalid JSON are ValueErrors
        raise FederationError(f"{path} is damaged ({one_line(error)}): expected a JSON object.{remedy}") from error
    if not isinstance(content, dict):
        raise FederationError(f"{path} is damaged: it holds a {type(content).__name__}, expected a JSON object.{remedy}")
    return content


def flat(config: Mapping[str, Any], prefix: str = "") -> Settings:
    """A nested configuration as a flat table. Lists are values, which differ as a whole."""
    found: Settings = {}
    for key, value in config.items():
        name = prefix if key == "init_args" and prefix else f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping) and value:
            found |= flat(value, name)
        else:
            found[name] = value
    return found


def plain(key: str) -> str:
    """A key of the command line in the form of :data:`Settings`."""
    return ".".join(part for part in key.split(".") if part != "init_args")


def within(key: str, keys: Iterable[str]) -> bool:
    """Whether a key is one of some keys, or within a block that is one of them."""
    return any(key == other or key.startswith(f"{other}.") for other in keys)


def differences(one: Settings, other: Settings, but: Iterable[str] = ()) -> dict[str, tuple[Any, Any]]:
    """Differences between two configurations, by key; missing keys are None.

    An option that one configuration lacks and the other does not use came with another version of the library, and is no
    difference.

    Args:
        one: a configuration.
        other: another configuration.
        but: keys, or blocks of keys, to ignore; settings without an effect are always ignored.
    """
    allowed = (*but, *WITHOUT_EFFECT)
    keys = sorted(one.keys() | other.keys())
    apart = [key for key in keys if one.get(key) != other.get(key) and not within(key, allowed)]
    return {key: (one.get(key), other.get(key)) for key in apart if not (_is_new(key, one, other) or _is_new(key, other, one))}


def _is_new(key: str, without: Settings, settings: Settings) -> bool:
    """Whether an option is missing in one configuration and not used in the other."""
    is_there = any(name == key or name.startswith(f"{key}.") for name in without)
    return key.count(".") == 1 and not is_there and key in settings and settings[key] in UNUSED
