"""Lightning's parser with short messages and a strict YAML loader."""

import inspect
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from itertools import pairwise
from typing import Any, NoReturn

import torch
import yaml
from jsonargparse import get_loader, set_dumper, set_loader
from jsonargparse.typing import register_type
from lightning.pytorch.cli import LightningArgumentParser

from lightning_fed.cli.help.page import HelpAction, described, page, page_of_class, plain
from lightning_fed.cli.refusals import known, shorten
from lightning_fed.errors import FederationError, print_error
from lightning_fed.experiments.configs import found, is_yaml
from lightning_fed.experiments.sweep.settings import StrictLoader, read_yaml

MODE = "strict yaml"
"""The loader of values and files: jsonargparse's YAML loader, but duplicate keys are refused."""

OF_DUMPS: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The loader of what :func:`dump` wrote: several times faster, but with less to say about errors in users' files."""


def tensor_of(numbers: Any) -> torch.Tensor:
    """A tensor from a list of numbers, which is how class weights are written."""
    if not isinstance(numbers, list):
        raise ValueError(f"{numbers!r} is not a list of numbers")
    return torch.tensor(numbers, dtype=torch.get_default_dtype())


register_type(torch.Tensor, serializer=torch.Tensor.tolist, deserializer=tensor_of, fail_already_registered=False)


def load_strictly(text: str) -> Any:
    """Parse YAML. Raises :class:`yaml.YAMLError` for duplicate keys."""
    if ":" in text:
        yaml.compose(text, Loader=StrictLoader)
    return get_loader("yaml")(text)


def dump(content: Any) -> str:
    """A configuration in YAML. Enumeration members, which are defaults of some Lightning options, are written as text."""
    return yaml.dump(content, Dumper=Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False)


class Dumper(yaml.SafeDumper):
    """PyYAML's dumper with support for enumerations and kinds of text."""


Dumper.add_multi_representer(Enum, lambda dumper, member: dumper.represent_str(str(member.value)))
Dumper.add_multi_representer(str, lambda dumper, text: dumper.represent_str(str.__str__(text)))  # of a member its value, too

set_loader(MODE, load_strictly, (yaml.YAMLError,))
set_dumper(MODE, dump)


class Parser(LightningArgumentParser):
    """Lightning's parser with short messages and its own help.

    Attributes:
        refused: options that exist only to say what to set instead.
        topic: topic of the help to print.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.refused: set[str] = set()
        self.topic = "short"
        super().__init__(*args, **kwargs | {"add_help": False})
        self.add_argument("-h", "--help", action=HelpAction)

    def parse_args(self, args: Any = None, *more: Any, **options: Any) -> Any:
        """Parse arguments. jsonargparse passes on the null of an option of a network or an optimizer as the text None."""
        return super().parse_args(args and [self._with_null(arg) for arg in args], *more, **options)

    def _with_null(self, arg: Any) -> Any:
        name, _, value = arg.partition("=") if isinstance(arg, str) else ("", "", "")
        outer, dot, _ = name.partition(".")
        hint = getattr(self._option_string_actions.get(outer), "_typehint", None)
        return f"{name}=null" if dot and value == "None" and "Callable" in str(hint) else arg

    def add_class_arguments(self, theclass: type, *args: Any, **kwargs: Any) -> Any:
        """Add the options of a constructor, under its class's first paragraph, of which jsonargparse takes the first line."""
        before = len(self._action_groups)
        added = super().add_class_arguments(theclass, *args, **kwargs)
        summary = (inspect.getdoc(theclass) or "").partition("\n\n")[0].removesuffix(".")
        for group in self._action_groups[before:]:
            if group.title and summary.startswith(group.title):
                group.title = summary
        return added

    def format_help(self, formatter: Any = None) -> str:
        """The help as text for the terminal; other formatters are not used."""
        options = described(self, known, self.refused)
        if str(self.description).startswith("Help for --"):  # jsonargparse's, of --model.help
            return page_of_class(options)
        return page(str(self.prog).replace("[options] ", ""), plain(self.description or ""), options, self.topic)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print one line and exit with code 2."""
        if not self.exit_on_error:
            super().error(message, ex)
        verb = str(self.prog).partition(" ")[2].rpartition(" ")[2] or "fit"  # of lightning-fed [options] VERB
        print_error(without_value(message, self.args) or shorten(message, self.options, verb))
        self.exit(2)
        raise AssertionError  # exit does not return

    @property
    def options(self) -> list[str]:
        """Names of the verb's options, such as ``federation.rounds``."""
        verbs = self._subcommands_action
        parsers = [self] if verbs is None else [self, *verbs._name_parser_map.values()]
        return [option[2:] for parser in parsers for option in parser._option_string_actions if option.startswith("--")]


def without_value(message: str, given: Sequence[str]) -> str:
    """The error for an option without its value, as the option was written: argparse names only the option that stands for it, such
    as ``--model`` for ``--model.epochs``. Empty for other messages.
    """
    if not (wanting := re.match(r"argument (?:.*/)?(--\S+): expected one argument", message)):
        return ""
    pairs = pairwise([*given, "--"])
    options = [one for one, next in pairs if one.startswith("-") and "=" not in one and next.startswith("-")]
    option = next((one for one in options if one == wanting[1] or one.startswith(f"{wanting[1]}.")), wanting[1])
    return f"{option} has no value: write {option}=VALUE."


def refuse_broken_files(args: Sequence[str]) -> None:
    """Read the files that ``--config`` names, so that errors name the file and the line."""
    for place, arg in enumerate(args):
        option, equals, value = arg.partition("=")
        if option in ("--config", "-c"):
            named = value if equals else next(iter(args[place + 1 :]), "")
            if named and not is_yaml(named):
                content = read_yaml(found(named))
                if {"base", "methods"} <= content.keys():
                    raise FederationError(f"{named} is a comparison of methods: run it with lightning-fed sweep --config {named}")
                for block in ("trainer", "federation"):  # the parser would silently skip invalid ones
                    if not isinstance(given := content.get(block), Mapping | str | None):
                        raise FederationError(f"{named}: {block} is {given!r}, expected options by name.")
