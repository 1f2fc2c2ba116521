"""Conversion of given data to tensors, with checks of their values."""

import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fed.data.batches import INPUT, Inputs
from lightning_fed.data.lazy import LazyInputs
from lightning_fed.errors import FederationError, require

log = logging.getLogger(__name__)

Array = Tensor | NDArray[Any]
"""A tensor, or an array that is converted to one."""

Given = Array | Mapping[str, Array] | LazyInputs
"""Inputs as users provide them."""

CHANNELS = 1, 3, 4
"""Numbers of channels of images: grey, colours, and colours with opacity."""


WHOLE = 2**24
"""The largest number up to which float32 has all whole numbers."""


def checked_pools(given: Any, name: str) -> tuple[Inputs, Tensor, Inputs, Tensor]:
    """Inputs and labels of both sets, as tensors, of what :meth:`.FederatedDataModule.load` returned: tensors, arrays or lists.

    Raises:
        FederationError: for anything else, or if labels are not integers, one per example.
    """
    require(
        isinstance(given, Sequence) and not isinstance(given, str) and len(given) == 4,
        f"load() of {name} returned {_kind(given)}, expected four things: training inputs and labels, test inputs and labels.",
    )
    train, train_labels, test, test_labels = given
    inputs = checked_inputs(train, f"training inputs of {name}"), checked_inputs(test, f"test inputs of {name}")
    first = as_labels(train_labels, f"training labels of {name}")
    return inputs[0], first, inputs[1], as_labels(test_labels, f"test labels of {name}")


def checked_inputs(given: Any, what: str) -> Inputs:
    """Inputs as tensors, or as lazy inputs."""
    if isinstance(given, LazyInputs):
        return given
    if isinstance(given, Mapping):
        return {name: _tensor_of(values, what) for name, values in given.items()}
    return _tensor_of(given, what)


def _tensor_of(given: Any, what: str) -> Tensor:
    """A tensor as it is, but for gradients, which are those of a network; else :func:`as_tensor`."""
    return given.detach() if isinstance(given, Tensor) else as_tensor(given, what)


def as_tensor(given: Any, what: str = "inputs", columns: Sequence[str] | None = None) -> Tensor:
    """Convert numbers to a tensor that a network takes. Memory is shared if nothing has to change. See also
    :func:`warn_of_rounding`.

    Args:
        given: an array or lists. Bytes are images: grey, (N, H, W), or channels last, (N, H, W, C), or first, (N, C, H, W), where
            C is 1, 3 or 4; if both are possible, channels first. Floats, of 64 bits in NumPy by default, are converted to PyTorch's
            default.
        what: name of the data, for errors.
        columns: names of the columns of a table, for warnings. None: their numbers.

    Raises:
        FederationError: if these are no numbers, or rows of different lengths.
    """
    try:
        array = np.asarray(given)
    except ValueError as error:
        raise FederationError(f"The {what}: rows of different shapes ({error}): expected numbers of one shape each.") from error
    require(array.dtype.kind in "buif", f"The {what}: {array.dtype} of shape {array.shape}, expected numbers.")
    require(not np.ma.is_masked(given), f"The {what}: masked numbers in an array; leave the examples out, or fill them in.")
    if array.dtype == np.longdouble:  # torch does not have it
        array = array.astype(np.float64)
    tensor = _shared(array)
    if tensor.is_floating_point():
        numbers = tensor.to(torch.get_default_dtype())
        if tensor.dtype != numbers.dtype and tensor.dim() == 2:
            for place in (tensor.abs() >= WHOLE).any(dim=0).nonzero().flatten().tolist():
                name = place if columns is None else columns[place]
                warn_of_rounding(array[:, place], numbers[:, place].float().numpy(), f"{what}: the column {name!r}")
        return numbers
    if tensor.dtype == torch.uint8 and tensor.dim() == 3:
        return tensor[:, None]
    if tensor.dtype == torch.uint8 and tensor.dim() == 4 and tensor.shape[1] not in CHANNELS and tensor.shape[3] in CHANNELS:
        return tensor.permute(0, 3, 1, 2).contiguous()
    return tensor


