"""NumPy arrays as the tensors that networks take."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fed.data.batches import Inputs
from lightning_fed.data.lazy import LazyInputs
from lightning_fed.errors import FederationError

Array = Tensor | NDArray[Any]
"""A tensor, or an array that becomes one."""

Given = Array | Mapping[str, Array] | LazyInputs
"""Inputs as people have them."""

CHANNELS = (1, 3)
"""How many an image has."""


def as_inputs(given: Given) -> Inputs:
    """Inputs whose arrays have become tensors."""
    if isinstance(given, LazyInputs):
        return given
    if isinstance(given, Mapping):
        return {name: values if isinstance(values, Tensor) else as_tensor(values) for name, values in given.items()}
    return given if isinstance(given, Tensor) else as_tensor(given)


def as_array(given: Any) -> NDArray[Any]:
    """Numbers as an array.

    Raises:
        FederationError: for what are no numbers, or rows of different lengths.
    """
    try:
        array = np.asarray(given)
    except ValueError as error:
        raise FederationError(f"rows of different shapes ({error}): expected numbers of one shape per example.") from error
    if array.dtype.kind not in "buif":
        raise FederationError(f"{array.dtype} of shape {array.shape}: expected numbers.")
    return array


def as_tensor(array: NDArray[Any]) -> Tensor:
    """An array as a network takes it. Memory is shared where nothing has to change.

    Args:
        array: bytes are images: grey, (N, H, W), or channels last, (N, H, W, C), or first, (N, C, H, W), where C is 1 or 3.
            Channels are taken to be first where both would do. Floats of 64 bits, NumPy's default, become those of PyTorch's.
    """
    array = as_array(array)
    if array.dtype == np.longdouble:  # which torch has not
        array = array.astype(np.float64)
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if tensor.dtype == torch.float64:
        return tensor.to(torch.get_default_dtype())
    if tensor.dtype == torch.uint8 and tensor.dim() == 3:
        return tensor[:, None]
    if tensor.dtype == torch.uint8 and tensor.dim() == 4 and tensor.shape[1] not in CHANNELS and tensor.shape[3] in CHANNELS:
        return tensor.permute(0, 3, 1, 2).contiguous()
    return tensor
