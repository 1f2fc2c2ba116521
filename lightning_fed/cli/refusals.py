"""Errors of jsonargparse in one line: which option, what it got, what it takes."""

import inspect
import pkgutil
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from itertools import groupby
from typing import Any, get_args

import lightning.pytorch.loggers
import torch

import lightning_fed.core
import lightning_fed.data
import lightning_fed.engines
import lightning_fed.federation.attacks
import lightning_fed.methods
import lightning_fed.models
import lightning_fed.privacy
from lightning_fed.cli.help.page import BLOCKS
from lightning_fed.cli.help.unknown_options import meant, place_of, unknown, where_to_look
from lightning_fed.core.fine_tuning import FineTuning
from lightning_fed.core.module import FederatedModule
from lightning_fed.data import FederatedDataModule, Partitioner
from lightning_fed.engines import Engine
from lightning_fed.engines.compression import Compression
from lightning_fed.experiments.renames import OPTIONS, hint
from lightning_fed.formatting import nearest
from lightning_fed.models import Adapters, TrainableNetwork, Transformer
from lightning_fed.options import parameters_of
from lightning_fed.privacy.mechanism import DifferentialPrivacy

HOMES = {
    "model": (lightning_fed.methods, FederatedModule),
    "backbone": (lightning_fed.models, TrainableNetwork),
    "data": (lightning_fed.data, FederatedDataModule),
    "public": (lightning_fed.data, FederatedDataModule),
    "partition": (lightning_fed.data, Partitioner),
    "engine": (lightning_fed.engines, Engine),
    "aggregation": (lightning_fed.core, lightning_fed.core.Aggregation),
    "attack": (lightning_fed.federation.attacks, lightning_fed.federation.attacks.Attack),
    "privacy": (lightning_fed.privacy, DifferentialPrivacy),
    "server_optimizer": (lightning_fed.core, lightning_fed.core.ServerOptimizer),
    "logger": (lightning.pytorch.loggers, lightning.pytorch.loggers.Logger),
}
"""Packages of the classes that an option takes, by the last part of the option's name."""

CLASSES_OF_TORCH = {"optimizer": (torch.optim, ""), "lr_scheduler": (torch.optim.lr_scheduler, ""), "loss": (torch.nn, "torch.nn.")}
"""Packages of the classes that an option takes, and what their names begin with."""

BASES = {
    "FederatedModule": "FedAvg",
    "FederatedDataModule": "Digits",
    "TableData": "CSVFiles",
    "ScaledColumns": "CSVFiles",
    "TextClassification": "TextFiles",
    "QuestionAnswering": "QuestionFiles",
    "TextGeneration": "E2E",
    "ImageFiles": "CIFAR10",
    "Partitioner": "IID",
    "Engine": "InProcess",
    "Aggregation": "Median",
    "Attack": "SignFlip",
    "UpdateAttack": "SignFlip",
    "DifferentialPrivacy": "ClientDP",
    "Logger": "CSVLogger",
    "ServerOptimizer": "ServerAdam",
    "Backbone": "LeNet5",
    "TrainableNetwork": "LeNet5",
    "Transformer": "TransformerClassifier",
}
"""Base classes, which cannot be used themselves, each with a class that can."""

GROUPS = {"fine_tuning": FineTuning, "adapters": Adapters, "compression": Compression}
"""Options that have options of their own."""

OF_TRANSFORMERS = f"{Transformer.__module__}.{Transformer.__name__}]"
"""How jsonargparse ends the type of a network if it has to be one of the transformers library."""

LONGEST = 120
"""Maximum number of characters of a word."""

_NOISE = (
    "Does not validate against any of the Union subtypes",
    "Errors:",
    "Expected a <class",  # one of the other types of the union
    "Expected a path but",  # the value may be in a file
    "Expected a typing.Literal",  # reported in words
    "Given value",
    "Not a valid subclass",  # reported in words
    "Not of type ImportPath",  # the name may be another kind of value
    "Not of type PretrainedName",
    "Not of type Tensor",  # the other type of a number
    "Problem with given class_path",
    "Subclass types expect one of",
    "Subtypes:",
    "a class path (str)",
    "a dict with",
    "but expected",
)

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "list": "a list",
    "tuple": "a list",
    "dict": "names with values",
    "NoneType": "null",
}
"""Python's types as they are called in a configuration."""

