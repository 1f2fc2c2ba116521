"""What crosses the wire between server and clients: plain data, nothing else."""

import reprlib
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lightning_fed.errors import FederationError

State = dict[str, Tensor]
"""A payload or a part of a state dict: tensors by name."""

RANK = "rank/"
"""What the names of effective ranks of adapters begin with, among the metrics of an evaluate turn."""

PRIVATE_SHARE = "private_share/"
"""The same of how much of a layer's adapters is the client's own."""

SERVER = -1
"""The id under which everybody's pooled data are measured."""


@dataclass(frozen=True)
class ClientInfo:
    """What is known about a client without looking at its data.

    Args:
        id: position in the federation, from 0.
        num_train: training examples, the :math:`n_k` of weighted averages.
        num_val: validation examples.
        num_test: test examples.
        label_counts: training examples per label, length ``num_labels``.
        capacity: how large a version of the model the client has, where a method has several; the server says so with its
            broadcast. None: the whole model.
        num_clients: how many clients the federation has, those that never take part included.
        num_public: how many public examples there are, which belong to nobody.
        takes_part: whether it is among those of whom a cohort is drawn; else it is only measured. The server's to know: what is
            built for a client does not depend on it.
    """

    id: int
    num_train: int
    num_val: int
    num_test: int
    label_counts: tuple[int, ...]
    capacity: float | None = None
    num_clients: int = 1
    num_public: int = 0
    takes_part: bool = True


def count_floats(state: State) -> int:
    """Number of floating-point values in a payload: the "parameters" of communication costs."""
    return sum(t.numel() for t in state.values() if t.is_floating_point())


def count_bytes(state: State) -> int:
    """Size of a payload in bytes, integer tensors (counters, and masks as :func:`pack_bits` packs them) included."""
    return sum(t.numel() * t.element_size() for t in state.values())


def pack_bits(mask: Tensor) -> Tensor:
    """A mask as it travels: a bit per value, eight in a byte, in order; the bits that are left over in the last byte are 0.

    Args:
        mask: booleans of any shape, n of them.

    Returns:
        Bytes ``(ceil(n / 8),)``, on the CPU.
    """
    return torch.from_numpy(np.packbits(mask.flatten().numpy(force=True)))


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """What :func:`pack_bits` packed.

    Args:
        packed: bytes; more than it takes, if a part of the mask is wanted.
        count: how many values there are.

    Returns:
        Booleans ``(count,)``.
    """
    return torch.from_numpy(np.unpackbits(packed.numpy(force=True), count=count)).bool()


def check_fits(state: State, expected: State, what: str) -> None:
    """Check names and shapes.

    Args:
        state: the tensors that came.
        expected: tensors with the names and shapes they should have.
        what: what ``state`` is, the subject of the error's sentence.

    Raises:
        FederationError: naming the tensors that lack, are too many or have another shape.
    """
    if lacking := sorted(expected.keys() - state.keys()):
        raise FederationError(f"{what} lacks {lacking[0]!r}{_and_more(lacking)}.")
    if unexpected := sorted(state.keys() - expected.keys()):
        raise FederationError(f"{what} holds {shown(unexpected[0])}{_and_more(unexpected)}, which does not belong there.")
    for name, like in expected.items():  # a state that was read from a file comes in no order
        if state[name].shape != like.shape:
            raise FederationError(f"{what} has {name!r} of shape {tuple(state[name].shape)}, expected {tuple(like.shape)}.")


def check_dtypes(state: State, expected: State, what: str, remedy: str) -> None:
    """Check the dtypes of tensors that :func:`check_fits` has passed.

    Args:
        state: the tensors that came.
        expected: tensors of the same names, with the dtypes they should have.
        what: what ``state`` is, the subject of the error's sentence.
        remedy: how that sentence goes on after the expected dtype.

    Raises:
        FederationError: naming the tensor.
    """
    for name, like in expected.items():
        if (dtype := state[name].dtype) != like.dtype:
            raise FederationError(f"{what} has {name!r} of {dtype}, expected {like.dtype}{remedy}")


def check_finite(state: State, what: str) -> None:
    """Check that there is no NaN and no infinity.

    Args:
        state: the tensors.
        what: what ``state`` is, the subject of the error's sentence.

    Raises:
        FederationError: naming the tensor.
    """
    for name, tensor in state.items():
        # The sum of a tensor with a NaN or an infinity is one too; looking at every entry takes ten times as long.
        if tensor.is_floating_point() and not torch.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():
            raise FederationError(
                f"{what} holds NaN or infinity in {name!r}: its training diverged; lower the learning rate or set gradient_clip."
            )


def shown(value: object) -> str:
    """A value in an error's sentence: as Python writes it, in at most 80 characters and one line."""
    text = " ".join(reprlib.repr(value).split())
    return text if len(text) <= 80 else f"{text[:79]}…"


def escaped(text: str, longest: int = 1000) -> str:
    """Somebody else's words as they can be printed: in one line, cut, and without anything that a terminal would obey."""
    words = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text[: longest + 1])
    return words if len(words) <= longest else f"{words[:longest]}…"


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more tensors" if len(names) > 1 else ""


@dataclass(frozen=True)
class Broadcast:
    """What the server sends to one client.

    Args:
        state: the payload.
        capacity: which version of the model that is; see :attr:`ClientInfo.capacity`.
        statistics: what was gathered on the clients' data for this version, see :meth:`FederatedModule.statistics_names`; with
            models that are measured, not with models that are trained.
    """

    state: State
    capacity: float | None = None
    statistics: State = field(default_factory=dict)


@dataclass(frozen=True)
class ClientUpdate:
    """What a client sends back after its turn.

    Args:
        client: id of the sender.
        num_examples: training examples the client holds, the weight of its update.
        state: the payload.
        metrics: scalars about the turn; they are reported, never aggregated into a model.
    """

    client: int
    num_examples: int
    state: State
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """What one client is to do in a round: all that a worker, wherever it runs, needs to know beside the client's private state.

    Args:
        verb: ``"fit"`` trains and sends an update, ``"evaluate"`` measures the client's model with the broadcast loaded,
            ``"gather"`` passes the training data through it and sends its statistics. On public data: ``"predict"`` sends what the
            model says of each example, ``"learn"`` trains it: the server's is sent, a client's stays with the client.
        client: whose turn it is; id -1 is the server, whose data are everybody's pooled, or public.
        round: number of the round, from 1.
        broadcast: what the server sent.
        evaluate: whether a fit turn also measures the trained model, before aggregation.
        since: round of the client's last fit turn that the server merged, 0 if there is none: the private state that the client
            has to start from is of that round.
        adapt: whether an evaluate turn adapts the model first, if the method says how.
    """

    verb: Literal["fit", "evaluate", "gather", "predict", "learn"]
    client: ClientInfo
    round: int
    broadcast: Broadcast
    evaluate: bool = False
    since: int = 0
    adapt: bool = True


@dataclass(frozen=True)
class Outcome:
    """What a worker hands to its engine, which passes the update on and keeps the private state.

    Args:
        update: what the client sends.
        private: the client's private state after the turn; None: the turn left it as it was, or the client has none.
    """

    update: ClientUpdate
    private: State | None = None


@dataclass(frozen=True)
class Lost:
    """A turn that came to nothing, where an engine may go on without it.

    Args:
        client: whose turn it was.
        reason: what happened, for people.
    """

    client: int
    reason: str
