"""Compression of messages: quantization and sparsification, and decompression at the receiver."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_fed.core.module import FederatedModule
from lightning_fed.errors import FederationError
from lightning_fed.options import Fraction, require_choices
from lightning_fed.tensors import State, widened

ERROR = "compression_error/"
"""Prefix of what a client has not sent yet (error feedback), in its private state."""

BF16, INT8, SCALE, TOPK, INDEX = "bf16/", "int8/", "scale/", "topk/", "index/"
"""Prefixes of compressed tensors and of what is sent along with them."""

LEVELS = 127
"""Largest value of an ``int8`` tensor."""


@dataclass(frozen=True)
class Compression:
    r"""Compression of messages between server and clients. It applies to the change of a tensor, its difference to the tensor of
    the same name and shape that the client received, or to the tensor itself if there is none. Integers, buffers (statistics of
    batch norm) and tensors that are not finite are sent uncompressed; the receiver refuses the last.

    - ``bf16`` rounds float32 to bfloat16: half the bytes.
    - ``int8`` rounds :math:`127\, x / \max \lvert x \rvert` to an integer, up or down at random so that it is unbiased
      (QSGD, Alistarh et al., NeurIPS 2017): a quarter of the bytes, and a scale per tensor.
    - ``topk`` sends the entries of largest magnitude, a ``share`` of each tensor, with their indices. The client keeps what was not
      sent and adds it to its next change (error feedback, Stich et al., NeurIPS 2018). This is right only for
      :meth:`~.SharedStateMixin.continued_names`; all other tensors are sent whole.

    Args:
        up: compression of what clients send.
        down: compression of what clients receive for training. Models are evaluated uncompressed, and what a client changes is
            added to the uncompressed values.
        share: share of each tensor's entries that ``topk`` sends, at least one entry.
    """

    up: Literal["none", "bf16", "int8", "topk"] = "none"
    down: Literal["none", "bf16", "int8"] = "none"
    share: Fraction = 0.01

    def __post_init__(self) -> None:
        require_choices(type(self), vars(self), "compression")
        if not 0 < self.share <= 1:
            raise FederationError(f"compression.share is {self.share}: give the share of entries that topk sends, in (0, 1].")

    def check(self, module: FederatedModule) -> None:
        """Refuse compression for a method without messages, and ``topk`` for one of which it would send everything whole."""
        if module.centralized and (self.up != "none" or self.down != "none"):
            raise FederationError(
                f"Got compression, but {type(module).__name__} trains on the pooled data of all clients, and nothing is sent: "
                "leave it out."
            )
        sends = module.shared_names() or module.dynamic_payload
        if self.up == "topk" and sends and not module.continued_names():
            raise FederationError(
                f"compression.up is topk, but {type(module).__name__}'s clients send nothing of which a part could follow in a "
                "later round: set it to int8 or bf16."
            )

    def compress_update(
        self, state: State, sent_down: State, owed: Mapping[str, Tensor], names: Collection[str]
    ) -> tuple[State, State]:
        """Compress a client's update. Draws from torch's random stream.

        Args:
            state: the update.
            sent_down: what the client received.
            owed: what it has not sent in earlier rounds.
            names: names of the tensors to compress; the others are sent whole.

        Returns:
            What is sent, and what is still owed.
        """
        if self.up == "none":
            return state, {}
        sent, left = State(), {name: tensor for name, tensor in owed.items() if name not in state}
        for name, tensor in sorted(state.items()):  # a fixed order for the random draws
            like = _like(tensor, sent_down.get(name))
            change = tensor if like is None else tensor - like
            if name not in names:
                sent[name] = tensor
            elif self.up != "topk":
                sent |= _rounded(name, change, self.up, tensor)
            elif like is None or not _finite(change):
                sent[name] = _with(tensor, owed.get(name))
            else:
                change = change + owed.get(name, 0)
                flat = change.flatten()
                # The intended number: in floating point 0.07 · 100 is slightly more than 7.
                places = flat.abs().topk(math.ceil(self.share * flat.numel() * (1 - 1e-12))).indices.sort().values
                sent |= {f"{TOPK}{name}": flat[places], f"{INDEX}{name}": places.int()}
                left[name] = flat.index_fill(0, places, 0).view_as(change)
        return sent, left

    def expand_update(self, sent: State, sent_down: State) -> State:
        """Decompress an update.

        Args:
            sent: output of :meth:`compress_update`.
            sent_down: what the sender received.

        Raises:
            FederationError: for input that :meth:`compress_update` cannot produce.
        """
        if self.up == "none":
            return sent
        found = State()
        for key, tensor in sent.items():
            kind, name = _parted(key)
            if kind in (SCALE, INDEX):
                continue
            if kind == TOPK:
                like = sent_down.get(name)
                if like is None:
                    raise FederationError(f"Entries of {name!r} arrived, but that tensor was not sent to the client.")
                found[name] = like + _scattered(name, tensor, sent.get(f"{INDEX}{name}"), like)
            elif kind:
                change = _expanded(name, kind, tensor, sent)
                like = _like(change, sent_down.get(name))
                found[name] = change if like is None else like + change
            else:
                found[name] = tensor
        return found

    def compress_broadcast(self, state: State, buffers: Collection[str]) -> State:
        """Compress a broadcast, except for buffers. Draws from torch's random stream."""
        if self.down == "none":
            return state
        sent = State()
        for name, tensor in sorted(state.items()):
            sent |= {name: tensor} if name in buffers else _rounded(name, tensor, self.down, tensor)
        return sent

    def expand_broadcast(self, sent: State) -> State:
        """Decompress a broadcast."""
        if self.down == "none":
            return sent
        parts = [(*_parted(key), tensor) for key, tensor in sent.items() if not key.startswith(SCALE)]
        return {name: _expanded(name, kind, tensor, sent) if kind else tensor for kind, name, tensor in parts}

    @staticmethod
    def unrounded(update: State, sent_down: State, exact: State, names: Collection[str]) -> State:
        """An update as a change of what the server has, instead of what the client received: rounding is no change that a client
        made. It would undo changes below the precision of ``bf16``, be clipped as a client's, and grow in a server optimizer.

        Args:
            update: the decompressed update.
            sent_down: what the client received.
            exact: the broadcast before compression.
            names: names of the tensors that a client changes from the received values on; the others stay as they are.
        """
        rounded = {name for name in names if name in update and sent_down.get(name) is not exact.get(name)}
        fits = {name for name in rounded if _like(update[name], sent_down[name]) is not None}
        return update | {name: exact[name] + (update[name] - sent_down[name]) for name in fits}