_CALLABLE = re.compile(r"Type \S*Callable\[.*?\] expects a function or a callable class: ")


def shorten(message: str, options: Collection[str] = (), verb: str = "fit") -> str:
    """What is wrong by jsonargparse's message, with which option, and what is expected. ``options`` are the names of the options of
    the verb's command line, such as ``federation.rounds``.
    """
    found = [key for key, _ in groupby(re.findall(r'Parser key "([^"]+)":', message))]
    keys = [key for place, key in enumerate(found) if key not in found[:place]]
    lines = list(dict.fromkeys(map(_plain, message.splitlines())))
    errors = [line for line in lines if line and not line.startswith(_NOISE)]
    text = "; ".join([line for line in errors if not line.startswith("Dict must include a class_path")] or errors)
    text = _in_words(text or _expected(message, lines) or " ".join(message.split()), _given(message))
    if text.endswith("expected a whole number"):  # or a name: --client all
        text = " or ".join([text, *_literals(message)])
    text = _with_names(text, message, keys, options, verb)
    text = re.sub(rf"(\S{{{LONGEST}}})\S+", r"\1…", text)
    return f"{'.'.join(keys)}: {text}" if keys else text


def _plain(line: str) -> str:
    """A line without its origin."""
    line = _CALLABLE.sub("", re.sub(r'^(- )?(Parser key "[^"]+":)?\s*', "", line.strip()))
    if "not match regular expression" in line:  # the form of a dotted path
        return ""
    line = re.sub(r'\.? Got value: (Namespace\(|\[|\{).*|^Parser key "[^"]+":$', "", line)
    return re.sub(r"^Not of type (?!ImportPath|PretrainedName|Tensor)\w+: ", "", line)


def _given(message: str) -> str:
    """The refused value, the innermost one."""
    value = next(iter(re.findall(r"Given value: (.*)", message)), "")
    nested = re.fullmatch(r"NestedArg\(key='[^']*', val=(.*)\)", value)
    value = re.sub(r"\.? Got value: .*", "", nested[1] if nested else value)
    return "null" if value in ("None", "'None'") else value


def _literals(message: str) -> list[str]:
    """The values that an option takes by name, of its innermost type."""
    listed = re.findall(r"Expected a typing\.Literal\[([^\]]*)\]", message.partition("Given value")[0])
    return [value.strip().strip("'") for values in listed for value in values.split(",")]


def _expected(message: str, lines: Iterable[str]) -> str:
    """What an option takes, if the message only lists types that the value does not have."""
    innermost = message.partition("Given value")[0]
    kinds = [_KINDS.get(name, "") for name in re.findall(r"Expected a <class '(\w+)'>", innermost)]
    kinds += _literals(message)
    if classes := re.findall(r"Not a valid subclass of (\w+)", message):
        kinds = [f"the name of a {classes[0]}, or its class_path and init_args"]
    if "Not of type Tensor" in message and not kinds:
        kinds = ["a list of numbers"]
    if "NestedArg(" in message and len(kinds) > 1:  # options of an option: only the outer one may be null
        kinds = [kind for kind in kinds if kind != "null"]
    kinds = list(dict.fromkeys(filter(None, kinds)))
    value = _given(message) or next(iter(re.findall(r"Got value: (.*)", message)), "something else")
    return f"got {'null' if value == 'None' else value}, expected {' or '.join(kinds)}" if kinds else ""


