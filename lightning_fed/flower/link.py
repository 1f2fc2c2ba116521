"""The link to sites through Flower's ServerApp."""

import json
from collections.abc import Collection, Mapping
from multiprocessing.connection import Connection
from typing import Any

from lightning_fed.errors import FederationError
from lightning_fed.sites.engine import Broken, Link


class FlowerLink(Link):
    """Has the ServerApp carry messages. Sites are known by the keys that are registered for them, and by nothing that they say.

    Args:
        app: the connection to the ServerApp.
        clients: whose key it is, by key, in PEM.
    """

    def __init__(self, app: Connection, clients: Mapping[str, int]) -> None:
        self._app = app
        self._clients = clients
        self._nodes: dict[int, int] = {}
        self._sent_to: dict[str, int] = {}
        self._failed: dict[str, str] = {}

    def online(self) -> Collection[int]:
        """Those whose node the SuperLink has heard of lately."""
        answer, _ = self._ask("nodes")
        self._nodes = {self._clients[key]: node for key, node in answer.get("nodes", {}).items() if key in self._clients}
        return self._nodes.keys()

    def send(self, client: int, message: bytes, seconds: float) -> str:
        """Through the SuperLink, which keeps it until the site fetches it, or so many seconds have passed."""
        node = self._nodes[client]
        answer, _ = self._ask("send", message, node=node, seconds=seconds)
        ticket = answer.get("ticket") or f"failed-{len(self._failed)}"
        if "ticket" not in answer:
            self._failed[ticket] = answer.get("broken", "Flower did not take the message")
        self._sent_to[ticket] = node
        return ticket

    def poll(self, ticket: str) -> bytes | Broken | None:
        """From the SuperLink, which has it until it is asked for."""
        if ticket in self._failed:
            return Broken(self._failed.pop(ticket))
        answer, content = self._ask("poll", node=self._sent_to[ticket], ticket=ticket)
        if "broken" in answer:
            return Broken(answer["broken"], answer["away"])
        return content if "reply" in answer else None

    def _ask(self, deed: str, body: bytes = b"", **asked: Any) -> tuple[dict[str, Any], bytes]:
        try:
            self._app.send_bytes(json.dumps({"do": deed, **asked}).encode())
            self._app.send_bytes(body)
            return json.loads(self._app.recv_bytes()), self._app.recv_bytes()
        except (EOFError, OSError) as error:
            raise FederationError(
                "Flower's ServerApp has ended: its log says why. Continue with --ckpt_path last, which starts Flower anew."
            ) from error
