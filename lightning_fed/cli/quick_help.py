"""Command lines that the index of options answers, without waiting for torch."""

import sys
from collections.abc import Sequence

from lightning_fed.cli.help.option_index import OptionIndex, chosen, plain_name, read, write
from lightning_fed.cli.help.page import BLOCKS, TOPICS, page, page_of_class
from lightning_fed.cli.help.unknown_options import meant, unknown, where_to_look
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
    """The help that a command line asks for, whose first argument is a verb of Federation: of the verb, of a topic, or of one of
    the library's classes; empty if it asks for something else. Raises :class:`FederationError` for an unknown option, if the index
    exists.
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
    """Raises a FederationError for options that start like no known option, and for those that the federation, or a class of the
    library that is given on the line or in a configuration, does not have.
    """
    verb, *rest = args
    names = [option.name for option in known.verbs[verb]]
    roots = {*BLOCKS, *(name.partition(".")[0] for name in names)}
    given = [word for arg in rest for word in (arg.split("=", 1) if arg.startswith("--") else (arg,))]
    classes = chosen(["--config" if word == "-c" else word for word in given])
    options = known.options(verb, classes)
    # Where all options are known. Some of the Trainer's, which are refused with a reason, are not listed.
    within = {name.rpartition(".")[0] for name in options if not name.endswith(".help")} - {"", "trainer"}
    for arg in rest:
        if not arg.startswith("--"):
            continue
        option = arg[2:].partition("=")[0]
        parts = plain_name(option).removesuffix("+").split(".")
        place = next((k for k in range(len(parts) - 1, 0, -1) if ".".join(parts[:k]) in options), 0)
        outer, name = ".".join(parts[:place]), parts[place]
        has_not = outer in within and f"{outer}.{name}" not in options and name not in ("class_path", "init_args", "help")
        if parts[0] not in roots or (has_not and outer == "federation"):
            raise FederationError(unknown(f"unrecognized arguments: {arg}", option, names, verb))
        if has_not:
            siblings = [one.rpartition(".")[2] for one in options if one.rpartition(".")[0] == outer]
            more = where_to_look(outer, classes[outer] if "." not in outer else "", verb)
            text = f"{outer}: Option {name!r} is not accepted by {classes[outer]}{meant(name, siblings)}; {more}"
            raise FederationError(text)