def _in_words(text: str, value: str) -> str:
    """Python's messages about values in the terms of a configuration."""
    restricted = re.match(r"(.*?) ?does not conform to restriction v(>=?)(\S+)(?: and v<=(\S+))?", text)
    if restricted:  # for a union, the value is elsewhere
        given, sign, least, most = restricted.groups()
        least, most = f"{'from' if sign == '>=' else 'above'} {least}", f" up to {most}" if most else ""
        text = f"got {given or value}, expected a number {least}{most}" + text[restricted.end() :]
    text = re.sub(r"Expected a dot import path string: (\S+?)(?=;|$)", r"there is no '\1'", text)
    text = re.sub(r"(int|float)\(\) argument must be .* not 'NoneType'", "got null, expected a number", text)
    if wrong := re.search(r"(int|float)\(\) argument must be .* not '(\w+)'", text):  # without the value, its kind
        text = text.replace(wrong[0], f"got {value or _KINDS.get(wrong[2], wrong[2])}, expected {_KINDS[wrong[1]]}")
    not_numbers = r"(invalid literal for int\(\) with base 10|could not convert string to \w+)"
    text = re.sub(rf"{not_numbers}: '?None'?", "got null, expected a number", text)
    text = re.sub(r"invalid literal for int\(\) with base 10: (.*)", r"got \1, expected a whole number", text)
    text = re.sub(r"could not convert string to float: (.*)", r"got \1, expected a number", text)
    text = re.sub(r"Expected '([\w.]+)' to be a subclass of <class '(\w+)'>\.?", r"\1 is no \2", text)
    text = text.replace("Expected a tuple with", "expected a list with")
    text = re.sub(r"Unexpected import path format: ([^;]*)", r"got \1, expected the name of a class", text)
    text = re.sub(r"Import path does not correspond to a subclass of (\w+)", rf"{value} is no \1", text)
    no_class = r"Expected an import path or a subclass spec, but got (.*?)(?=\. Got value|;|$)(\. Got value: [^;]*)?"
    text = re.sub(no_class, r"got \1, expected the name of a class", text)
    text = re.sub(r"Unable to load config (['\"])(.*?)\1(; Unable.*)?", r"got '\2', expected options by name", text)
    text = re.sub(r"Problems parsing config: ", "The configuration is not YAML: ", text)
    text = re.sub(r'; in "<unicode string>",', ", in", text)
    noise = r"expected string or bytes-like object|there is no '-?[\d.]"  # a number is no class
    parts = dict.fromkeys(text.split("; "))
    return "; ".join([part for part in parts if not re.match(noise, part)] or parts)


def _with_names(text: str, message: str, keys: list[str], options: Collection[str], verb: str) -> str:
    """Add the known names and the one that is nearest to the given name."""
    given_class = re.search(r"class_path(?:=|': )'([^']+)'", _given(message))
    if keys == ["model"] and given_class and (reason := untyped(given_class[1])):  # jsonargparse names the network's class
        return reason
    if wrong := re.search(r"Expected an instantiatable class, but \S*\.(\w+) is abstract", text):
        names = known(keys[-1].rpartition(".")[2]) if keys else []
        return f"a {wrong[1]} is only a base class, or there is no class_path: name one of {', '.join(names)}"
    if "Option 'class_path' is not accepted" in text:
        return "the options of a class stand in its init_args, not beside its class_path"
    text = re.sub(r"Subcommand '[^']+' does not accept option '([^']+)'", r"Option '\1' is not accepted", text)
    text = re.sub(r"Group '([^']+)' does not accept option '([^']+)'", r"Option '\1.\2' is not accepted", text)
    wrong = re.search(r"Option '([^']+)' is not accepted(?! by)", text)
    if wrong and ((path := _whose(message, wrong[0])) or keys):
        # a method may fix an option of its base class
        names = [name for name in (*options_of(path), "class_path", "init_args") if name != wrong[1]] if path else []
        short = path.rpartition(".")[2]
        text = text.replace("is not accepted", f"is not accepted by {short}" if path else "is not accepted", 1)
        text += meant(wrong[1], names)
        if short in BASES:
            text += f"; {keys[-1] if keys else 'the block'} names no class: give class_path, such as {BASES[short]}"
    elif wrong:
        near = nearest(wrong[1], options) or _nearest_block(wrong[1]) or place_of(wrong[1])
        text += hint(wrong[1].rpartition(".")[2], OPTIONS) or near
    elif wrong := re.search(r"unrecognized arguments: --([^=\s]+)", text):
        return unknown(text, wrong[1], options, verb)
    elif text.startswith("unrecognized arguments: "):
        text += "; the names of options begin with --, and a configuration is given as --config FILE"
    elif keys == ["model"] and text == "the following arguments are required: backbone":
        text += "; the one of the configuration, if it has one, does not fit the method: name another with --model.backbone"
    elif text.startswith("the following arguments are required: "):
        text = text if keys else re.sub(r"\b(\w+\.)?(data|model|output)\b", r"--\2", text)
        if not text.endswith("--output"):  # which no configuration has
            text += "; or --config with a file or a name that lightning-fed configs lists"
    elif "expected the name of a" in text:
        given = [name for name in re.findall(r"'(\w+)':", _given(message)) if name not in ("class_path", "init_args")]
        text += nearest(given[0], ["class_path", "init_args"]) if given else ""
    elif text.startswith("No module named "):
        text += "; for a file in this folder, start the command with PYTHONPATH=."
    elif wrong := re.search(r"module '([\w.]+)' has no attribute '(\w+)'", text):
        text += nearest(wrong[2], [name for name, value in vars(sys.modules[wrong[1]]).items() if isinstance(value, type)])
        if not wrong[1].startswith("lightning_fed."):
            return text
    if wrong := re.search(r"there is no '(?:[\w.]*\.)?(\w+)'", text):
        home, path = CLASSES_OF_TORCH.get(keys[-1].rpartition(".")[2] if keys else "", (None, ""))
        text += nearest(path + wrong[1], [path + name for name in dir(home) if name[0].isupper()]) if home else ""
    if keys and re.search("there is no|has no attribute| is no ", text) and (names := known(keys[-1].rpartition(".")[2])):
        wrong = re.search(r"there is no '([^']*)'|(\S+) is no ", text)
        pretrained = ""
        name = (wrong[1] or wrong[2]).rpartition(".")[2] if wrong else ""
        if OF_TRANSFORMERS in message.partition("Given value")[0]:
            names, others = known("backbone", Transformer), names
            if name in {*others} - {*names}:
                method = _whose(message, "Given value").rpartition(".")[2]
                text = f"{method} takes networks of the transformers library, not {name}"
            pretrained = "; a pretrained model with options is TransformerClassifier with its option name"
        text += nearest(name, names) + f"; known are {', '.join(names)}{pretrained}"
    elif keys and "there is no" in text and (group := GROUPS.get(keys[-1].rpartition(".")[2])):
        text = f"got {_given(message)}, expected options by name: {', '.join(field.name for field in fields(group))}"
    if "not accept" not in text:
        return text
    of = _whose(message, "is not accepted").rpartition(".")[2] if keys in (["model"], ["data"]) else ""
    return f"{text}; {where_to_look(keys[0] if keys else '', of, verb)}"


