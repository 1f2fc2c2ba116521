"""The link through Flower's ServerApp, with an app that answers from a list."""

import json
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from typing import Any

import pytest

from lightning_fed.deployment.flower.link import FlowerLink
from lightning_fed.deployment.link import Broken
from lightning_fed.errors import FederationError

Answer = tuple[dict[str, Any], bytes]


@pytest.fixture
def linked() -> Iterator[Callable[..., tuple[FlowerLink, list[dict[str, Any]]]]]:
    ends: list[Connection] = []

    def start(*answers: Answer) -> tuple[FlowerLink, list[dict[str, Any]]]:
        ours, theirs = Pipe()
        asked: list[dict[str, Any]] = []

        def app() -> None:
            for head, body in answers:
                asked.append(json.loads(theirs.recv_bytes()) | {"body": theirs.recv_bytes()})
                theirs.send_bytes(json.dumps(head).encode())
                theirs.send_bytes(body)
            theirs.close()

        threading.Thread(target=app, daemon=True).start()
        ends.append(ours)
        return FlowerLink(ours, {"key of 0": 0, "key of 1": 1}), asked

    yield start
    for end in ends:
        end.close()


NODES = ({"nodes": {"key of 1": 71, "key of a stranger": 99}}, b"")


def test_sites_are_known_by_their_keys(linked: Any) -> None:
    link, asked = linked(NODES, ({"message_id": "t"}, b""), ({}, b""), ({"reply": True}, b"answer"))
    assert set(link.online()) == {1}
    assert link.send(1, b"question", 60.0) == "t"
    assert link.poll("t") is None
    assert link.poll("t") == b"answer"
    assert asked[1:3] == [
        {"do": "send", "node": 71, "seconds": 60.0, "body": b"question"},
        {"do": "poll", "node": 71, "message_id": "t", "body": b""},
    ]


def test_what_goes_wrong_on_the_way_is_told(linked: Any) -> None:
    link, _ = linked(
        NODES,
        ({"broken": "HTTPError: 500", "away": False}, b""),
        ({"message_id": "t"}, b""),
        ({"broken": "Node Unavailable", "away": True}, b""),
    )
    link.online()
    assert link.send(1, b"?", 1.0) == Broken("HTTPError: 500")
    assert link.poll(link.send(1, b"?", 1.0)) == Broken("Node Unavailable", away=True)


def test_a_server_app_that_has_ended_ends_the_run(linked: Any) -> None:
    link, _ = linked()
    with pytest.raises(FederationError, match="Flower's ServerApp has ended: its log says why"):
        link.online()
