"""What ``--help`` prints: the options that one needs, in words for the terminal; the others where they are asked for."""

import argparse
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

SHORT = {
    *("config", "seed_everything", "model", "data", "ckpt_path", "output", "client", "merged", "format"),
    *(f"federation.{name}" for name in ("rounds", "participation", "evaluate_every", "run_dir", "keep", "logger", "engine")),
    *("trainer.accelerator", "trainer.precision", "trainer.limit_train_batches"),
}
"""What one needs."""

BLOCKS = {
    "model": "The method and its networks",
    "data": "Who holds what",
    "federation": "Rounds, participation, where runs go",
    "trainer": "What each client's Trainer gets",
}
"""The blocks of a configuration, in the order of the documentation."""

TOPICS = ("all", *BLOCKS)

INSTEAD = {
    "config": "a YAML file, or a name that lightning-fed configs lists; later ones go over earlier ones",
    "ckpt_path": "which round: last, best on validation data, or the folder of a run or of one checkpoint",
    "seed_everything": "seed of everything random",
    "print_config": "print the configuration that all of this makes, and exit",
    "model": "the method",
    "data": "the data and their clients",
    "federation": "a YAML file with this block",
    "trainer": "a YAML file with this block",
    "trainer.accelerator": "auto, cpu, gpu, or another of Lightning's",
    "trainer.precision": "32-true, bf16-mixed, or another of Lightning's",
    "trainer.limit_train_batches": "so many batches of an epoch (int), or this share of them (float)",
}
"""What is said here, where an option has no words or those of somebody else."""


class HelpAction(argparse._HelpAction):
    """``--help``, or ``--help TOPIC``."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, help="this; all options, or those of a block")
        self.nargs, self.choices, self.metavar = "?", TOPICS, "TOPIC"

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Print it."""
        parser.topic = values or "short"
        parser.print_help()
        parser.exit()


def page(parser: Any, topic: str, known: Callable[..., Sequence[str]]) -> str:
    """The help of a verb, or of a class (``--model.help FedAvg``).

    Args:
        parser: jsonargparse's.
        topic: ``short``, ``all`` or a block.
        known: names of the library's classes that an option takes.
    """
    width = min(shutil.get_terminal_size().columns, 100)
    of_class = str(parser.description).startswith("Help for --")
    verb = str(parser.prog).replace("[options] ", "")
    lines = [] if of_class else [f"usage: {verb} [--config NAME_OR_FILE] [options]", "", plain(parser.description or ""), ""]
    for title, actions in groups(parser, topic, of_class):
        block = [row for action in actions for row in rows(action, known, of_class or topic != "short", width)]
        lines += [*textwrap.wrap(f"{title}:", width), *block, ""] if block else []
    return "\n".join([*lines, *([] if of_class else hints(verb)), ""])


def groups(parser: Any, topic: str, of_class: bool) -> Iterator[tuple[str, list[Any]]]:
    """Titles, and the options below them."""
    shown = [action for action in parser._actions if of_class or wanted(action, topic, parser.refused)]
    if of_class:
        for group in parser._action_groups:
            yield plain(group.title or "options"), [action for action in group._group_actions if action in shown]
        return
    yield "options", [action for action in shown if action.dest.partition(".")[0] not in BLOCKS]
    for block, title in BLOCKS.items():
        yield title, [action for action in shown if action.dest.partition(".")[0] == block]


def wanted(action: Any, topic: str, refused: set[str]) -> bool:
    """Whether a topic has an option."""
    name = action.dest.removesuffix(".help")
    if not any(option.startswith("-") for option in action.option_strings) or action.help == argparse.SUPPRESS or name in refused:
        return False
    if topic == "short":
        return action.dest in SHORT | {"help", "print_config", "model.help", "data.help"}
    return topic == "all" or name.partition(".")[0] == topic


def rows(action: Any, known: Callable[..., Sequence[str]], full: bool, width: int) -> list[str]:
    """An option as it stands on the screen."""
    name = max(action.option_strings, key=len) if action.dest != "help" else "-h, --help"
    name = name.removesuffix("+")
    value = "" if action.nargs == 0 else f" {metavar(action)}"
    text = textwrap.wrap(words(action, known, full), width - 26)
    head = f"  {name}{value}"
    if len(head) <= 24 and text:
        head, text = f"{head:<26}{text[0]}", text[1:]
    return [head, *(f"{'':26}{line}" for line in text)]


def metavar(action: Any) -> str:
    """What stands for the value."""
    if action.dest.endswith(".help") or action.dest in BLOCKS:
        return "NAME"
    if (choices := action.choices or choices_of(getattr(action, "_typehint", None))) and len(choices) < 6:
        return "{" + ",".join(map(spelled, choices)) + "}"
    return str(action.metavar or action.dest.rpartition(".")[2].upper())


def choices_of(hint: Any) -> Sequence[Any]:
    """What a value may be, if that is a list of words."""
    if hint is bool:
        return (False, True)
    return hint.__args__ if getattr(hint, "__origin__", None) is Literal else ()


def words(action: Any, known: Callable[..., Sequence[str]], full: bool) -> str:
    """What an option is for: in short its first sentence."""
    if action.dest.endswith(".help"):
        return "the options of one of these" if known(action.dest.split(".")[-2]) else "the options of a class"
    text = plain(INSTEAD.get(action.dest) or action.help or "")
    if not full:
        text = re.split(r"[.;:] |, in which|, and after the last", text)[0].removesuffix(".")
    names = known(action.dest.rpartition(".")[2], getattr(action, "_typehint", None))
    text = text.removesuffix(".") if names else text
    default = None if callable(action.default) else action.default
    notes = [f"default: {spelled(default)}"] if default not in (None, argparse.SUPPRESS) else []
    return text + (f"; of these: {', '.join(names)}" if names else "") + (f" ({'; '.join(notes)})" if notes else "")


def spelled(value: Any) -> str:
    """As one would write it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return getattr(value, "__qualname__", None) or str(value)


def plain(text: str) -> str:
    """Without the marks of reStructuredText, and with values as the command line takes them."""
    text = re.sub(r"(; see|\bSee) :\w+:`[^`]*`\.?", "", text)
    text = re.sub(r":\w+:`(?:[^`<]*<)?[~.]?([^`>]*)>?`", lambda found: found[1].rpartition(".")[2], " ".join(text.split()))
    text = re.sub(r"`([^`<]+) <[^`>]+>`_+", r"\1", text).replace("``", "").replace("`", "")
    return re.sub(r"\b(None|True|False)\b", lambda found: {"None": "null"}.get(found[1], found[1].lower()), text)


def hints(verb: str) -> list[str]:
    """Where there is more."""
    name = verb.split()[-1]
    more = {
        f"{verb} --help all": "all options; data: of a block",
        f"{verb} --model.help PFedLoRA": "the options of a method",
        f"{verb} --data.help CIFAR10": "the options of a data set",
        "lightning-fed configs": "configurations to start from",
        f"LIGHTNING_FED_{name.upper()}__FEDERATION__ROUNDS=3": "as a variable",
    }
    return ["more:", *(f"  {command:<43} {text}" for command, text in more.items())]
