"""The command ``lightning-fed``."""

import argparse
import atexit
import errno
import gc
import io
import os
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module

from lightning_fed import __version__
from lightning_fed.cli import OF_FEDERATION, SUBCOMMANDS
from lightning_fed.system.streams import open_closed_streams

DESCRIPTION = "Federated learning on PyTorch Lightning: personalized, model-heterogeneous, low-rank."
EXAMPLES = """examples:
  lightning-fed fit --config quickstart
  lightning-fed fit --config quickstart --federation.rounds=3 --model Standalone
  lightning-fed fit --config quickstart --ckpt_path last    continue a stopped run
  lightning-fed test --config quickstart                    evaluate the newest run
  lightning-fed test --config quickstart --ckpt_path best   of the round best on validation data
  lightning-fed export --config quickstart --client 3 --output client-3
  lightning-fed configs feddecomp/cifar10 > my.yaml         a configuration to change
  lightning-fed sweep --config quickstart --workers 2       compare methods and seeds
  lightning-fed report runs/quickstart-sweep --output report
  lightning-fed fit --help                                  the options of a verb
  lightning-fed fit --model.help PFedLoRA                   the options of a method
"""
NOT_READABLE = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
"""Errors of the operating system about a path that cannot be used, wherever it was given."""

NO_MEMORY = ("can't allocate memory", "out of memory")
"""Messages of torch when memory is exhausted."""


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line. Errors that the user can correct are one line on standard error, with exit code 2."""
    is_program, args = args is None, list(sys.argv[1:] if args is None else args)
    if is_program:
        open_closed_streams()
        atexit.register(gc.freeze)  # the interpreter's last collection would walk through all of torch for a second
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # an arrow is no reason to end a run where only ASCII can be printed
    if not args or args[0] in ("-h", "--help", "--version"):
        _overview().parse_args(args or ["--help"])  # prints and exits, without waiting for torch

    from lightning_fed.cli.options import say
    from lightning_fed.cli.quick_help import quick_help
    from lightning_fed.errors import FederationError, one_line, print_error
    from lightning_fed.formatting import nearest
    from lightning_fed.system.logs import lines_shown
    from lightning_fed.system.signals import Preempted, Terminated

    try:
        if not args[0].startswith("-") and args[0] not in SUBCOMMANDS:
            question = nearest(args[0], SUBCOMMANDS)
            raise FederationError(f"there is no command {args[0]!r}{question}; there are {', '.join(SUBCOMMANDS)}.")
        if is_program and args[0] in OF_FEDERATION and (text := quick_help(args)):
            say([text.removesuffix("\n")])
            return
        with lines_shown():
            run_verb(args)
    except FederationError as error:
        print_error(str(error))
        raise SystemExit(2) from None
    except OSError as error:
        if not isinstance(error.filename, str | bytes) or error.errno not in NOT_READABLE:
            raise
        print_error(f"{os.fsdecode(error.filename):.200}: {error.strerror}.")
        raise SystemExit(2) from None
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(said in str(error).lower() for said in NO_MEMORY):
            raise
        print_error(f"out of memory ({one_line(error):.200}): make images, batches or networks smaller.")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print(f"lightning-fed: interrupted.{how_to_continue(args)}", file=sys.stderr)
        raise SystemExit(130) from None
    except Terminated:
        print(f"lightning-fed: terminated (SIGTERM).{how_to_continue(args)}", file=sys.stderr)
        raise
    except Preempted:
        print(f"lightning-fed: stopped at a checkpoint (SIGUSR1).{how_to_continue(args)}", file=sys.stderr)
        raise


def run_verb(args: Sequence[str]) -> None:
    """Run the verb of a command line."""
    own = args[0] in SUBCOMMANDS.keys() - set(OF_FEDERATION)
    if not own and sys.stderr.isatty():  # a moment in which nothing else can be said
        print("Loading PyTorch and Lightning…", file=sys.stderr)
    import_module(f"lightning_fed.cli.{args[0] if own else 'fit'}").run(args)


def how_to_continue(args: Sequence[str]) -> str:
    """The command that goes on with what these arguments began; nothing for a verb that leaves nothing behind."""
    if args[0] == "sweep":
        return f" Go on with: {shlex.join(['lightning-fed', *args])}"
    if args[0] != "fit":
        return ""
    checkpoint = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    checkpoint.add_argument("--ckpt_path", nargs="?")
    others = checkpoint.parse_known_args(args)[1]  # without where it went on from itself
    return f" Continue with: {shlex.join(['lightning-fed', *others, '--ckpt_path', 'last'])}"


def _overview() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lightning-fed", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"lightning-fed {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="{" + ",".join(SUBCOMMANDS) + "}")
    for name, text in SUBCOMMANDS.items():
        commands.add_parser(name, help=text)
    return parser


if __name__ == "__main__":
    main()
