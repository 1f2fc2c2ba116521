"""Tensors by name: how many, how large, and whether they are those that were expected."""

import numpy as np
import torch
from torch import Tensor

from lightning_fed.errors import FederationError
from lightning_fed.formatting import shown

State = dict[str, Tensor]
"""A payload or a part of a state dict: tensors by name."""


def count_floats(state: State) -> int:
    """Number of values in a payload that are floating-point, or were (int8): the "parameters" of communication costs."""
    return sum(t.numel() for t in state.values() if t.is_floating_point() or t.dtype == torch.int8)


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


def check_finite(state: State, what: str, remedy: str = "lower the learning rate or set gradient_clip") -> None:
    """Check that there is no NaN and no infinity.

    Args:
        state: the tensors.
        what: what ``state`` is, the subject of the error's sentence.
        remedy: how that sentence ends.

    Raises:
        FederationError: naming the tensor.
    """
    for name, tensor in state.items():
        # The sum of a tensor with a NaN or an infinity is one too; looking at every entry takes ten times as long.
        if tensor.is_floating_point() and not torch.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():
            raise FederationError(f"{what} holds NaN or infinity in {name!r}: its training diverged; {remedy}.")


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more tensors" if len(names) > 1 else ""


def widened(tensor: Tensor) -> Tensor:
    """In float32 at least: sums and distances of halves lose digits."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
