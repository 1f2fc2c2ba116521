"""Smaller messages: what is sent in fewer bits, or in part, and what becomes of it where it arrives."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_fed.errors import FederationError
from lightning_fed.options import Fraction
from lightning_fed.tensors import State

ERROR, SCALE, INDEX = "compression_error/", "scale/", "index/"
"""What the names begin with of what a client still owes, among its private state; and of what is sent beside a tensor."""

LEVELS = 127
"""The largest number of an ``int8`` tensor."""


@dataclass(frozen=True)
class Compression:
    r"""How messages between server and clients are made smaller. What is compressed is the change of a tensor, its difference to the
    one of the same name and shape that the client received, and where there is none, the tensor itself; integers travel as they are.

    - ``bf16`` rounds to bfloat16: half the bytes.
    - ``int8`` rounds :math:`127 x / \max \lvert x \rvert` to a whole number, up or down at random such that the mean is exact
      (QSGD, Alistarh et al., NeurIPS 2017): a quarter of the bytes, and a scale for each tensor.
    - ``topk`` sends the entries of largest magnitude, a ``share`` of each tensor, with their numbers. What was not sent stays with the
      client and is added to its next change (error feedback, Stich et al., NeurIPS 2018). Tensors that are no change are sent whole.

    Args:
        up: what clients send.
        down: what they receive before they train. Models are measured as the server has them.
        share: of each tensor's entries that ``topk`` sends, at least one.
    """

    up: Literal["none", "bf16", "int8", "topk"] = "none"
    down: Literal["none", "bf16", "int8"] = "none"
    share: Fraction = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise FederationError(f"compression.share is {self.share}: give the share of entries that topk sends, in (0, 1].")

    def compress_update(self, state: State, received: State, owed: Mapping[str, Tensor]) -> tuple[State, State]:
        """What a client sends. Draws from torch's random stream.

        Args:
            state: its update.
            received: what it received.
            owed: what it did not send before, by name.

        Returns:
            What travels, and what is owed now.
        """
        sent, left = State(), State()
        for name, tensor in state.items():
            change = _change(tensor, received.get(name))
            if not tensor.is_floating_point() or self.up == "none" or not bool(change.isfinite().all()):
                sent[name] = tensor
            elif self.up == "topk":
                if name in received and received[name].shape == tensor.shape:
                    change = change + owed.get(name, 0)
                    sent |= self._largest(name, change)
                    left[name] = change - _whole(sent, name, change)
                else:
                    sent[name] = tensor
            else:
                sent |= _rounded(name, change, self.up)
        return sent, left

    def expand_update(self, sent: State, received: State) -> State:
        """The update that arrives.

        Args:
            sent: what :meth:`compress_update` made.
            received: what its sender received.
        """
        if self.up == "none":
            return sent
        found = State()
        for name, tensor in sent.items():
            like = received.get(name)
            if name.startswith((SCALE, INDEX)):
                continue
            if f"{INDEX}{name}" in sent and like is not None:
                found[name] = like + _whole(sent, name, like)
            elif (self.up == "bf16" and tensor.dtype == torch.bfloat16) or f"{SCALE}{name}" in sent:
                change = _expanded(sent, name)
                found[name] = like + change.to(like.dtype) if like is not None and like.shape == change.shape else change
            else:
                found[name] = tensor
        return found

    def compress_broadcast(self, state: State) -> State:
        """What the server sends. Draws from torch's random stream."""
        if self.down == "none":
            return state
        sent = State()
        for name, tensor in state.items():
            whole = not tensor.is_floating_point() or not bool(tensor.isfinite().all())
            sent |= {name: tensor} if whole else _rounded(name, tensor, self.down)
        return sent

    def expand_broadcast(self, sent: State) -> State:
        """What a client receives, in float32 where it was rounded."""
        if self.down == "none":
            return sent
        return {name: _expanded(sent, name) for name in sent if not name.startswith(SCALE)}

    def _largest(self, name: str, change: Tensor) -> State:
        flat = change.flatten()
        places = flat.abs().topk(max(1, math.ceil(self.share * flat.numel())) if flat.numel() else 0).indices.sort().values
        return {name: flat[places], f"{INDEX}{name}": places.int()}


def _change(tensor: Tensor, received: Tensor | None) -> Tensor:
    return tensor - received if received is not None and received.shape == tensor.shape and tensor.is_floating_point() else tensor


def _rounded(name: str, values: Tensor, how: str) -> State:
    if how == "bf16":
        return {name: values.bfloat16()}
    scale = values.abs().max().float() if values.numel() else torch.tensor(0.0)
    levels = values.float() * (LEVELS / scale) if scale > 0 else torch.zeros_like(values, dtype=torch.float32)
    lower = levels.floor()
    drawn = lower + (torch.rand_like(levels) < levels - lower)
    return {name: drawn.clamp(-LEVELS, LEVELS).to(torch.int8), f"{SCALE}{name}": scale}


def _expanded(sent: State, name: str) -> Tensor:
    tensor = sent[name]
    if f"{SCALE}{name}" in sent:
        return tensor.float() * (sent[f"{SCALE}{name}"] / LEVELS)
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def _whole(sent: State, name: str, like: Tensor) -> Tensor:
    """A tensor of which some entries were sent; the others are zero."""
    whole = torch.zeros_like(like).flatten()
    whole[sent[f"{INDEX}{name}"].long()] = sent[name]
    return whole.view_as(like)
