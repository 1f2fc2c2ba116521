"""Messages between server and sites: safetensors with a line of JSON; nothing is unpickled.

A message is a safetensors file. Its metadata hold the head, which says what is requested or answered.
"""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from zlib import crc32

import safetensors.torch
import torch

from lightning_fed.core.aggregation import is_count
from lightning_fed.core.messages import Broadcast, ClientUpdate, Turn
from lightning_fed.core.module import FederatedModule
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.errors import FederationError
from lightning_fed.experiments.sweep.provenance import installed
from lightning_fed.formatting import shown
from lightning_fed.tensors import State

PROTOCOL = 1
"""Version of the protocol, which must be the same on both sides."""

T = TypeVar("T")


def pack(head: Mapping[str, Any], tensors: State | None = None) -> bytes:
    """Create a message.

    Args:
        head: values that JSON can express.
        tensors: tensors by name; shared memory and memory layouts are not preserved.
    """
    own = {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in (tensors or {}).items()}
    return safetensors.torch.save(own, metadata={"head": json.dumps({"protocol": PROTOCOL, **head})})


def unpack(message: bytes, whose: str) -> tuple[dict[str, Any], State]:
    """Head and tensors of a message.

    Raises:
        FederationError: if it is not a valid message.
    """
    try:
        size = int.from_bytes(message[:8], "little")
        head = json.loads(json.loads(message[8 : 8 + size])["__metadata__"]["head"])
        protocol = head["protocol"]
        tensors = safetensors.torch.load(message)
    except Exception as error:  # of JSON, safetensors or torch: the bytes are untrusted
        raise FederationError(f"{whose} message cannot be read ({type(error).__name__}: {error}).") from error
    if protocol != PROTOCOL:
        raise FederationError(
            f"{whose} message has protocol {shown(protocol)}, this lightning-fed speaks {PROTOCOL}: install the same version "
            "everywhere."
        )
    return head, tensors


def read_field(head: Mapping[str, Any], key: str, kind: type[T], whose: str) -> T:
    """An entry of a head. Raises :class:`FederationError` if it has another type, or is missing."""
    value = head.get(key)
    if kind is float and type(value) is int and abs(value) <= sys.float_info.max:
        value = float(value)
    if type(value) is not kind:
        raise FederationError(f"{whose} message has {key} = {shown(value)}, expected {kind.__name__}.")
    return value


def counted(head: Mapping[str, Any], key: str, whose: str) -> int:
    """A non-negative integer of a head, within the range of arrays and floats."""
    if not is_count(number := read_field(head, key, int, whose)):
        raise FederationError(f"{whose} message has {key} = {shown(number)}, expected a number from 0.")
    return number


# --------------------------------------------------------------------------------------------------------------- the study


@dataclass(frozen=True)
class VerbSettings:
    """Settings that must be the same at the server and at all sites.

    Args:
        settings: settings by name, in the form of JSON: the model, the seed, training options and data options.
        versions: versions of the libraries that affect results. Builds of a version (``+cpu``, ``+cu128``) are not distinguished.
    """

    settings: dict[str, Any]
    versions: dict[str, str]

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "VerbSettings":
        """The settings with the versions that are installed here."""
        versions = {name: (number or "not installed").partition("+")[0] for name, number in installed().items()}
        return cls(json.loads(json.dumps(settings)), versions)

    def refuse_other(self, head: Mapping[str, Any]) -> None:
        """Compare with the settings that a server sends.

        Raises:
            FederationError: names the keys that differ.
        """
        theirs = VerbSettings(
            read_field(head, "settings", dict, "The server's"), read_field(head, "versions", dict, "The server's")
        )
        different = [
            f"{key} is {mine.get(key, 'not set')!r} at the site and {its.get(key, 'not set')!r} at the server"
            for mine, its in ((self.settings, theirs.settings), (self.versions, theirs.versions))
            for key in sorted(mine.keys() | its.keys())
            if mine.get(key, None) != its.get(key, None)
        ]
        if different:
            more = f"; and {len(different) - 5} more" if len(different) > 5 else ""
            raise FederationError(f"this is another study: {'; '.join(different[:5])}{more}")

    @property
    def head(self) -> dict[str, Any]:
        """The settings as the head of a message."""
        return {"settings": self.settings, "versions": self.versions}


def frozen_checksum(module: FederatedModule) -> str:
    """Checksum of a module's tensors that are neither sent nor trained, such as a pretrained network. They must be the same
    everywhere, and a difference would go unnoticed.
    """
    checksum = 0
    for name, tensor in sorted(module.state_dict().items()):
        if name in module.frozen_names:
            values = tensor.detach().cpu().contiguous().flatten()
            checksum = crc32(values.view(torch.uint8).numpy().tobytes(), crc32(name.encode(), checksum))
    return f"{checksum:08x}"


# --------------------------------------------------------------------------------------------------------------- questions


