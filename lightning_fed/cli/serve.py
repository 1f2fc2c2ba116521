"""The verb ``serve``: a study whose data stay at their sites, from the server's side."""

import argparse
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_fed.cli.options import Options, positive
from lightning_fed.errors import FederationError, require
from lightning_fed.flower import commands

TEXT = """Lead a study whose data stay at their sites: each round, sites are sent what they are to do and what they send is merged.
Further options are those of fit; the configuration is that of the sites. docs/deployment.md begins at the beginning."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")

START = 120.0
"""Seconds that Flower's processes may take to start."""


def share(text: str) -> float:
    """A number in (0, 1]."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share in (0, 1]")
    return value


def options(args: Sequence[str]) -> tuple[Namespace, list[str]]:
    """The verb's own options, and those of ``fit``."""
    parser = Options("serve", TEXT)
    own = parser.add_argument
    own("--sites", type=Path, required=True, metavar="DIR", help="public keys of the sites: 0.pub, 1.pub, … of clients 0, 1, …")
    own("--certificates", type=Path, required=True, metavar="DIR", help="ca.crt, server.pem and server.key")
    own("--host", default="127.0.0.1", help="where Flower listens (default: 127.0.0.1, for a proxy in front of it)")
    own("--port", type=positive, default=8000, help="its port (default: 8000)")
    own("--exposed_control_api_is_protected", action="store_true", help="allow another host than this machine")
    own("--output", type=Path, metavar="DIR", help="write what the server has there when all rounds are played, for use elsewhere")
    own("--wait", type=positive, default=600, metavar="SECONDS", help="until all sites must be online (default: 600)")
    own("--deadline", type=positive, default=3600, metavar="SECONDS", help="for the turns of a round's phase (default: 3600)")
    own("--quorum", type=share, default=1.0, metavar="SHARE", help="of turns without which the run ends (default: 1)")
    return parser.parse_known_args(args[1:])


def run(args: Sequence[str]) -> None:
    """Do what the command line says."""
    given, rest = options(args)
    commands.need_flower()
    refuse_exposed(given)
    keys = public_keys(given.sites)
    check_certificates(given.certificates)

    from lightning_fed.cli.fit import quietly
    from lightning_fed.cli.leading import Leading

    quietly(lambda: Leading(rest, given, keys))


def refuse_exposed(given: Namespace) -> None:
    """Flower's Control API has no authentication and shares a port with what sites need."""
    require(
        given.host in LOOPBACK or given.exposed_control_api_is_protected,
        f"Got host={given.host}, where anybody who reaches it can start programs on the server and at all sites, through Flower's "
        "Control API: leave host out and put a proxy in front that passes on /v1/fleet/ alone (docs/deployment.md), or say "
        "--exposed_control_api_is_protected.",
    )


def public_keys(folder: Path) -> list[Path]:
    """Files of the sites' keys, in order of their clients."""
    found = {path.stem: path for path in folder.glob("*.pub")}
    expected = [str(client) for client in range(len(found))]
    require(
        bool(found) and sorted(found) == sorted(expected),
        f"{folder} has {', '.join(sorted(path.name for path in found.values())) or 'no public keys'}: expected 0.pub, 1.pub, … "
        "without gaps, a file per client.",
    )
    return [found[name] for name in expected]


def keys_in_pem(files: Sequence[Path]) -> dict[str, int]:
    """Whose key it is, by key as Flower has it. Raises :class:`FederationError` for what is no such key, or there twice."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    clients: dict[str, int] = {}
    for client, file in enumerate(files):
        try:
            key = serialization.load_ssh_public_key(file.read_bytes())
        except Exception as error:  # what is wrong with a key, its library says in many ways
            raise FederationError(f"{file} is no public key ({error}): make one with ssh-keygen -t ecdsa -b 384.") from error
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise FederationError(f"{file} is a key of another kind than Flower knows: make one with ssh-keygen -t ecdsa -b 384.")
        form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        pem = key.public_bytes(*form).decode()
        if pem in clients:
            raise FederationError(f"{file} and {files[clients[pem]]} are the same key: each site needs its own.")
        clients[pem] = client
    return clients


def check_certificates(folder: Path) -> None:
    """Refuse a folder in which something lacks."""
    lacking = [name for name in ("ca.crt", "server.pem", "server.key") if not (folder / name).is_file()]
    require(not lacking, f"{folder} lacks {', '.join(lacking)}: docs/deployment.md says how to make certificates.")


@contextmanager
def flower(given: Namespace, keys: Sequence[Path], home: Path) -> Iterator[Any]:
    """Flower's processes, and the link through them.

    Args:
        given: the verb's options.
        keys: the sites' keys.
        home: folder for Flower's configuration and logs.
    """
    from lightning_fed.flower.channel import Door
    from lightning_fed.flower.link import FlowerLink

    clients = keys_in_pem(keys)
    certificates, home = given.certificates.absolute(), home.absolute()
    commands.refuse_taken(given.host, given.port)
    commands.write_home(home, f"{given.host}:{given.port}", certificates)
    rooms = Path(tempfile.mkdtemp(prefix="lightning_fed_"))  # whose path is short, and which nobody else may open
    door = Door(rooms / "serve.sock")
    commands.write_app(home / "app", door.path)
    child = None
    try:
        child = commands.Child(commands.superlink(certificates, given.host, given.port), home / "superlink.log", home)
        commands.wait_for_port(child, given.host, given.port, START)
        for client, key in enumerate(keys):
            commands.carry_out(commands.register(key.absolute(), client), home)
        commands.carry_out(commands.run_app(home / "app"), home)
        app = door.wait(START)
        if app is None:
            raise FederationError(f"Flower's ServerApp did not start within {START:g} seconds: see {child.log}.")
        with app:
            yield FlowerLink(app, clients)
    finally:
        door.close()
        if child is not None:
            child.stop()
        shutil.rmtree(rooms, ignore_errors=True)
