"""The verb ``join``: a site, which keeps its data and answers a server's messages."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_fed.cli.options import Options, positive
from lightning_fed.deployment.flower import commands
from lightning_fed.errors import require

TEXT = """Take part in a study with data that stay here. Further options are those of fit; the configuration is that of the server,
but for where the data are and the trainer. docs/deployment.md begins at the beginning."""


def number(text: str) -> int:
    """A whole number from 0 on."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 on")
    return int(text)


def parser() -> Options:
    """Of the verb's own options; further ones are those of ``fit``."""
    parser = Options("join", TEXT)
    own = parser.add_argument
    own("--server", required=True, metavar="HOST:PORT", help="where the server is")
    own("--client", type=number, required=True, metavar="N", help="the number that this site has in the study")
    own("--key", type=Path, required=True, metavar="FILE", help="its private key; the server has the public one")
    own("--root_certificates", type=Path, required=True, metavar="FILE", help="of who has signed the server's certificate")
    own("--folder", type=Path, metavar="DIR", help="for private states and Flower's log (default: site-N)")
    own("--output", type=Path, metavar="DIR", help="keep the client's model there, as it was last measured, for use elsewhere")
    own("--threads", type=positive, metavar="N", help="torch threads (default: as many as there are cores)")
    own(
        "--partitioned", action="store_true", help="the data are those of all clients, dealt as configured: take this client's part"
    )
    own("--socket", type=Path, metavar="FILE", help="where Flower's process finds this one (default: in a temporary folder)")
    own("--without_supernode", action="store_true", help="print the command of Flower's process, for another user to run it")
    return parser


def run(args: Sequence[str]) -> None:
    """Do what the command line says."""
    given, rest = parser().parse_known_args(args[1:])
    commands.need_flower()
    for file in (given.key, given.root_certificates):
        # another user's key may lie where this one cannot look
        require(given.without_supernode or file.is_file(), f"There is no file {file}.")
    require(
        given.socket is not None or not given.without_supernode,
        "Got without_supernode and no socket: say where Flower's process is to find this one, --socket /run/study/relay.sock.",
    )

    from lightning_fed.cli.fit import quietly
    from lightning_fed.cli.staying import Staying
    from lightning_fed.signals import Terminated

    try:
        quietly(lambda: Staying(rest, given))
    except (KeyboardInterrupt, Terminated) as ended:
        print(f"lightning-fed: the site of client {given.client} has left. To come back: the same command.", file=sys.stderr)
        raise SystemExit(130 if isinstance(ended, KeyboardInterrupt) else 143) from None