@dataclass(frozen=True)
class TurnRequest:
    """What a site is asked to do.

    Args:
        run: id of the run, under which the site stores private states.
        turn: the turn. Its client only has the id, model_size and the number of clients.
        held: rounds whose private state the server may still request, if it continues from a checkpoint.
        data: checksum of the client's data, as the site described them.
        frozen: checksum of what is neither sent nor trained, see :func:`frozen_checksum`.
    """

    run: str
    turn: Turn
    held: tuple[int, ...]
    data: str
    frozen: str

    def pack(self, settings: VerbSettings) -> bytes:
        turn, broadcast = self.turn, self.turn.broadcast
        head = {"ask": "turn", **settings.head, "run": self.run, "held": self.held}
        head |= {"data": self.data, "frozen": self.frozen}
        head |= {"client": turn.client.id, "num_clients": turn.client.num_clients, "model_size": broadcast.model_size}
        head |= {name: getattr(turn, name) for name in ("verb", "round", "last_round", "evaluate", "fine_tune", "turns")}
        tensors = {f"state/{name}": tensor for name, tensor in broadcast.state.items()}
        return pack(head, tensors | {f"statistics/{name}": tensor for name, tensor in broadcast.statistics.items()})

    @classmethod
    def unpacked(cls, head: Mapping[str, Any], tensors: State) -> "TurnRequest":
        """The request in a message. Raises :class:`FederationError` for anything that :meth:`pack` does not write."""
        whose = "The server's"
        run, held = read_field(head, "run", str, whose), read_field(head, "held", list, whose)
        verb = read_field(head, "verb", str, whose)
        if not re.fullmatch("[0-9a-f]{32}", run):  # used as the name of a folder
            raise FederationError(f"{whose} message names the run {shown(run)}, expected 32 hexadecimal digits.")
        if verb not in ("fit", "evaluate", "compute_statistics"):
            raise FederationError(f"{whose} message asks a site to {shown(verb)}, expected fit, evaluate or compute_statistics.")
        model_size = None if head.get("model_size") is None else read_field(head, "model_size", float, whose)
        counts = {name: counted(head, name, whose) for name in ("client", "num_clients", "round", "last_round", "turns")}
        client = ClientInfo(counts["client"], 0, 0, 0, (), model_size, counts["num_clients"])
        parts: dict[str, State] = {"state": {}, "statistics": {}}
        for name, tensor in tensors.items():
            part, _, rest = name.partition("/")
            if part not in parts:
                raise FederationError(f"{whose} message has a tensor {shown(name)}, which belongs to nothing.")
            parts[part][rest] = tensor
        turn = Turn(
            verb,  # type: ignore[arg-type]
            client,
            counts["round"],
            Broadcast(parts["state"], model_size, parts["statistics"]),
            read_field(head, "evaluate", bool, whose),
            counts["last_round"],
            read_field(head, "fine_tune", bool, whose),
            counts["turns"],
        )
        rounds = tuple(number for number in held if type(number) is int)
        return cls(run, turn, rounds, read_field(head, "data", str, whose), read_field(head, "frozen", str, whose))


# ----------------------------------------------------------------------------------------------------------------- answers


@dataclass(frozen=True)
class SiteDescription:
    """A site's description of its client's data."""

    info: ClientInfo
    data: str

    def pack(self) -> bytes:
        names = ("num_train", "num_val", "num_test")
        sizes = {name: getattr(self.info, name) for name in names}
        return pack({"answer": "described", "client": self.info.id, **sizes, "labels": self.info.label_counts, "data": self.data})

    @classmethod
    def unpacked(cls, head: Mapping[str, Any], tensors: State, whose: str) -> "SiteDescription":
        """The description in a message. Raises :class:`FederationError` for anything that :meth:`pack` does not write."""
        sizes = [counted(head, name, whose) for name in ("client", "num_train", "num_val", "num_test")]
        labels, data = read_field(head, "labels", list, whose), read_field(head, "data", str, whose)
        if not all(map(is_count, labels)) or sum(labels) != sizes[1] or sizes[1] == 0:
            raise FederationError(f"{whose} message has labels = {shown(labels)} of {sizes[1]} training examples.")
        if len(data) > 100 or not data.isprintable():
            raise FederationError(f"{whose} message has {shown(data)} as the checksum of its data.")
        client, num_train, num_val, num_test = sizes
        return cls(ClientInfo(client, num_train, num_val, num_test, tuple(labels)), data)


def pack_update(update: ClientUpdate, keeps: bool) -> bytes:
    """An update as a message; ``keeps``: whether the client has a new private state after the turn."""
    head = {"answer": "update", "client": update.client, "num_examples": update.num_examples, "metrics": update.metrics}
    return pack(head | {"keeps": keeps}, update.state)


def unpack_update(head: Mapping[str, Any], tensors: State, whose: str) -> tuple[ClientUpdate, bool]:
    """Inverse of :func:`pack_update`. Raises :class:`FederationError` for anything else; the contents are not checked."""
    metrics = read_field(head, "metrics", dict, whose)
    values = {name: read_field(metrics, name, float, whose) for name in metrics}
    update = ClientUpdate(counted(head, "client", whose), counted(head, "num_examples", whose), tensors, values)
    return update, read_field(head, "keeps", bool, whose)
