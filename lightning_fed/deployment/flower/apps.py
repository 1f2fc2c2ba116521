"""Flower's two apps, which pass bytes on and import no machine-learning library.

Flower starts them: the ServerApp beside the SuperLink, a ClientApp at each site, in a new process for each message.
"""

import json
import time
from collections.abc import Callable
from typing import Any

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid, ServerApp

from lightning_fed.deployment.flower.channel import connect

AWAY = {ErrorCode.NODE_UNAVAILABLE, ErrorCode.MESSAGE_UNAVAILABLE}
"""Errors that say that a message has not reached its site."""

server = ServerApp()
client = ClientApp()


@server.main()
def pass_on_to_sites(grid: Grid, context: Context) -> None:
    """Do what ``lightning-fed serve`` requests, until it ends."""
    with connect(str(context.run_config["socket"])) as serve:
        while True:
            try:
                asked = json.loads(serve.recv_bytes())
                body = serve.recv_bytes()
            except EOFError:
                return
            try:
                answer, content = DEEDS[asked.pop("do")](grid, body, **asked)
            except Exception as error:  # of Flower or the network: one message fails, not the run
                answer, content = {"broken": f"{type(error).__name__}: {error}", "away": False}, b""
            serve.send_bytes(json.dumps(answer).encode())
            serve.send_bytes(content)


def nodes(grid: Grid, body: bytes) -> tuple[dict[str, Any], bytes]:
    """The nodes that are online: ids by registered key."""
    now = time.time()
    there = [node for node in grid.get_nodes() if node.online_until > now]
    return {"nodes": {node.public_key.decode(): node.node_id for node in there}}, b""


def send(grid: Grid, body: bytes, node: int, seconds: float) -> tuple[dict[str, Any], bytes]:
    """Send a message to a node."""
    [message_id] = grid.push_messages([Message(recorded(body), node, "query", ttl=seconds)])
    return {"message_id": message_id}, b""


def poll(grid: Grid, body: bytes, node: int, message_id: str) -> tuple[dict[str, Any], bytes]:
    """The reply to a message, if it has arrived; one at a time, because each is read into memory."""
    found = list(grid.pull_messages([message_id]))
    if not found:
        return {}, b""
    [reply] = found
    if reply.has_error():
        return {"broken": reply.error.reason or f"Flower's error {reply.error.code}", "away": reply.error.code in AWAY}, b""
    if reply.metadata.src_node_id != node:
        return {"broken": f"node {reply.metadata.src_node_id} replied in place of another", "away": False}, b""
    return {"reply": True}, read(reply)


DEEDS: dict[str, Callable[..., tuple[dict[str, Any], bytes]]] = {"nodes": nodes, "send": send, "poll": poll}


@client.query()
def pass_on_to_worker(message: Message, context: Context) -> Message:
    """Have the process of ``lightning-fed join`` answer."""
    with connect(str(context.node_config["socket"])) as worker:
        worker.send_bytes(read(message))
        return Message(recorded(worker.recv_bytes()), reply_to=message)


def recorded(body: bytes) -> RecordDict:
    """Bytes in Flower's form, in chunks."""
    array = Array(dtype="uint8", shape=(len(body),), stype="safetensors", data=body)
    return RecordDict({"message": ArrayRecord({"bytes": array})})


def read(message: Message) -> bytes:
    """The bytes that :func:`recorded` put in."""
    return message.content.array_records["message"]["bytes"].data