NONE = Compression()
"""No compression."""


def _like(tensor: Tensor, sent_down: Tensor | None) -> Tensor | None:
    """The tensor that ``tensor`` is a change of; None if there is none."""
    fits = sent_down is not None and sent_down.shape == tensor.shape and sent_down.dtype == tensor.dtype
    return sent_down if fits and tensor.is_floating_point() else None


def _with(tensor: Tensor, owed: Tensor | None) -> Tensor:
    """A tensor that is sent whole, with what is owed of it; it may have become smaller (an adapter of a lower rank)."""
    return tensor if owed is None else tensor + owed[tuple(slice(size) for size in tensor.shape)]


def _finite(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0 and bool(tensor.isfinite().all())


def _rounded(name: str, values: Tensor, how: str, whole: Tensor) -> State:
    """Quantized values in the form that is sent; the whole tensor if they cannot be quantized."""
    if not _finite(values) or (how == "bf16" and values.dtype != torch.float32):
        return {name: whole}
    if how == "bf16":
        return {f"{BF16}{name}": values.bfloat16()}
    wide = widened(values)  # in half precision LEVELS / scale is infinite for small changes
    scale = wide.abs().max()
    levels = (wide * (LEVELS / scale) if scale > 0 else torch.zeros_like(wide)).float()
    lower = levels.floor()
    chance = torch.rand(levels.shape, device=levels.device)  # in the order of indices; rand_like goes by that of memory
    drawn = lower + (chance < levels - lower)
    return {f"{INT8}{name}": drawn.clamp(-LEVELS, LEVELS).to(torch.int8), f"{SCALE}{name}": scale.to(values.dtype)}


def _expanded(name: str, kind: str, tensor: Tensor, sent: State) -> Tensor:
    if kind == BF16:
        return tensor.float()
    scale = sent.get(f"{SCALE}{name}")
    if tensor.dtype != torch.int8 or scale is None or scale.dim() or not scale.is_floating_point():
        raise FederationError(f"{name!r} arrived as {tensor.dtype} without a scale of its own, expected torch.int8 with one.")
    return (tensor * (widened(scale) / LEVELS)).to(scale.dtype)


def _scattered(name: str, values: Tensor, places: Tensor | None, like: Tensor) -> Tensor:
    """A tensor with the given entries; all others are zero."""
    if (
        places is None
        or places.dtype != torch.int32
        or values.dtype != like.dtype
        or values.dim() != 1
        or places.shape != values.shape
        or bool(torch.any((places < 0) | (places >= like.numel())))
    ):
        raise FederationError(f"Entries of {name!r} arrived that do not fit {tuple(like.shape)} numbers of {like.dtype}.")
    return like.new_zeros(like.numel()).index_put((places.long(),), values).view_as(like)


def _parted(key: str) -> tuple[str, str]:
    """The form in which a tensor is sent (empty: uncompressed) and its name."""
    kind = next((kind for kind in (BF16, INT8, SCALE, TOPK, INDEX) if key.startswith(kind)), "")
    return kind, key.removeprefix(kind)
