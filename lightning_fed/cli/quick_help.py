"""Command lines that the index of options answers, without waiting for torch."""

import sys
from collections.abc import Sequence

from lightning_fed.cli.help.option_index import OptionIndex, read, write
from lightning_fed.cli.help.page import BLOCKS, TOPICS, page, page_of_class
from lightning_fed.cli.help.unknown_options import unknown
from lightning_fed.errors import FederationError


def index() -> OptionIndex:
    """The index of this installation. Creating it takes seconds, once, because it needs the parsers."""
    if known := read():
        return known
    if sys.stderr.isatty():
        print("Loading PyTorch and Lightning, to look up all options; this happens only once…", file=sys.stderr)
    from lightning_fed.cli import all_parsers

    made = all_parsers.index()
    write(made)
    return made


def quick_help(args: Sequence[str]) -> str:
    """The help that a command line asks for: of a verb of Federation, of a topic, or of one of the library's classes; empty if it
    asks for something else.

    Args:
        args: arguments of the command line, starting with one of these verbs.

    Raises:
        FederationError: for an unknown option, if the index exists.
    """
    match args:
        case [verb, ("-h" | "--help")]:
            return _page(index(), verb, "short")
        case [verb, ("-h" | "--help"), topic] if topic in TOPICS:
            return _page(index(), verb, topic)
        case [verb, option, name] if option.startswith("--") and option.endswith(".help"):
            return _page_of_class(index(), verb, option[2:].removesuffix(".help"), name)
    if known := read():
        refuse_unknown(args, known)
    return ""


def _page(known: OptionIndex, verb: str, topic: str) -> str:
    return page(f"lightning-fed {verb}", known.texts[verb], known.verbs[verb], topic)


def _page_of_class(known: OptionIndex, verb: str, option: str, name: str) -> str:
    """The help of a class; empty unless it is one of the library's classes for which the verb has an option."""
    if all(found.name != f"{option}.help" for found in known.verbs[verb]):
        return ""
    own = known.classes.get(option.rpartition(".")[2], {}).get(name)
    return page_of_class([found.under(option) for found in own]) if own else ""


def refuse_unknown(args: Sequence[str], known: OptionIndex) -> None:
    """Raises a FederationError for options that start like no known option, and for unknown ones of the federation. Those within
    other blocks depend on the block's class.
    """
    names = [option.name for option in known.verbs[args[0]]]
    roots = {*BLOCKS, *(name.partition(".")[0] for name in names)}
    for arg in args[1:]:
        option = arg.removeprefix("--").partition("=")[0]
        root, *within = option.split(".")
        of_federation = root != "federation" or not within or f"{root}.{within[0].removesuffix('+')}" in names
        if arg.startswith("--") and not (root in roots and of_federation):
            raise FederationError(unknown(f"unrecognized arguments: {arg}", option, names, args[0]))