def warn_of_rounding(values: NDArray[Any], numbers: NDArray[np.float32], what: str) -> None:
    """Warn about a column whose numbers are so large that different ones become equal: whole ones, or most of those with a
    fraction, whose last digits may not matter.

    Args:
        values: the numbers as they were given, shape (N,), possibly as text.
        numbers: the numbers as the network gets them, shape (N,).
        what: name of the column.
    """
    if np.abs(numbers).max() < WHOLE:
        return
    exact = values.astype(np.float64)
    distinct, left = len(np.unique(exact)), len(np.unique(numbers))
    if left < distinct and ((exact == np.floor(exact)).all() or left < distinct / 2):
        log.warning(
            f"{what} has numbers above {WHOLE}, which float32 rounds: of {distinct} different ones {left} are left. Subtract a "
            "constant from the column, or divide it into parts."
        )


def _shared(array: NDArray[Any]) -> Tensor:
    """A tensor with the memory of an array, unless that is in another order, of rows or of bytes. Nothing writes to it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # of a pandas table, or of a file
        return torch.from_numpy(np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C"))


def as_labels(given: Any, what: str) -> Tensor:
    """Labels of shape (N,) or (N, 1) as a tensor of shape (N,), int64.

    Raises:
        FederationError: if they are not integers, one per example.
    """
    try:
        labels = given if isinstance(given, Tensor) else _shared(np.asarray(given))
    except (TypeError, ValueError, RuntimeError) as error:
        raise FederationError(f"The {what} are {_kind(given)}: expected whole numbers from 0, one per example.") from error
    labels = labels.flatten() if labels.shape[1:] == (1,) else labels
    require(
        labels.dim() == 1,
        f"The {what} have the shape {tuple(labels.shape)}: expected one whole number per example, shape (N,)"
        + (", such as argmax(1) of one-hot labels." if labels.dim() == 2 else "."),
    )
    require(not labels.is_complex(), f"The {what} are complex: expected whole numbers from 0.")
    if labels.is_floating_point() and (wrong := ~labels.isfinite() | (labels != labels.floor())).any():
        row = int(wrong.int().argmax())
        raise FederationError(f"The {what} have {labels[row].item():g} in row {row}: expected whole numbers from 0.")
    return labels.long()


def check_labels(name: str, num_classes: int, num_images: int, labels: Tensor) -> None:
    """Refuse labels, shape (N,), int64, that do not fit the images or the number of classes."""
    require(len(labels) == num_images, f"Got {num_images} images and {len(labels)} labels: give one label per image.")
    require(num_images > 0, f"{name} has no images: give at least one per client.")
    low, high = int(labels.min()), int(labels.max())
    wrong = (labels < 0) | (labels >= num_classes)
    require(
        low >= 0 and high < num_classes,
        f"{name} has {num_classes} classes, so labels go from 0 to {num_classes - 1}, but got {low} to {high}, first in example "
        f"{int(wrong.int().argmax())}: is this another dataset?",
    )


def refuse_no_numbers(inputs: Inputs, what: str = "the data") -> None:
    """Refuse inputs with NaN or infinity, which would look like diverged training. Lazy inputs are not checked, and masks may
    contain infinity.
    """
    if isinstance(inputs, LazyInputs):
        return
    for name, tensor in (inputs if isinstance(inputs, dict) else {INPUT: inputs}).items():
        if not tensor.is_floating_point():
            continue
        rows = tensor.reshape(len(tensor), -1)
        wrong = rows.isnan() if "mask" in name else ~rows.isfinite()
        if wrong.any():
            row = int(wrong.any(1).int().argmax())
            raise FederationError(
                f"Example {row} of {what} has {rows[row][wrong[row]][0].item()} in its {name}: expected numbers; leave it out, "
                "or replace what is missing."
            )


def pick_column(name: str, columns: Mapping[str, Any], column: str) -> NDArray[Any]:
    """A column of the data, by name."""
    known = ", ".join(columns) or "none"
    require(
        column in columns,
        f"{name} has no column {column!r}, its columns are: {known}. Check the partition's column, client, group and split_column.",
    )
    return np.asarray(columns[column][:])


def _kind(given: Any) -> str:
    return f"a {type(given).__name__} of {len(given)}" if isinstance(given, Sequence | Mapping) else f"a {type(given).__name__}"
