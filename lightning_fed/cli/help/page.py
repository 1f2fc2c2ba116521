"""What ``--help`` prints: the most important options, described for the terminal; the others on request."""

import argparse
import re
import shutil
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

SHORT = {
    *("config", "seed_everything", "model", "data", "ckpt_path", "output", "client", "merged", "format"),
    *(f"federation.{name}" for name in ("rounds", "participation", "evaluate_every", "run_dir", "keep", "logger", "engine")),
    *("trainer.accelerator", "trainer.precision", "trainer.limit_train_batches"),
}
"""The most important options."""

BLOCKS = {
    "model": "The method and its networks",
    "data": "The data and how they are divided among clients",
    "federation": "Rounds, participation, where runs are written",
    "trainer": "Options of each client's Trainer",
}
"""The blocks of a configuration, in the order of the documentation."""

TOPICS = ("all", *BLOCKS)

INSTEAD = {
    "config": "a YAML file, or a name that lightning-fed configs lists; later ones take precedence",
    "ckpt_path": "last, best (on validation data), or the folder of a run or of one checkpoint",
    "seed_everything": "random seed of the run",
    "print_config": "print the resulting configuration and exit",
    "model": "the method",
    "data": "the data and their clients",
    "federation": "a YAML file with this block",
    "trainer": "a YAML file with this block",
    "trainer.accelerator": "auto, cpu, gpu, or another of Lightning's",
    "trainer.precision": "32-true, bf16-mixed, or another of Lightning's",
    "trainer.limit_train_batches": "train on only this many batches per epoch (int), or on this share of them (float)",
}
"""Descriptions of options that have none or a library's own."""


@dataclass(frozen=True)
class Option:
    """What help and completion need to know about an option.

    Attributes:
        name: such as ``federation.rounds``; for a class's option in the index, without the option that names the class.
        flags: all its names on the command line.
        value: placeholder of its value; empty if it takes none.
        short: first sentence of its description, and the default.
        full: its whole description.
        choices: the words that it takes, if it takes no others.
        classes: names of the library's classes that it takes.
        title: title of its group.
    """

    name: str
    flags: Sequence[str]
    value: str
    short: str
    full: str
    choices: Sequence[str]
    classes: Sequence[str]
    title: str

    def under(self, name: str) -> "Option":
        """The option of a class, under the option that names the class."""
        flags = [flag.replace("--", f"--{name}.", 1) for flag in self.flags]
        return Option(**{**vars(self), "name": f"{name}.{self.name}", "flags": flags})


