"""Tensors by name: their number and size, and checks against expected ones."""

import numpy as np
import torch
from torch import Tensor, nn

from lightning_fed.errors import FederationError
from lightning_fed.formatting import counted, shown

State = dict[str, Tensor]
"""A payload or a part of a state dict: tensors by name."""


def count_floats(state: State) -> int:
    """Number of values of a payload that are floating-point, or were (int8): the "parameters" of communication costs."""
    return sum(t.numel() for t in state.values() if t.is_floating_point() or t.dtype == torch.int8)


def count_bytes(state: State) -> int:
    """Size of a payload in bytes, including integer tensors (counters, and masks packed by :func:`pack_bits`)."""
    return sum(t.numel() * t.element_size() for t in state.values())


def pack_bits(mask: Tensor) -> Tensor:
    """Pack a mask into a bit per value, eight in a byte, in order; unused bits of the last byte are 0.

    Args:
        mask: booleans of any shape, n of them.

    Returns:
        Bytes ``(ceil(n / 8),)``, on the CPU.
    """
    return torch.from_numpy(np.packbits(mask.flatten().numpy(force=True)))


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """Unpack a mask that :func:`pack_bits` packed.

    Args:
        packed: the bytes; more than necessary to get the first part of a mask.
        count: number of values.

    Returns:
        Booleans ``(count,)``.
    """
    return torch.from_numpy(np.unpackbits(packed.numpy(force=True), count=count)).bool()


def second_names(module: nn.Module) -> dict[str, str]:
    """Names in a state dict of tensors that have an earlier one there (tied weights, repeated layers), which is given."""
    first: dict[int, str] = {}
    tensors = {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}
    earlier = {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}
    return {name: other for name, other in earlier.items() if name != other}


def check_fits(state: State, expected: State, what: str) -> None:
    """Check names and shapes of tensors.

    Args:
        state: the tensors to check.
        expected: tensors with the expected names and shapes.
        what: subject of the error message.

    Raises:
        FederationError: names tensors that are missing, unexpected or have another shape.
    """
    if lacking := sorted(expected.keys() - state.keys()):
        raise FederationError(f"{what} lacks {lacking[0]!r}{_and_more(lacking)}.")
    if unexpected := sorted(state.keys() - expected.keys()):
        raise FederationError(f"{what} holds {shown(unexpected[0])}{_and_more(unexpected)}, which does not belong there.")
    for name, like in expected.items():  # a state that was read from a file has no particular order
        if state[name].shape != like.shape:
            raise FederationError(f"{what} has {name!r} of shape {tuple(state[name].shape)}, expected {tuple(like.shape)}.")


def check_dtypes(state: State, expected: State, what: str, remedy: str) -> None:
    """Check the dtypes of tensors that have passed :func:`check_fits`.

    Args:
        state: the tensors to check.
        expected: tensors with the same names and the expected dtypes.
        what: subject of the error message.
        remedy: rest of the message after the expected dtype.

    Raises:
        FederationError: names the tensor.
    """
    for name, like in expected.items():
        if (dtype := state[name].dtype) != like.dtype:
            raise FederationError(f"{what} has {name!r} of {dtype}, expected {like.dtype}{remedy}")


def check_finite(state: State, what: str, remedy: str = "lower the learning rate or set gradient_clip") -> None:
    """Check that there is no NaN and no infinity.

    Args:
        state: the tensors to check.
        what: subject of the error message.
        remedy: end of the error message.

    Raises:
        FederationError: names the tensor.
    """
    for name, tensor in state.items():
        # The sum of a tensor with a NaN or an infinity is one, too; checking every entry takes ten times as long.
        if tensor.is_floating_point() and not torch.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():
            raise FederationError(f"{what} holds NaN or infinity in {name!r}: its training diverged; {remedy}.")


def _and_more(names: list[str]) -> str:
    return f" and {counted(len(names) - 1, 'more tensor')}" if len(names) > 1 else ""


def widened(tensor: Tensor) -> Tensor:
    """A tensor in at least float32: sums and distances of half-precision numbers lose digits."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
