"""The command ``lightning-fed``."""

import argparse
import sys
from collections.abc import Sequence

from lightning_fed import __version__

DESCRIPTION = "Federated learning on PyTorch Lightning: personalised, model-heterogeneous, low-rank."
EXAMPLES = """examples:
  lightning-fed fit --config configs/quickstart.yaml
  lightning-fed fit --config configs/quickstart.yaml --federation.rounds=3 --model Standalone
  lightning-fed fit --config configs/quickstart.yaml --ckpt_path last     continue a stopped run
  lightning-fed test --config configs/quickstart.yaml                     measure the newest run
  lightning-fed test --config configs/quickstart.yaml --ckpt_path best    where it was best on validation data
  lightning-fed export --config configs/quickstart.yaml --client 3 --output client-3
  lightning-fed sweep --config configs/quickstart.sweep.yaml --workers 2  a comparison: methods and seeds
  lightning-fed report runs/quickstart-sweep --output report              its tables and pictures
  lightning-fed fit --help                                                all options
  lightning-fed fit --model.help PFedLoRA                                 the options of a method
"""
NO_MEMORY = ("can't allocate memory", "out of memory")
"""What torch says where there is none."""

SUBCOMMANDS = {
    "fit": "train a federation",
    "validate": "measure a run's clients on their validation data",
    "test": "measure a run's clients on their test data",
    "export": "write a client's or the server's model for use elsewhere",
    "sweep": "play a comparison: methods, settings and seeds",
    "report": "tables and pictures of finished runs",
}


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line. Exit code 2 and one line on standard error for what the user can change."""
    args = list(sys.argv[1:] if args is None else args)
    if not args or args[0] in ("-h", "--help", "--version"):
        _overview().parse_args(args or ["--help"])  # prints and exits, without waiting for torch

    from lightning_fed.errors import FederationError
    from lightning_fed.signals import Terminated

    try:
        if args[0] == "sweep":
            from lightning_fed.cli.sweep import run
        elif args[0] == "report":
            from lightning_fed.cli.report import run
        else:
            if sys.stderr.isatty():  # a moment in which nothing else can be said
                print("Loading PyTorch and Lightning…", file=sys.stderr)
            from lightning_fed.cli.fit import run
        run(args)
    except FederationError as error:
        print(f"lightning-fed: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(said in str(error).lower() for said in NO_MEMORY):
            raise
        told = " ".join(str(error).split())
        print(f"lightning-fed: error: out of memory ({told:.200}): make images, batches or networks smaller.", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("lightning-fed: interrupted. Continue with --ckpt_path last.", file=sys.stderr)
        raise SystemExit(130) from None
    except Terminated:
        print("lightning-fed: terminated (SIGTERM). Continue with --ckpt_path last.", file=sys.stderr)
        raise


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
