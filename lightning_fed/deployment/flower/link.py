"""The link to sites through Flower's ServerApp."""

import json
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lightning_fed.deployment.flower import commands
from lightning_fed.deployment.flower.channel import Listener
from lightning_fed.deployment.link import Broken, Link
from lightning_fed.errors import FederationError

START = 120.0
"""Seconds that Flower's processes may take to start."""


class FlowerLink(Link):
    """Has the ServerApp transport messages. Sites are identified by their registered keys only."""

    def __init__(self, app: Connection, clients: Mapping[str, int]) -> None:
        self._app = app
        self._clients = clients
        self._nodes: dict[int, int] = {}
        self._sent_to: dict[str, int] = {}

    def online(self) -> Collection[int]:
        """The sites whose node has recently contacted the SuperLink."""
        answer, _ = self._ask("nodes")
        self._nodes = {self._clients[key]: node for key, node in answer.get("nodes", {}).items() if key in self._clients}
        return self._nodes.keys()

    def send(self, client: int, message: bytes, seconds: float) -> str | Broken:
        """Send a message through the SuperLink, which keeps it until the site fetches it or ``seconds`` have passed."""
        node = self._nodes[client]
        answer, _ = self._ask("send", message, node=node, seconds=seconds)
        if "message_id" not in answer:
            return Broken(answer.get("broken", "Flower did not take the message"))
        self._sent_to[answer["message_id"]] = node
        return str(answer["message_id"])

    def poll(self, message_id: str) -> bytes | Broken | None:
        """Get the answer from the SuperLink, which keeps it until then."""
        answer, content = self._ask("poll", node=self._sent_to[message_id], message_id=message_id)
        if not answer:
            return None
        del self._sent_to[message_id]
        return Broken(answer["broken"], answer["away"]) if "broken" in answer else content

    def _ask(self, deed: str, body: bytes = b"", **arguments: Any) -> tuple[dict[str, Any], bytes]:
        try:
            self._app.send_bytes(json.dumps({"do": deed, **arguments}).encode())
            self._app.send_bytes(body)
            return json.loads(self._app.recv_bytes()), self._app.recv_bytes()
        except (EOFError, OSError) as error:
            raise FederationError(
                "Flower's ServerApp has ended: its log says why. Continue with --ckpt_path last, which starts Flower anew."
            ) from error


def keys_in_pem(files: Sequence[Path]) -> dict[str, int]:
    """The client of each public key, by the key in Flower's form. Raises :class:`FederationError` for invalid or duplicate keys."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    clients: dict[str, int] = {}
    for client, file in enumerate(files):
        try:
            key = serialization.load_ssh_public_key(file.read_bytes())
        except Exception as error:  # its library raises many kinds of errors for invalid keys
            raise FederationError(f"{file} is not a public key ({error}): make one with ssh-keygen -t ecdsa -b 384.") from error
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise FederationError(f"{file} is a kind of key that Flower does not know: make one with ssh-keygen -t ecdsa -b 384.")
        form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        pem = key.public_bytes(*form).decode()
        if pem in clients:
            raise FederationError(f"{file} and {files[clients[pem]]} are the same key: each site needs its own.")
        clients[pem] = client
    return clients


@contextmanager
def linked(certificates: Path, keys: Sequence[Path], host: str, port: int, home: Path) -> Iterator[FlowerLink]:
    """Start Flower's processes on the server's machine, and stop them at the end.

    Args:
        certificates: folder with ca.crt, server.pem and server.key.
        keys: files of the sites' public keys, in order of their clients.
        host: address on which Flower listens.
        port: port on which it listens.
        home: folder for Flower's configuration and logs.
    """
    clients = keys_in_pem(keys)
    certificates, home = certificates.absolute(), home.absolute()
    commands.refuse_taken(host, port)
    commands.write_home(home, f"{host}:{port}", certificates)
    rooms = Path(tempfile.mkdtemp(prefix="lightning_fed_"))  # a short path that no other user can open
    listener = Listener(rooms / "serve.sock")
    commands.write_app(home / "app", listener.path)
    child = None
    try:
        child = commands.Child(commands.superlink(certificates, host, port), home / "superlink.log", home)
        commands.wait_for_port(child, host, port, START)
        for client, key in enumerate(keys):
            commands.run_command(commands.register(key.absolute(), client), home)
        commands.run_command(commands.run_app(home / "app"), home)
        app = listener.accept(START)
        if app is None:
            raise FederationError(f"Flower's ServerApp did not start within {START:g} seconds: see {child.log}.")
        with app:
            yield FlowerLink(app, clients)
    finally:
        listener.close()
        if child is not None:
            child.stop()
        shutil.rmtree(rooms, ignore_errors=True)
