"""What server and sites say to each other: safetensors with a line of JSON, of which nothing is unpickled.

A message is a safetensors file: tensors, and in its metadata the head, which says what is asked or answered.
"""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar
from zlib import crc32

import safetensors.torch
import torch

from lightning_fed import __version__
from lightning_fed.core.aggregation import is_count
from lightning_fed.core.messages import Broadcast, ClientUpdate, Turn
from lightning_fed.core.module import FederatedModule
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.errors import FederationError
from lightning_fed.formatting import shown
from lightning_fed.tensors import State

PROTOCOL = 1
"""Number of the language; both sides must speak the same."""

T = TypeVar("T")


def pack(head: Mapping[str, Any], tensors: State | None = None) -> bytes:
    """A message.

    Args:
        head: what JSON can say.
        tensors: by name; whatever they share in memory or how they lie there does not travel.
    """
    own = {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in (tensors or {}).items()}
    return safetensors.torch.save(own, metadata={"head": json.dumps({"protocol": PROTOCOL, **head})})


def unpack(message: bytes, whose: str) -> tuple[dict[str, Any], State]:
    """Head and tensors of a message.

    Raises:
        FederationError: if it is none.
    """
    try:
        size = int.from_bytes(message[:8], "little")
        head = json.loads(json.loads(message[8 : 8 + size])["__metadata__"]["head"])
        protocol = head["protocol"]
        tensors = safetensors.torch.load(message)
    except Exception as error:  # of JSON, of safetensors in Rust, of torch: anyone may have written these bytes
        raise FederationError(f"{whose} message cannot be read ({type(error).__name__}: {error}).") from error
    if protocol != PROTOCOL:
        raise FederationError(
            f"{whose} message has protocol {shown(protocol)}, this lightning-fed speaks {PROTOCOL}: install the same version "
            "everywhere."
        )
    return head, tensors


def read_field(head: Mapping[str, Any], key: str, kind: type[T], whose: str) -> T:
    """An entry of a head. Raises :class:`FederationError` if it is of another type, or not there."""
    value = head.get(key)
    if kind is float and type(value) is int and abs(value) <= sys.float_info.max:
        value = float(value)
    if type(value) is not kind:
        raise FederationError(f"{whose} message has {key} = {shown(value)}, expected {kind.__name__}.")
    return value


def counted(head: Mapping[str, Any], key: str, whose: str) -> int:
    """A number from 0 of a head, such as arrays and floats can hold."""
    if not is_count(number := read_field(head, key, int, whose)):
        raise FederationError(f"{whose} message has {key} = {shown(number)}, expected a number from 0.")
    return number


# --------------------------------------------------------------------------------------------------------------- the study


@dataclass(frozen=True)
class VerbSettings:
    """What must be the same at the server and at all sites.

    Args:
        settings: by name: of the model, the seed, what trains and how data are fed, as JSON has them.
        versions: of the libraries that decide numbers.
    """

    settings: dict[str, Any]
    versions: dict[str, str]

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "VerbSettings":
        """With what is installed here."""
        return cls(json.loads(json.dumps(settings)), installed())

    def refuse_other(self, head: Mapping[str, Any]) -> None:
        """Compare with what a server says of itself.

        Raises:
            FederationError: naming the keys that differ.
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
        """As a message has it."""
        return {"settings": self.settings, "versions": self.versions}


def installed() -> dict[str, str]:
    """Versions of what decides numbers. Builds of the same version (``+cpu``, ``+cu128``) are not told apart."""
    found = {"lightning-fed": __version__}
    for name in ("torch", "lightning", "torchvision", "transformers", "peft"):
        try:
            found[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def frozen_checksum(module: FederatedModule) -> str:
    """Checksum of what of a module never travels and never learns, a pretrained network say: it must be the same everywhere, and
    nobody would notice if it were not.
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
    """What a site is to do, beside what it knows itself.

    Args:
        run: name of the run, under which the site keeps private states.
        turn: what to do. Of the client, only id, model_size and how many clients there are have been said.
        held: rounds of which the server may still ask for the client's private state, if it is continued from a checkpoint.
        data: checksum of the client's data, as the site described them.
        frozen: checksum of what is neither sent nor learned, see :func:`frozen_checksum`.
    """

    run: str
    turn: Turn
    held: tuple[int, ...]
    data: str
    frozen: str

    def pack(self, settings: VerbSettings) -> bytes:
        """As a message."""
        turn, broadcast = self.turn, self.turn.broadcast
        head = {"ask": "turn", **settings.head, "run": self.run, "held": self.held}
        head |= {"data": self.data, "frozen": self.frozen}
        head |= {"client": turn.client.id, "num_clients": turn.client.num_clients, "model_size": broadcast.model_size}
        head |= {name: getattr(turn, name) for name in ("verb", "round", "last_round", "evaluate", "fine_tune", "turns")}
        tensors = {f"state/{name}": tensor for name, tensor in broadcast.state.items()}
        return pack(head, tensors | {f"statistics/{name}": tensor for name, tensor in broadcast.statistics.items()})

    @classmethod
    def unpacked(cls, head: Mapping[str, Any], tensors: State) -> "TurnRequest":
        """Out of a message. Raises :class:`FederationError` for anything that is not as :meth:`pack` writes it."""
        whose = "The server's"
        run, held = read_field(head, "run", str, whose), read_field(head, "held", list, whose)
        verb = read_field(head, "verb", str, whose)
        if not re.fullmatch("[0-9a-f]{32}", run):  # it becomes the name of a folder
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
    """What a site says of its client's data."""

    info: ClientInfo
    data: str

    def pack(self) -> bytes:
        """As a message."""
        names = ("num_train", "num_val", "num_test")
        sizes = {name: getattr(self.info, name) for name in names}
        return pack({"answer": "described", "client": self.info.id, **sizes, "labels": self.info.label_counts, "data": self.data})

    @classmethod
    def unpacked(cls, head: Mapping[str, Any], tensors: State, whose: str) -> "SiteDescription":
        """Out of a message. Raises :class:`FederationError` for anything that is not as :meth:`pack` writes it."""
        sizes = [counted(head, name, whose) for name in ("client", "num_train", "num_val", "num_test")]
        labels, data = read_field(head, "labels", list, whose), read_field(head, "data", str, whose)
        if not all(map(is_count, labels)) or sum(labels) != sizes[1] or sizes[1] == 0:
            raise FederationError(f"{whose} message has labels = {shown(labels)} of {sizes[1]} training examples.")
        if len(data) > 100 or not data.isprintable():
            raise FederationError(f"{whose} message has {shown(data)} as the checksum of its data.")
        client, num_train, num_val, num_test = sizes
        return cls(ClientInfo(client, num_train, num_val, num_test, tuple(labels)), data)


def pack_update(update: ClientUpdate, keeps: bool) -> bytes:
    """An update as a message.

    Args:
        update: what the client sends.
        keeps: whether the turn left it a private state, which it keeps.
    """
    head = {"answer": "update", "client": update.client, "num_examples": update.num_examples, "metrics": update.metrics}
    return pack(head | {"keeps": keeps}, update.state)


def unpack_update(head: Mapping[str, Any], tensors: State, whose: str) -> tuple[ClientUpdate, bool]:
    """What :func:`pack_update` packed. Raises :class:`FederationError` for anything else; what is in it has not been checked."""
    metrics = read_field(head, "metrics", dict, whose)
    values = {name: read_field(metrics, name, float, whose) for name in metrics}
    update = ClientUpdate(counted(head, "client", whose), counted(head, "num_examples", whose), tensors, values)
    return update, read_field(head, "keeps", bool, whose)
