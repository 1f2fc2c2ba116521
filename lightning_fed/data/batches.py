"""Batches cut from shared tensors: a batch is one indexing of each, with no Python per example."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_fed.data.vision.augment import random_crop_flip
from lightning_fed.errors import FederationError, require
from lightning_fed.seeding import derive_seed

Inputs = Tensor | dict[str, Tensor]
"""Images, or what a network takes by name (tokenised texts): tensors of shape (N, …), with one row per example."""

Batch = tuple[Inputs, Tensor]
"""Images, or other inputs, and what is to be predicted."""

TARGETS = "targets"
"""Name, among the inputs, of what is to be predicted where that is not the label; a network does not get it."""

INPUT = "input"
"""Name, among the inputs, of what a network takes as it is and not by name, beside :data:`TARGETS`: images, or rows of numbers."""

EXAMPLE = "example"
"""Name, among the inputs, of the number of the example that a row belongs to, shape (N,). A network drops it."""

ROUND_UP = 8
"""Batches of texts have a multiple of so many columns, so that few shapes occur: a step is counted once per shape."""


def take(inputs: Inputs, rows: Tensor | slice) -> Inputs:
    """Some of the examples."""
    return inputs[rows] if isinstance(inputs, Tensor) else {name: tensor[rows] for name, tensor in inputs.items()}


def join(first: Inputs, second: Inputs) -> Inputs:
    """The examples of both."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.cat([first, second])
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        return {name: torch.cat([first[name], second[name]]) for name in first}
    kinds = ["one tensor" if isinstance(inputs, Tensor) else ", ".join(inputs) for inputs in (first, second)]
    raise FederationError(f"The inputs of the training set are {kinds[0]}, those of the test set {kinds[1]}: give the same kind.")


def count(inputs: Inputs) -> int:
    """Number of examples."""
    rows = [len(tensor) for tensor in ([inputs] if isinstance(inputs, Tensor) else inputs.values())]
    require(len(set(rows)) == 1, f"Inputs must have one row per example each, but have {rows} rows.")
    return rows[0]


def trimmed(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tokenised texts without the columns that are padding in all of them, except those up to a multiple of 8.

    Args:
        inputs: with an ``attention_mask``, shape (B, L): every tensor of L columns is cut alike. Without, nothing is.
    """
    mask = inputs.get("attention_mask")
    if mask is None:
        return inputs
    last = max(mask.any(dim=0).nonzero().flatten().tolist(), default=0)
    kept = (last // ROUND_UP + 1) * ROUND_UP
    same = [name for name, tensor in inputs.items() if tensor.shape[1:2] == mask.shape[1:]]
    return inputs | {name: inputs[name][:, :kept].contiguous() for name in same}


def _as_it_is(batch: Any) -> Any:
    return batch  # it consists of tensors already


class ShuffledBatches(Sampler[Tensor]):
    """Batches of indices, shuffled anew each epoch; the last one may be smaller.

    The order is a function of ``seed`` and the epoch. Lightning calls :meth:`set_epoch`.

    Args:
        indices: what to shuffle.
        batch_size: size of a batch.
        seed: non-negative.
    """

    def __init__(self, indices: Tensor, batch_size: int, seed: int) -> None:
        self.indices = indices
        self.batch_size = batch_size
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        """The epoch's batches."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, self.epoch))
        order = torch.randperm(len(self.indices), generator=generator)
        return iter(torch.split(self.indices[order], self.batch_size))

    def __len__(self) -> int:
        """Number of batches."""
        return -(-len(self.indices) // self.batch_size)


class SharedTensors(Dataset[Batch]):
    """Images, or other inputs, and labels that every client's loaders index.

    Args:
        images: shape (N, …); or tensors of that shape by the name by which a network takes them, and perhaps :data:`TARGETS`.
        labels: shape (N,), int64.
    """

    def __init__(self, images: Inputs, labels: Tensor) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        """Number of examples."""
        return len(self.labels)

    def __getitem__(self, indices: Tensor) -> Batch:
        """A batch: the examples at the given indices; texts are as long as the longest of them, see :func:`trimmed`."""
        inputs, labels = take(self.images, indices), self.labels[indices]
        if isinstance(inputs, Tensor):
            return inputs, labels
        inputs = trimmed(inputs)
        targets = inputs.pop(TARGETS, labels)
        return inputs.pop(INPUT) if inputs.keys() == {INPUT} else inputs, targets

    def shuffled(self, indices: Tensor, batch_size: int, seed: int) -> DataLoader[Batch]:
        """A loader for training."""
        return DataLoader(self, sampler=ShuffledBatches(indices, batch_size, seed), batch_size=None, collate_fn=_as_it_is)

    def in_order(self, indices: Tensor, batch_size: int, no_single: bool = False) -> DataLoader[Batch] | list[Batch]:
        """A loader for evaluation; without examples an empty list, which Lightning takes for "nothing to do".

        Args:
            indices: of the examples.
            batch_size: size of a batch; the last one may be smaller.
            no_single: let the last batch be larger by one example where that example would be alone: it has no variance.
        """
        batches = list(torch.split(indices, batch_size))
        if no_single and len(batches) > 1 and len(batches[-1]) == 1:
            batches[-2:] = [torch.cat(batches[-2:])]
        return DataLoader(self, sampler=batches, batch_size=None, collate_fn=_as_it_is) if len(indices) else []


@dataclass(frozen=True)
class BatchTransform:
    """Turns a batch of bytes into what a network takes, on the device where the batch is.

    Args:
        mean: per channel, of pixels in [0, 1].
        std: the same.
        augment: what training batches go through first.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: Literal["none", "crop_flip"]

    @cached_property
    def _levels(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation, each ``(C, 1, 1)``."""
        mean, std = (torch.tensor(values)[:, None, None] for values in (self.mean, self.std))
        return mean, std

    @cached_property
    def _plain(self) -> bool:
        return set(self.mean) == {0.0} and set(self.std) == {1.0}

    def __call__(self, batch: Batch, trainer: L.Trainer | None) -> Batch:
        """The batch as floats of the Trainer's precision; anything but bytes passes unchanged."""
        images, labels = batch
        if isinstance(images, dict) or images.dtype != torch.uint8:
            return batch
        if self.augment == "crop_flip" and trainer is not None and trainer.training:
            images = random_crop_flip(images)
        images = images / 255
        if not self._plain:
            mean, std = (levels.to(images.device) for levels in self._levels)
            images = images.sub_(mean).div_(std)
        if trainer is not None:
            # Lightning converts a batch before its transfer, when these images were still bytes.
            images = trainer.precision_plugin.convert_input(images)
        return images, labels