def _nearest_block(option: str) -> str:
    """The block that was meant, if the option starts with no known block."""
    first, dot, _ = option.partition(".")
    return nearest(first, BLOCKS) if dot and first not in BLOCKS else ""


def _whose(message: str, what: str) -> str:
    """The path of the class that does not take an option: the value on the same line, or the class mentioned last."""
    before, _, after = message.partition(what)
    if given := re.match(r"\. Got value: Namespace\(class_path='([^']+)'", after):
        return given[1]
    classes = re.findall(r"Problem with given class_path '([^']+)'", before)
    return classes[-1] if classes else ""


def options_of(path: str) -> Mapping[str, tuple[inspect.Parameter, Any]]:
    """Options of a class or a function, as :func:`.parameters_of` returns them; empty if they cannot be determined."""
    try:
        return parameters_of(pkgutil.resolve_name(path))
    except (ImportError, AttributeError, ValueError, TypeError):
        return {}


def untyped(path: str) -> str:
    """What to write in a method that takes a backbone without a type; empty for other classes."""
    parameters = options_of(path)
    if "backbone" not in parameters or parameters["backbone"][0].annotation is not inspect.Parameter.empty:
        return ""
    return (
        f"{path} takes backbone without a type, so that all clients would start from copies of one network: write "
        "backbone: Backbones in its __init__, with from lightning_fed.models import Backbones."
    )


def known(key: str, hint: Any = None) -> list[str]:
    """Names of the classes that an option takes, if they are the library's own, by the last part of the option's name. Its type, if
    known, is a hint: some methods only take some networks.
    """
    module, base = HOMES.get(key, (lightning_fed.methods, type(None)))
    if key == "backbone" and hint is not None and not _names_networks(hint):
        base = Transformer
    found = {name: getattr(module, name) for name in getattr(module, "__all__", vars(module)) if name not in BASES}
    return [name for name, value in found.items() if isinstance(value, type) and issubclass(value, base)]


def _names_networks(hint: Any) -> bool:
    """Whether a type contains :class:`TrainableNetwork`."""
    return hint is TrainableNetwork or any(map(_names_networks, get_args(hint)))
