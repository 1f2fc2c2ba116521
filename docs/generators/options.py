"""The configuration reference, read from the parsers of the command line: every option with its type, its default and its help."""

import argparse
import importlib
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jsonargparse import ArgumentParser

from generators.gallery import markdown
from lightning_fed.callbacks import FederationCallback
from lightning_fed.cli import OF_FEDERATION as VERBS
from lightning_fed.cli.all_parsers import parsers
from lightning_fed.cli.trainer import REFUSED
from lightning_fed.core.module import FederatedModule
from lightning_fed.data import FederatedDataModule, Partitioner
from lightning_fed.engines import Engine
from lightning_fed.models import Backbone

CLASSES = {
    "methods": ("methods", FederatedModule),
    "data": ("data", FederatedDataModule),
    "partitions": ("data", Partitioner),
    "networks": ("models", Backbone),
    "engines": ("engines", Engine),
    "callbacks": ("callbacks", FederationCallback),
}
"""What a section lists: the classes of a public package that have a common base."""

BLOCKS = {"": "General", "data": "`data`", "model": "`model`", "federation": "`federation`", "trainer": "`trainer`"}
"""Of a verb, in the order in which one needs them."""


def section(what: str) -> str:
    """The Markdown of ``commands`` or of a key of :data:`CLASSES`."""
    return commands() if what == "commands" else classes(*CLASSES[what])


# ---------------------------------------------------------------------------------------------------------------- commands


def commands() -> str:
    """Every verb with its options: those of training in full, of the others what differs."""
    parts, known = [], set[str]()
    for verb, parser in parsers().items():
        found = [action for action in shown(parser) if name_of(action) not in known]
        parts.append(f"## lightning-fed {verb}\n\n{markdown(parser.description or '')}")
        if verb in VERBS and verb != VERBS[0]:
            parts.append(f"The options of [`{VERBS[0]}`](#lightning-fed-{VERBS[0]}), and:" if found else "The same options.")
        for block in BLOCKS:
            if rows := [action for action in found if block_of(action) == block]:
                parts.append(f"### {BLOCKS[block]} of {verb}" if verb == VERBS[0] else "")
                parts.append(listed(rows))
        if verb in VERBS:
            known |= {name_of(action) for action in found}
    return "\n\n".join(part for part in parts if part)


def block_of(action: argparse.Action) -> str:
    """The block of the configuration that an option is in."""
    first = name_of(action).removeprefix("--").split(".")[0]
    return first if first in BLOCKS else ""


# ----------------------------------------------------------------------------------------------------------------- classes


def classes(package: str, base: type) -> str:
    """Every class of a package that a configuration can name: first the options that all have, then those of each."""
    everywhere = {facts(action) for action in shown(parser_for(base))}
    parts = [f"## Options of all\n\n{listed(shown(parser_for(base)))}"] if everywhere else []
    for cls in named(package, base):
        own = [action for action in shown(parser_for(cls)) if facts(action) not in everywhere]
        doc = inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0]
        parts += [f"## {cls.__name__}", markdown(doc), listed(own) if own else "No options of its own."]
    return "\n\n".join(parts)


def named(package: str, base: type) -> list[type]:
    """The public classes of a package below a base, by name; abstract ones cannot be configured."""
    home = importlib.import_module(f"lightning_fed.{package}")
    found = [getattr(home, name) for name in home.__all__]
    found = [one for one in found if isinstance(one, type) and issubclass(one, base) and one is not base]
    return sorted((one for one in found if not inspect.isabstract(one)), key=lambda one: one.__name__.lower())


def parser_for(cls: type) -> ArgumentParser:
    """A parser with the arguments of a constructor."""
    parser = ArgumentParser()
    parser.add_class_arguments(cls, None, fail_untyped=False)
    return parser


# ----------------------------------------------------------------------------------------------------------------- options


def shown(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The options of a parser; not those that print help, nor whole blocks as files, nor what is taken from another option."""
    for action in parser._actions:
        kind = type(action).__name__
        if kind not in {
            "_HelpAction",
            "HelpAction",
            "_ActionHelpClassPath",
            "_ActionConfigLoad",
            "ActionLink",
            "_ActionSubCommands",
        }:
            yield action


def name_of(action: argparse.Action) -> str:
    """As it is written on the command line."""
    return next((name for name in action.option_strings if name.startswith("--")), action.metavar or action.dest)


def facts(action: argparse.Action) -> tuple[str, str, str, str]:
    """Name, type, default and help."""
    name = name_of(action)
    remedy = REFUSED.get(name.removeprefix("--trainer."))
    text = f"Refused: {remedy}." if name.startswith("--trainer.") and remedy else action.help or ""
    return name, kind_of(action), default_of(action), markdown(text)


def kind_of(action: argparse.Action) -> str:
    """The type of an option's value."""
    if hint := getattr(action, "_typehint", None):
        return written(hint)
    if action.choices:
        return " | ".join(repr(choice) for choice in action.choices)
    if action.nargs == 0:
        return "flag"
    return getattr(action.type, "__name__", "str")


def default_of(action: argparse.Action) -> str:
    """The default of an option, as a configuration has it."""
    if action.default in (None, argparse.SUPPRESS):
        return ""
    if isinstance(action.default, bool):
        return str(action.default).lower()
    return str(action.default)


def written(hint: Any) -> str:
    """A type as one reads it: without modules, and a function that builds something as what it builds."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(dict.fromkeys(written(one) for one in args))
    if origin is typing.Literal:
        return " | ".join(repr(one) for one in args)
    if origin is Callable or hint is Callable:
        return written(args[1]) if args and args[1] is not Any else "function"
    if origin is typing.Annotated:
        return written(args[0])
    if args:
        return f"{getattr(origin, '__name__', origin)}[{', '.join(written(one) for one in args)}]"
    return "None" if hint in (None, type(None)) else "…" if hint is ... else getattr(hint, "__name__", str(hint))


def listed(found: Iterable[argparse.Action]) -> str:
    """Options as a list of definitions: name, type and default, and below them what it means."""
    parts = []
    for name, kind, default, text in map(facts, found):
        given = f", default `{default}`" if default else ""
        parts.append(f"`{name}` (`{kind}`{given})\n: {text or '–'}")
    return "\n\n".join(parts)
