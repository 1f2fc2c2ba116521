"""One line where jsonargparse would print the usage and every type that a value is not."""

import re
import sys
from typing import Any, NoReturn

import torch
from jsonargparse.typing import register_type
from lightning.pytorch.cli import LightningArgumentParser

import lightning_fed.data
import lightning_fed.engines
import lightning_fed.methods
import lightning_fed.models
from lightning_fed.cli.help import HelpAction, page
from lightning_fed.data import FederatedDataModule, Partitioner
from lightning_fed.engines import Engine
from lightning_fed.models import Backbone

_NOISE = (
    "Does not validate against any of the Union subtypes",
    "Errors:",
    "Expected a <class",  # the other types of the union
    "Expected a path but",  # of a file with the value
    "Given value",
    "Problem with given class_path",
    "Subtypes:",
)


def tensor_of(numbers: Any) -> torch.Tensor:
    """A tensor of a list of numbers: how class weights are written."""
    if not isinstance(numbers, list):
        raise ValueError(f"{numbers!r} is no list of numbers")
    return torch.tensor(numbers, dtype=torch.get_default_dtype())


register_type(torch.Tensor, serializer=torch.Tensor.tolist, deserializer=tensor_of, fail_already_registered=False)


class Parser(LightningArgumentParser):
    """Lightning's parser with short messages and a help of its own.

    Attributes:
        refused: options that are taken only to say what to set instead.
        topic: of the help that is to be printed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.refused: set[str] = set()
        self.topic = "short"
        super().__init__(*args, **kwargs | {"add_help": False})
        self.add_argument("-h", "--help", action=HelpAction)

    def format_help(self, formatter: Any = None) -> str:
        """The help in words for the terminal, for which nobody else's formatter is used."""
        return page(self, self.topic, known)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print one line and exit with code 2."""
        if not self.exit_on_error:
            super().error(message, ex)
        sys.stderr.write(f"lightning-fed: error: {shorten(message)}\n")
        self.exit(2)
        raise AssertionError  # exit does not return


def shorten(message: str) -> str:
    """What is wrong, with which option, and what is known instead."""
    keys = re.findall(r'Parser key "([^"]+)":', message)
    lines = [re.sub(r'^(- )?(Parser key "[^"]+":)?\s*', "", line.strip()) for line in message.splitlines()]
    lines = [line for line in lines if "not match regular expression" not in line]  # what a dotted path looks like
    told = "; ".join(line for line in lines if line and not line.startswith(_NOISE)) or " ".join(message.split())
    told = re.sub(r"Not of type \w+: ", "", told)
    if told.startswith("does not conform") and (values := re.findall(r"Given value: (.*)", message)):
        told = f"{values[0]} {told}"  # of a union, the value stands elsewhere
    told = re.sub(r"Expected a dot import path string: (\S+)", r"there is no '\1'", told)
    if classes := re.findall(r"Problem with given class_path '(?:\w+\.)*(\w+)':", message):
        told = told.replace("is not accepted", f"is not accepted by {classes[-1]}")
    if keys and ("there is no" in told or "has no attribute" in told) and (names := known(keys[-1].rpartition(".")[2])):
        told += f"; known are {', '.join(names)}"
    if "unrecognized arguments" in told or "not accept" in told:
        told += "; see lightning-fed fit --help and, say, --model.help PFedLoRA"
    return f"{'.'.join(keys)}: {told}" if keys else told


def known(key: str) -> list[str]:
    """Names of the classes that an option takes, if they are the library's own."""
    homes = {
        "model": (lightning_fed.methods, object),
        "backbone": (lightning_fed.models, Backbone),
        "data": (lightning_fed.data, FederatedDataModule),
        "partition": (lightning_fed.data, Partitioner),
        "engine": (lightning_fed.engines, Engine),
    }
    module, base = homes.get(key, (lightning_fed.methods, type(None)))
    found = {name: getattr(module, name) for name in module.__all__}
    return [name for name, value in found.items() if isinstance(value, type) and issubclass(value, base) and value is not base]
