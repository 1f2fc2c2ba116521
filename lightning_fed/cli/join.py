"""The verb ``join``: a site, which keeps its data and answers a server's messages."""

import argparse
import shutil
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from lightning_fed.cli.options import Options, positive
from lightning_fed.errors import require
from lightning_fed.flower import commands

TEXT = """Take part in a study with data that stay here. Further options are those of fit; the configuration is that of the server,
but for where the data are and the trainer. docs/deployment.md begins at the beginning."""

RETURN = 10.0
"""Seconds until Flower's process is started again. The server lets a node that ended without a word come back within a minute."""


def number(text: str) -> int:
    """A whole number from 0 on."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 on")
    return int(text)


def options(args: Sequence[str]) -> tuple[Namespace, list[str]]:
    """The verb's own options, and those of ``fit``."""
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
    return parser.parse_known_args(args[1:])


def run(args: Sequence[str]) -> None:
    """Do what the command line says."""
    given, rest = options(args)
    commands.need_flower()
    for file in (given.key, given.root_certificates):
        require(file.is_file() or given.without_supernode, f"There is no file {file}.")
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


class Answering(Protocol):
    """What answers messages."""

    def answer(self, message: bytes) -> bytes:
        """Say what came of it."""


class SuperNode:
    """Flower's process at a site, which is started again when it ends.

    Args:
        given: the verb's options.
        path: of the socket behind which the worker is.
        folder: for the log.
    """

    def __init__(self, given: Namespace, path: Path, folder: Path) -> None:
        files = given.key.absolute(), given.root_certificates.absolute()
        port = commands.SUPERNODE_PORT if given.without_supernode else commands.free_port()
        self.command = commands.supernode(given.server, *files, path, port)
        self.folder = folder
        self._child: commands.Child | None = None
        self._again = 0.0  # when it may be started
        if given.without_supernode:
            print(
                f"{commands.told(self.command)}  # is to be run by somebody else, with a key and certificate of theirs", flush=True
            )
            self._again = float("inf")

    def see_to(self) -> None:
        """Start it, if it does not run."""
        if self._child is not None and self._child.exit_code is not None:
            print(
                f"Flower's process ended with exit code {self._child.exit_code}: {self._child.log} says why. It is started again "
                f"in {RETURN:g} seconds.",
                file=sys.stderr,
                flush=True,
            )
            self._child, self._again = None, time.monotonic() + RETURN
        if self._child is None and time.monotonic() >= self._again:
            self._child = commands.Child(self.command, self.folder / "supernode.log", self.folder / "flower")

    def stop(self) -> None:
        """End it."""
        if self._child is not None:
            self._child.stop()


def answer_all(site: Answering, given: Namespace, folder: Path) -> None:
    """Answer whatever comes, until the process is ended."""
    from lightning_fed.flower.channel import Door

    rooms = Path(tempfile.mkdtemp(prefix="lightning_fed_"))
    door = Door(given.socket.absolute() if given.socket else rooms / "site.sock", 0o660 if given.socket else 0o600)
    node = SuperNode(given, door.path, folder)
    try:
        while True:
            node.see_to()
            if (visitor := door.wait(1.0)) is None:
                continue
            with visitor:
                try:
                    visitor.send_bytes(site.answer(visitor.recv_bytes()))
                except (EOFError, OSError) as error:
                    print(f"Flower's process has gone in the middle of a message ({error}).", file=sys.stderr, flush=True)
    finally:
        node.stop()
        door.close()
        shutil.rmtree(rooms, ignore_errors=True)
