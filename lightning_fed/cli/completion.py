"""The verb ``completion``: the line that enables completion in a shell, and the answers to the shell."""

import os
import shlex
from collections.abc import Iterator, Sequence

from lightning_fed.cli import SUBCOMMANDS
from lightning_fed.cli.help.option_index import OptionIndex, chosen, plain_name
from lightning_fed.cli.options import Options, say
from lightning_fed.cli.quick_help import index
from lightning_fed.experiments.configs import SWEEP, shipped

TEXT = "Print the line that lets a shell complete verbs, options, methods and configurations."

ASK = 'complete -o default -C "lightning-fed completion" lightning-fed'
"""For bash: call this verb for each completion, which adds nothing to the shell's start; complete files if it has no answer."""


def run(args: Sequence[str]) -> None:
    """Answer a shell, which passes the line in environment variables; otherwise print how to enable completion."""
    line = os.environ.get("COMP_LINE")
    if line is None:
        Options("completion", TEXT).parse_args(args[1:])
        index()  # so that the first answer is as fast as later ones
        zsh = f"autoload -U compinit bashcompinit; compinit; bashcompinit; {ASK}"
        say(["# bash, in ~/.bashrc:", ASK, "# zsh, in ~/.zshrc:", zsh])
        return
    typed = line[: int(os.environ.get("COMP_POINT", len(line)))]
    name, equals, _ = typed.split(" ")[-1].rpartition("=")
    begun = "" if args[1:] else name + equals  # bash passes a word, and divides words at =; zsh does neither
    say(begun + answer for answer in answers(words(typed), index()))


def words(typed: str) -> list[str]:
    """The words of a line up to the cursor; the last word is to be completed. ``--name=value`` counts as two words."""
    split = shlex.shlex(typed, posix=True, punctuation_chars="=")
    split.whitespace_split, split.commenters = True, ""
    try:
        found = [word for word in split if word != "="]
    except ValueError:  # no completion within quotes
        return []
    return found if typed[-1:].strip(" =") else [*found, ""]


def answers(typed: Sequence[str], known: OptionIndex) -> list[str]:
    """The completions of the last word of a line, whose first is ``lightning-fed``."""
    if len(typed) < 2:
        return []
    *before, current = typed
    return sorted({answer for answer in _candidates(before[1:], current, known) if answer.startswith(current)})


def _candidates(before: Sequence[str], current: str, known: OptionIndex) -> Iterator[str]:
    """All words that may stand in the place of the last word."""
    if not before:
        yield from SUBCOMMANDS
        return
    verb, *given = ("--config" if word == "-c" else word for word in before)
    if verb not in known.verbs:
        return
    options = known.options(verb, chosen(given))
    last = options.get(plain_name(given[-1])) if given and given[-1].startswith("--") else None
    if verb == "configs" or (last and last.name == "config"):
        yield from (name for name in shipped() if verb != "sweep" or name.endswith(SWEEP))
    elif last and last.value and not current.startswith("-"):
        yield from [*last.choices, *last.classes]
    else:
        of_classes = [name for name, option in options.items() if option.classes] if ".init_args." in current else []
        for name in options:
            yield "--" + _in_file(name, of_classes)


def _in_file(name: str, of_classes: Sequence[str]) -> str:
    """An option's name as in a configuration: options of a class are below ``init_args``."""
    for outer in sorted(of_classes, key=len, reverse=True):
        if name.startswith(f"{outer}.") and not name.endswith(".help"):
            name = f"{outer}.init_args.{name.removeprefix(f'{outer}.')}"
    return name
