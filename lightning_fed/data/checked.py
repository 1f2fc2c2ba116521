"""What data give, as the tensors that everything else takes: arrays converted, and what has no meaning refused."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fed.data.arrays import as_inputs
from lightning_fed.data.batches import INPUT, Inputs
from lightning_fed.data.lazy import LazyInputs
from lightning_fed.errors import FederationError, require


def checked_pools(given: Any, name: str) -> tuple[Inputs, Tensor, Inputs, Tensor]:
    """Inputs and labels of both sets, as tensors.

    Args:
        given: what :meth:`.FederatedDataModule.load` returned: tensors, arrays or lists.
        name: of the data.

    Raises:
        FederationError: if it is something else, or if labels are not whole numbers, one per example.
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
    """Inputs as tensors, or what makes them.

    Args:
        given: tensors, arrays or lists, by name or not.
        what: they are, for an error.
    """
    if isinstance(given, LazyInputs):
        return given
    try:
        return as_inputs(given)
    except FederationError as error:
        raise FederationError(f"The {what}: {error}") from error


def as_labels(given: Any, what: str) -> Tensor:
    """Labels as a tensor of shape (N,), int64.

    Args:
        given: a tensor, an array or a list.
        what: they are, for an error.

    Raises:
        FederationError: if they are not whole numbers, one per example.
    """
    try:
        labels = given if isinstance(given, Tensor) else torch.as_tensor(np.asarray(given))
    except (TypeError, ValueError, RuntimeError) as error:
        raise FederationError(f"The {what} are {_kind(given)}: expected whole numbers from 0, one per example.") from error
    require(
        labels.dim() == 1,
        f"The {what} have the shape {tuple(labels.shape)}: expected one whole number per example, shape (N,)"
        + (", as argmax(1) makes it of one-hot labels." if labels.dim() == 2 else "."),
    )
    if labels.is_complex():
        raise FederationError(f"The {what} are complex: expected whole numbers from 0.")
    if labels.is_floating_point() and (wrong := labels != labels.floor()).any():  # NaN, too
        row = int(wrong.int().argmax())
        raise FederationError(f"The {what} have {labels[row].item():g} in row {row}: expected whole numbers from 0.")
    if labels.is_floating_point() and labels.isinf().any():
        raise FederationError(
            f"The {what} have infinity in row {int(labels.isinf().int().argmax())}: expected whole numbers from 0."
        )
    return labels.long()


def check_labels(name: str, num_classes: int, num_images: int, labels: Tensor) -> None:
    """Refuse labels that do not fit the images or the number of classes.

    Args:
        name: of the data.
        num_classes: how many there may be.
        num_images: how many examples there are.
        labels: shape (N,), int64.
    """
    require(len(labels) == num_images, f"Got {num_images} images and {len(labels)} labels: give one label per image.")
    require(num_images > 0, f"{name} has no images: give at least one per client.")
    low, high = int(labels.min()), int(labels.max())
    wrong = (labels < 0) | (labels >= num_classes)
    require(
        low >= 0 and high < num_classes,
        f"{name} has {num_classes} classes, so labels go from 0 to {num_classes - 1}, but got {low} to {high}, first in example "
        f"{int(wrong.int().argmax())}: is this another dataset?",
    )


def refuse_no_numbers(inputs: Inputs) -> None:
    """Refuse inputs with NaN or infinity, which would look as if the training diverged.

    Args:
        inputs: of all examples; what is read lazily is not looked at, and masks may have infinity.
    """
    if isinstance(inputs, LazyInputs):
        return
    named = inputs if isinstance(inputs, Mapping) else {INPUT: inputs}
    for name, tensor in cast(Mapping[str, Tensor], named).items():
        if not tensor.is_floating_point():
            continue
        wrong = tensor.isnan() if "mask" in name else ~tensor.isfinite()
        if wrong.any():
            row = int(wrong.flatten(1).any(1).int().argmax()) if tensor.dim() > 1 else int(wrong.int().argmax())
            raise FederationError(
                f"Example {row} of the data has {tensor[row][wrong[row]][0].item() if tensor.dim() > 1 else tensor[row].item()} in "
                f"its {name}: expected numbers; leave it out, or replace what is missing."
            )


def pick_column(name: str, columns: Mapping[str, NDArray[Any]], column: str) -> NDArray[Any]:
    """One of the columns that data have.

    Args:
        name: of the data.
        columns: all of them.
        column: the name of the one that is wanted.
    """
    known = ", ".join(columns) or "none"
    require(
        column in columns,
        f"{name} has no column {column!r}, its columns are: {known}. Check the partition's column, client and split_column.",
    )
    return columns[column]


def _kind(given: Any) -> str:
    return f"a {type(given).__name__} of {len(given)}" if isinstance(given, Sequence | Mapping) else f"a {type(given).__name__}"
