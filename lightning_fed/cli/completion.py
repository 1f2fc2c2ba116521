"""The verb ``completion``: the line that makes a shell ask for completions, and the answers."""

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from lightning_fed.cli import SUBCOMMANDS
from lightning_fed.cli.help.option_index import OptionIndex
from lightning_fed.cli.options import Options, say
from lightning_fed.cli.quick_help import index
from lightning_fed.errors import FederationError
from lightning_fed.experiments.configs import SWEEP, shipped
from lightning_fed.experiments.sweep.settings import flat, read_yaml

TEXT = "Say which line lets a shell complete verbs, options, methods and configurations."

ASK = 'complete -o default -C "lightning-fed completion" lightning-fed'
"""Of bash: whenever somebody completes, ask this verb, which costs the shell's start nothing; files, where it answers nothing."""


def run(args: Sequence[str]) -> None:
    """Answer a shell, which hands on the line by variables of the environment; else say how it is made to ask."""
    line = os.environ.get("COMP_LINE")
    if line is None:
        Options("completion", TEXT).parse_args(args[1:])
        index()  # so that the first answer is as quick as all others
        zsh = f"autoload -U compinit bashcompinit; compinit; bashcompinit; {ASK}"
        say(["# bash, in ~/.bashrc:", ASK, "# zsh, in ~/.zshrc:", zsh])
        return
    typed = line[: int(os.environ.get("COMP_POINT", len(line)))]
    say(answers(words(typed), index()))


def words(typed: str) -> list[str]:
    """What stands on a line up to the cursor; the last word is the one that is completed. ``--name=value`` is two words."""
    split = shlex.shlex(typed, posix=True, punctuation_chars="=")
    split.whitespace_split, split.commenters = True, ""
    try:
        found = [word for word in split if word != "="]
    except ValueError:  # within quotes nothing is completed
        return []
    return found if typed[-1:].strip(" =") else [*found, ""]


def answers(typed: Sequence[str], known: OptionIndex) -> list[str]:
    """How the last word may go on.

    Args:
        typed: the line's words, ``lightning-fed`` first.
        known: what can be set.
    """
    if len(typed) < 2:
        return []
    *before, current = typed
    return sorted({answer for answer in _candidates(before[1:], current, known) if answer.startswith(current)})


def _candidates(before: Sequence[str], current: str, known: OptionIndex) -> Iterator[str]:
    """What may stand in the place of the last word, whatever it begins with."""
    if not before:
        yield from SUBCOMMANDS
        return
    verb, *given = ("--config" if word == "-c" else word for word in before)
    if verb not in known.verbs:
        return
    options = known.options(verb, _chosen(given))
    last = options.get(_plain_name(given[-1])) if given and given[-1].startswith("--") else None
    if verb == "configs" or (last and last.name == "config"):
        yield from (name for name in shipped() if verb != "sweep" or name.endswith(SWEEP))
    elif last and last.value and not current.startswith("-"):
        yield from [*last.choices, *last.classes]
    else:
        of_classes = [name for name, option in options.items() if option.classes] if ".init_args." in current else []
        for name in options:
            yield "--" + _in_file(name, of_classes)


def _chosen(given: Sequence[str]) -> dict[str, str]:
    """The values of options: of the configurations that are named, and, over them, of the line."""
    pairs = [(_plain_name(name), value) for name, value in pairwise(given) if name.startswith("--")]
    chosen: dict[str, str] = {}
    for name, value in pairs:
        if name == "config":
            path = shipped().get(value, Path(value).expanduser())
            with suppress(FederationError):  # what is wrong with the file is said when it is used
                chosen |= {key.removesuffix(".class_path"): str(value) for key, value in flat(read_yaml(path)).items()}
    return chosen | dict(pairs)


def _in_file(name: str, of_classes: Sequence[str]) -> str:
    """An option's name as in a configuration: what belongs to a class is below ``init_args``."""
    for outer in sorted(of_classes, key=len, reverse=True):
        if name.startswith(f"{outer}.") and not name.endswith(".help"):
            name = f"{outer}.init_args.{name.removeprefix(f'{outer}.')}"
    return name


def _plain_name(flag: str) -> str:
    """An option's name as in the index."""
    return flag.removeprefix("--").replace(".init_args", "")
