"""The verb ``completion``: what a shell completes after ``lightning-fed``."""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

from lightning_fed.cli import configs, join, report, runs, serve, sweep
from lightning_fed.cli.dry_run import ParseOnly
from lightning_fed.cli.help import choices_of, spelled, wanted
from lightning_fed.cli.options import Options
from lightning_fed.cli.refusals import known
from lightning_fed.errors import FederationError
from lightning_fed.experiments.configs import shipped

TEXT = 'Print what a shell completes. For bash, a line in ~/.bashrc: eval "$(lightning-fed completion bash)"'

OTHERS = {module.__name__.rpartition(".")[2]: module.parser for module in (configs, sweep, runs, report, serve, join)}
"""The verbs that are plain argparse already."""

NAMES = "_lightning_fed_configs"
"""A function of the shell that completes names of configurations, and files."""


def run(args: Sequence[str]) -> None:
    """Do what the command line says."""
    options = Options("completion", TEXT)
    options.add_argument("shell", choices=("bash", "zsh"))
    shell = options.parse_args(args[1:]).shell
    if importlib.util.find_spec("shtab") is None:
        raise FederationError("Completion needs shtab: pip install shtab.")
    import shtab

    names = " ".join(shipped())
    functions = {
        "bash": f'{NAMES}() {{ compgen -W "{names}" -- "$1"; compgen -f -- "$1"; }}',
        "zsh": f"{NAMES}() {{ _alternative 'names:configuration:({names})' 'files:file:_files' }}",
    }
    sys.stdout.write(shtab.complete(tree(), shell, preamble=functions[shell]) + "\n")


class Parsers(ParseOnly):
    """The parsers of the verbs, which parse nothing."""

    config: Any = {"subcommand": None}  # noqa: RUF012 - nobody changes it

    def parse_arguments(self, parser: Any, args: Any) -> None: ...

    def _parse_ckpt_path(self) -> None: ...


def tree() -> argparse.ArgumentParser:
    """All verbs with their options as plain argparse: to look into every type, as jsonargparse would, takes minutes."""
    root = argparse.ArgumentParser("lightning-fed", description="")
    verbs = root.add_subparsers()
    for name, parser in Parsers([])._subcommand_parsers.items():
        verb = verbs.add_parser(name, help=name, add_help=False)  # shtab passes over what has no help
        for action in parser._actions:
            if wanted(action, "all", parser.refused):  # type: ignore[attr-defined]  # ours
                add(verb, action)
    for name, make in OTHERS.items():
        verb = verbs.add_parser(name, help=name, parents=[make()], add_help=False)
        for action in verb._actions:
            complete_names(action)
    return root


def add(parser: argparse.ArgumentParser, action: Any) -> None:
    """An option, and which values it has, if they are known."""
    name = action.dest.removesuffix(".help").rpartition(".")[2]
    choices = [spelled(choice) for choice in action.choices or choices_of(getattr(action, "_typehint", None)) or known(name)]
    nargs = None if choices or action.nargs is None else "?"
    added = parser.add_argument(*action.option_strings, dest=action.dest, choices=choices or None, nargs=nargs, help="")
    complete_names(added)


def complete_names(action: argparse.Action) -> None:
    """Where a configuration is meant, its name or a file."""
    if action.dest in ("config", "name"):
        action.complete = {"bash": NAMES, "zsh": NAMES}  # type: ignore[attr-defined]  # shtab looks for it
