"""The parsers of all verbs and classes, for lists of their options."""

import argparse
from typing import Any

from lightning_fed.cli import configs, join, report, runs, serve, sweep
from lightning_fed.cli.dry_run import ParseOnly
from lightning_fed.cli.help.option_index import OptionIndex
from lightning_fed.cli.help.page import Option, described, plain
from lightning_fed.cli.parser import Parser
from lightning_fed.cli.refusals import HOMES, known

PLAIN = {module.__name__.rpartition(".")[2]: module.parser for module in (configs, sweep, runs, report, serve, join)}
"""Verbs whose parsers are plain argparse ones."""


class Parsers(ParseOnly):
    """The parsers of the other verbs; parses nothing."""

    config: Any = {"subcommand": None}  # noqa: RUF012 - never modified

    def parse_arguments(self, parser: Any, args: Any) -> None: ...

    def _parse_ckpt_path(self) -> None: ...


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of each verb, with all its options."""
    return dict(Parsers([])._subcommand_parsers) | {name: make() for name, make in PLAIN.items()}


def index() -> OptionIndex:
    """The index of the options of all verbs and classes."""
    verbs = parsers()
    return OptionIndex(
        texts={name: plain(parser.description or "") for name, parser in verbs.items()},
        verbs={name: described(parser, known, getattr(parser, "refused", ())) for name, parser in verbs.items()},
        classes={key: {name: options_of(getattr(home, name)) for name in known(key)} for key, (home, _) in HOMES.items()},
    )


def options_of(cls: type) -> list[Option]:
    """The options of a constructor."""
    parser = Parser()
    parser.add_class_arguments(cls, None)
    return [option for option in described(parser, known) if option.name != "help"]