class HelpAction(argparse._HelpAction):
    """``--help``, or ``--help TOPIC``."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, help="print help; all options, or those of a block")
        self.nargs, self.choices, self.metavar = "?", TOPICS, "TOPIC"

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        parser.topic = values or "short"
        parser.print_help()
        parser.exit()


def described(parser: Any, known: Callable[..., Sequence[str]], refused: Sequence[str] | set[str] = ()) -> list[Option]:
    """All options of a parser, argparse's or jsonargparse's. ``known`` returns the names of the library's classes that an option
    takes; ``refused`` are options that exist only to say what to set instead.
    """
    return [
        Option(
            name="help" if action.dest == "help" else max(action.option_strings, key=len)[2:].removesuffix("+"),
            flags=[flag.removesuffix("+") for flag in action.option_strings],
            value="" if action.nargs == 0 else metavar(action),
            short=words(action, known, full=False),
            full=words(action, known, full=True),
            choices=[spelled(choice) for choice in action.choices or choices_of(getattr(action, "_typehint", None))],
            classes=known(action.dest.removesuffix(".help").rpartition(".")[2], getattr(action, "_typehint", None)),
            title=plain(group.title or "options"),
        )
        for group in parser._action_groups
        for action in group._group_actions
        if any(option.startswith("--") for option in action.option_strings)
        and action.help != argparse.SUPPRESS
        and action.dest.removesuffix(".help") not in refused
    ]


def page(verb: str, text: str, options: Sequence[Option], topic: str) -> str:
    """The help of a verb, such as ``lightning-fed fit``, with a description and all its options. The topic is ``short``, ``all`` or
    a block.
    """
    lines = [f"usage: {verb} [--config NAME_OR_FILE] [options]", "", text, ""]
    shown = [option for option in options if wanted(option.name, topic)]
    for block, title in {"": "options", **BLOCKS}.items():
        lines += rows(title, [option for option in shown if block_of(option.name) == block], topic != "short")
    return "\n".join([*lines, *hints(verb), ""])


def page_of_class(options: Sequence[Option]) -> str:
    """The help of a class (``--model.help FedAvg``): all its options."""
    groups: dict[str, list[Option]] = {}
    for option in options:
        groups.setdefault(option.title, []).append(option)
    return "\n".join([line for title, found in groups.items() for line in rows(title, found, True)] + [""])


def wanted(name: str, topic: str) -> bool:
    """Whether an option belongs to a topic."""
    if topic == "short":
        return name in SHORT | {"help", "print_config", "model.help", "data.help"}
    return topic == "all" or name.partition(".")[0] == topic


def block_of(name: str) -> str:
    """The block of an option; empty if it is in none."""
    block = name.partition(".")[0]
    return block if block in BLOCKS else ""


def rows(title: str, options: Sequence[Option], full: bool) -> list[str]:
    """The lines of a group of options; empty if there are none."""
    width = min(shutil.get_terminal_size().columns, 100)
    lines = textwrap.wrap(f"{title}:", width)
    for option in options:
        text = textwrap.wrap(option.full if full else option.short, max(width - 26, 20))
        names = "-h, --help" if option.name == "help" else f"--{option.name}"
        head = f"  {names} {option.value}".rstrip()
        if len(head) <= 24 and text:
            head, text = f"{head:<26}{text[0]}", text[1:]
        lines += [head, *(f"{'':26}{line}" for line in text)]
    return [*lines, ""] if options else []


def metavar(action: Any) -> str:
    """The placeholder of the value."""
    if action.dest.endswith(".help") or action.dest in BLOCKS:
        return "NAME"
    if (choices := action.choices or choices_of(getattr(action, "_typehint", None))) and len(choices) < 6:
        return "{" + ",".join(map(spelled, choices)) + "}"
    return str(action.metavar or action.dest.rpartition(".")[2].upper())


def choices_of(hint: Any) -> Sequence[Any]:
    """The values of an option, if they are a list of words."""
    if hint is bool:
        return (False, True)
    return hint.__args__ if getattr(hint, "__origin__", None) is Literal else ()


def words(action: Any, known: Callable[..., Sequence[str]], full: bool) -> str:
    """The description of an option; in the short form its first sentence."""
    if action.dest.endswith(".help"):
        return "list the options of one of these" if known(action.dest.split(".")[-2]) else "list the options of a class"
    text = plain(INSTEAD.get(action.dest) or action.help or "")
    if not full:
        text = re.split(r"[.;:] |, in which|, and after the last", text)[0].removesuffix(".")
    names = known(action.dest.rpartition(".")[2], getattr(action, "_typehint", None))
    text = text.removesuffix(".") if names else text
    default = None if callable(action.default) else action.default
    said = default in (None, argparse.SUPPRESS) or "Default:" in text
    return text + (f"; of these: {', '.join(names)}" if names else "") + ("" if said else f" (default: {spelled(default)})")


def spelled(value: Any) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return getattr(value, "__qualname__", None) or str(value)


def plain(text: str) -> str:
    """Text without the markup of reStructuredText, and with values as on the command line."""
    text = re.sub(r"; see :\w+:`[^`]*`|\bSee :\w+:`[^`]*`\.?", "", text)
    text = re.sub(r":math:`([^`]*)`", lambda found: formula(found[1]), text)
    text = re.sub(r":\w+:`(?:[^`<]*<)?[~.]?([^`>]*)>?`", lambda found: found[1].rpartition(".")[2], " ".join(text.split()))
    text = re.sub(r"`([^`<]+) <[^`>]+>`_+", r"\1", text).replace("``", "").replace("`", "")
    return re.sub(r"\b(None|True|False)\b", lambda found: {"None": "null"}.get(found[1], found[1].lower()), text)


SIGNS = {
    "leftarrow": "← ", "sum": "∑ ", "nabla": "∇", "sqrt": "√", "in": "∈ ", "neq": "≠ ", "ge": "≥ ", "le": "≤ ", "top": "ᵀ",
    "lVert": "‖", "rVert": "‖", "Vert": "‖", "lfloor": "⌊", "rfloor": "⌋", "langle": "⟨", "rangle": "⟩", "bar": "mean ",
}  # fmt: skip
"""LaTeX's commands for signs."""


def formula(text: str) -> str:
    """LaTeX as it can be read in a terminal: names of letters without the backslash."""
    text = re.sub(r"\\mathrm\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"\1 / \2", text)
    text = re.sub(r"\\([A-Za-z]+) ?", lambda found: SIGNS.get(found[1], f"{found[1]} "), text)
    return re.sub(r" (?=[_^)},;:]|‖\^|$)", "", re.sub(r" +", " ", re.sub(r"\\[,;!]", " ", text).replace("\\", "")))


def hints(verb: str) -> list[str]:
    """Pointers to more help."""
    name = verb.split()[-1]
    more = {
        f"{verb} --help all": "all options (data: of one block)",
        f"{verb} --model.help PFedLoRA": "list the options of a method",
        f"{verb} --data.help CIFAR10": "list the options of a data set",
        "lightning-fed configs": "configurations to start from",
        f"LIGHTNING_FED_{name.upper()}__FEDERATION__ROUNDS=3": "set an option in the environment",
    }
    return ["more:", *(f"  {command:<43} {text}" for command, text in more.items())]
