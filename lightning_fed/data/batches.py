"""Batches cut from shared tensors: a batch is one indexing operation per tensor, without Python code per example."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_fed.data.lazy import Joined, LazyInputs, Taken
from lightning_fed.errors import FederationError, require
from lightning_fed.seeding import derive_seed

Inputs = Tensor | dict[str, Tensor] | LazyInputs
"""Images, or named inputs of a network (tokenized texts): tensors of shape (N, …), with one row per example; or an object that
makes the images of a batch on demand.
"""

Batch = tuple[Tensor | dict[str, Tensor], Tensor]
"""Images or other inputs, and the targets."""

TARGETS = "targets"
"""Name of the targets among the inputs, if the labels are not the targets; networks do not get it."""

INPUT = "input"
"""Name of an unnamed input of a network, beside :data:`TARGETS`: images, or rows of numbers."""

EXAMPLE = "example"
"""Name, among the inputs, of the number of the example that each row belongs to, shape (N,). Networks do not get it."""

SingleExample = Literal["join", "drop", "keep"]
"""What to do with an example that would be alone in the last training batch, see :func:`batches_of`."""

ROUND_UP = 8
"""Batches of texts are padded to a multiple of this many columns, so that few shapes occur: a step is counted once per shape."""


def take(inputs: Inputs, rows: Tensor | slice) -> Inputs:
    """The inputs of some examples."""
    if isinstance(inputs, LazyInputs):
        return Taken(inputs, torch.arange(len(inputs))[rows])
    return _rows(inputs, rows) if isinstance(inputs, Tensor) else {name: _rows(tensor, rows) for name, tensor in inputs.items()}


def _rows(tensor: Tensor, rows: Tensor | slice) -> Tensor:
    """Rows by their numbers, which ``index_select`` copies whole; indexing would copy one value after the other."""
    return tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)


def join(first: Inputs, second: Inputs) -> Inputs:
    """The inputs of the first examples, then those of the second."""
    if isinstance(first, Taken) and isinstance(second, Taken) and first.inputs is second.inputs:
        return Taken(first.inputs, torch.cat([first.rows, second.rows]))
    if isinstance(first, LazyInputs) and isinstance(second, LazyInputs):
        return Joined(first, second)
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return _both(first, second, "inputs")
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        return {name: _both(first[name], second[name], name) for name in first}
    kinds = [_kind(inputs) for inputs in (first, second)]
    raise FederationError(f"The inputs of the training set are {kinds[0]}, those of the test set {kinds[1]}: give the same kind.")


def _both(first: Tensor, second: Tensor, name: str) -> Tensor:
    kinds = [f"{tensor.dtype} of shape {tuple(tensor.shape[1:])}" for tensor in (first, second)]
    require(
        kinds[0] == kinds[1],
        f"The {name} of the training set are {kinds[0]}, those of the test set {kinds[1]}: give examples of one kind and size.",
    )
    return torch.cat([first, second])


def _kind(inputs: Inputs) -> str:
    if isinstance(inputs, dict):
        return ", ".join(inputs)
    return "one tensor" if isinstance(inputs, Tensor) else "read lazily"


def count(inputs: Inputs) -> int:
    """Number of examples."""
    tensors = list(inputs.values()) if isinstance(inputs, dict) else [inputs]
    require(len(tensors) > 0, "Inputs by name are an empty dict: give at least one tensor.")
    require(
        all(not isinstance(t, Tensor) or t.dim() > 0 for t in tensors), "Inputs must have a row per example, got a single number."
    )
    rows = [len(tensor) for tensor in tensors]
    require(len(set(rows)) == 1, f"Inputs must have one row per example each, but have {rows} rows.")
    return rows[0]


def trimmed(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tokenized texts without columns that are padding in all of them, rounded up to a multiple of 8 columns. With an
    ``attention_mask`` of shape (B, L), all tensors with L columns are cut; else none is.
    """
    mask = inputs.get("attention_mask")
    if mask is None:
        return inputs
    last = max(mask.any(dim=0).nonzero().flatten().tolist(), default=0)
    kept = (last // ROUND_UP + 1) * ROUND_UP
    same = [name for name, tensor in inputs.items() if tensor.shape[1:2] == mask.shape[1:]]
    return inputs | {name: inputs[name][:, :kept].contiguous() for name in same}


def batches_of(order: Tensor, batch_size: int, single_example: SingleExample) -> list[Tensor]:
    """Cut indices, shape (N,), into batches of a size; the last one may be smaller.

    Batch norm cannot train on one value per channel. If a single example is left for the last batch, it can ``join`` the previous
    batch, be left out (``drop``), or be a batch (``keep``), as in published protocols, for networks without batch norm. If there is
    only one example, or batches are of size 1, it is always kept.
    """
    batches = list(torch.split(order, batch_size))
    if num_batches(len(order), batch_size, single_example) < len(batches):
        lone = batches.pop()
        if batches and single_example == "join":  # without examples there is one empty batch
            batches[-1] = torch.cat([batches[-1], lone])
    return batches


def num_batches(examples: int, batch_size: int, single_example: SingleExample) -> int:
    """Number of batches that :func:`batches_of` makes."""
    full, rest = divmod(examples, batch_size)
    alone = rest == 1 and full > 0 and single_example != "keep"
    return full + (rest > 0 and not alone)


def _as_it_is(batch: Any) -> Any:
    return batch  # already tensors


class ShuffledBatches(Sampler[Tensor]):
    """Batches of indices, shuffled anew each epoch; the last one may be smaller, see :func:`batches_of`.

    The order is a function of ``seed`` and the epoch. Lightning calls :meth:`set_epoch` after it has created an iterator, so the
    order is made when the first batch is requested.

    Args:
        indices: indices to shuffle.
        batch_size: size of a batch.
        seed: non-negative.
        single_example: what to do with an example that would be alone in the last batch.
        start: number of batches used before, for batches that continue where the last iteration stopped, also in the middle of a
            permutation. None: each iteration is an epoch of its own.
    """

    def __init__(
        self, indices: Tensor, batch_size: int, seed: int, single_example: SingleExample = "join", start: int | None = None
    ) -> None:
        self.indices = indices
        self.batch_size = batch_size
        self.seed = seed
        self.single_example: SingleExample = single_example
        self.played = start  # batches used so far; None: not counted
        self.epoch = 0
        self.position = 0  # batches of the epoch used so far
        self._stopped: tuple[int, int] | None = None  # epoch and position at which the next iteration continues

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        """The epoch's batches, or the remaining ones of an interrupted epoch."""
        stopped, self._stopped = self._stopped, None
        return self._play(stopped)

    def _play(self, stopped: tuple[int, int] | None) -> Iterator[Tensor]:
        start = stopped[1] if stopped and stopped[0] == self.epoch else 0
        number, batches = -1, list[Tensor]()
        for position in range(start, len(self)):
            wanted, place = (self.epoch, position) if self.played is None else divmod(self.played, len(self))
            if wanted != number:
                generator = torch.Generator().manual_seed(derive_seed(self.seed, wanted))
                order = self.indices[torch.randperm(len(self.indices), generator=generator)]
                number, batches = wanted, batches_of(order, self.batch_size, self.single_example)
            self.position = position + 1
            if self.played is not None:
                self.played += 1
            yield batches[place]

    def state_dict(self) -> dict[str, int]:
        """The current epoch and position."""
        return {"epoch": self.epoch, "position": self.position} | ({} if self.played is None else {"played": self.played})

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue the next iteration there, if it has the same epoch."""
        self._stopped = state["epoch"], state["position"]
        self.played = state.get("played")

    def __len__(self) -> int:
        return num_batches(len(self.indices), self.batch_size, self.single_example)


class PoissonBatches(Sampler[Tensor]):
    """Poisson samples of indices: each batch contains each index with probability ``batch_size`` / N, independently, and may be
    empty. An epoch has ⌈N / ``batch_size``⌉ batches. They are a function of ``seed`` and the epoch.

    Args:
        indices: indices to sample from, shape (N,).
        batch_size: expected batch size.
        seed: non-negative.
    """

    def __init__(self, indices: Tensor, batch_size: int, seed: int) -> None:
        self.indices, self.batch_size, self.seed, self.epoch = indices, batch_size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the draw of the next iteration."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, self.epoch))
        for _ in range(len(self)):
            drawn = torch.rand(len(self.indices), dtype=torch.float64, generator=generator)
            yield self.indices[drawn * len(self.indices) < self.batch_size]

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch_size)


class ResumableLoader(DataLoader[Batch]):
    """A loader whose state Lightning saves in checkpoints: an interrupted epoch resumes with the next batch."""

    sampler: ShuffledBatches

    def state_dict(self) -> dict[str, int]:
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.sampler.load_state_dict(state)


@dataclass(eq=False)
class SharedTensors(Dataset[Batch]):
    """Images or other inputs, and labels, which all clients' loaders index.

    Args:
        images: tensor of shape (N, …); tensors of that shape by their names in the network, possibly with :data:`TARGETS`; or an
            object that makes a batch of them on demand.
        labels: shape (N,), int64.
        targets_are_labels: whether :data:`TARGETS` are ignored.
    """

    images: Inputs
    labels: Tensor
    targets_are_labels: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, indices: Tensor) -> Batch:
        """The batch of the examples at the given indices; texts are cut to the longest, see :func:`trimmed`."""
        labels = _rows(self.labels, indices)
        read = self.images.read(indices) if isinstance(self.images, LazyInputs) else take(self.images, indices)
        if isinstance(read, Tensor):
            return read, labels
        assert isinstance(read, dict)
        inputs = read if isinstance(self.images, LazyInputs) else trimmed(read)
        targets = inputs.pop(TARGETS, labels)
        targets = labels if self.targets_are_labels else targets
        return inputs.pop(INPUT) if inputs.keys() == {INPUT} else inputs, targets

    @property
    def input_shape(self) -> tuple[int, ...] | None:
        """Shape of one input of a network; None for several named inputs."""
        inputs, _ = self[torch.zeros(1, dtype=torch.int64)]
        return tuple(inputs.shape[1:]) if isinstance(inputs, Tensor) else None

    def targets(self, indices: Tensor | slice) -> Tensor:
        """The targets of the examples at the given indices."""
        named = self.images.get(TARGETS) if isinstance(self.images, dict) else None
        return (self.labels if named is None else named)[indices]

    def shuffled(
        self, indices: Tensor, batch_size: int, seed: int, single_example: SingleExample = "join", start: int | None = None
    ) -> DataLoader[Batch]:
        """A loader for training; the arguments are those of :class:`ShuffledBatches`."""
        sampler = ShuffledBatches(indices, batch_size, seed, single_example, start)
        return ResumableLoader(self, sampler=sampler, **self._options())

    def sampled(self, indices: Tensor, batch_size: int, seed: int) -> DataLoader[Batch]:
        """A loader of Poisson samples; the arguments are those of :class:`PoissonBatches`."""
        return DataLoader(self, sampler=PoissonBatches(indices, batch_size, seed), **self._options())

    def in_order(self, indices: Tensor, batch_size: int, no_single: bool = False) -> DataLoader[Batch] | list[Batch]:
        """A loader for evaluation, whose last batch may be smaller; without examples an empty list, which Lightning skips. With
        ``no_single``, a single example that would be the last batch joins the previous one, because it has no variance.
        """
        batches = batches_of(indices, batch_size, "join" if no_single else "keep")
        return DataLoader(self, sampler=batches, **self._options()) if len(indices) else []

    @staticmethod
    def _options() -> dict[str, Any]:
        """Options of a loader whose sampler yields whole batches. Lightning creates many iterators, each of which draws an unused
        number; with its own generator a loader does not shift other random draws.
        """
        return {"batch_size": None, "collate_fn": _as_it_is, "generator": torch.Generator()}


@dataclass(frozen=True)
class BatchTransform:
    """Converts a batch of bytes into a network's input, on the device of the batch.

    Args:
        mean: mean per channel, of pixels in [0, 1].
        std: standard deviation per channel.
        augment: augmentation of training batches.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: Literal["none", "crop_flip"]

    def __post_init__(self) -> None:
        good = all(math.isfinite(value) for value in (*self.mean, *self.std)) and min(self.std) > 0
        require(good, f"Got mean={list(self.mean)} and std={list(self.std)}: give numbers, and of std numbers above 0.")

    def check(self, inputs: Inputs) -> None:
        """Refuse what has no effect, or the wrong one: bytes that are no images, which would be divided by 255; augmentation of
        anything but byte images, or of images whose targets have places, too; and byte images whose number of channels differs
        from that of means and standard deviations. Of lazy inputs the first is read, if there is augmentation.
        """
        if isinstance(inputs, LazyInputs):
            if self.augment == "none":
                return
            inputs = inputs.read(torch.zeros(1, dtype=torch.int64))
        named = inputs if isinstance(inputs, dict) else {INPUT: inputs}
        images = named.get(INPUT)
        if images is None or images.dtype != torch.uint8:
            require(self.augment == "none", f"Got augment={self.augment}, which is for images of bytes: leave it out.")
            return
        require(
            images.dim() >= 3,
            f"The inputs are {images.dtype} of shape {tuple(images.shape)}, but bytes are images, which are divided by 255: "
            "convert a table of numbers to float32, or give images their height and width, shape (N, H, W) or (N, C, H, W).",
        )
        require(
            self.augment == "none" or TARGETS not in named or named[TARGETS].dim() < 3,
            f"Got augment={self.augment}, which would move images, but not their targets, such as masks: leave it out.",
        )
        channels = images.shape[1]
        for name, values in (("mean", self.mean), ("std", self.std)):
            require(
                len(values) in (1, channels),
                f"Got {name}={list(values)} for images of shape {tuple(images.shape[1:])}: give 1 number"
                + (f" or {channels}, one per channel." if channels > 1 else "."),
            )

    @cached_property
    def _levels(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation, each ``(C, 1, 1)``."""
        mean, std = (torch.tensor(values)[:, None, None] for values in (self.mean, self.std))
        return mean, std

    @cached_property
    def _plain(self) -> bool:
        return set(self.mean) == {0.0} and set(self.std) == {1.0}

    def __call__(self, batch: Batch, trainer: L.Trainer | None) -> Batch:
        """The batch as floats in the Trainer's precision; other inputs than bytes are returned unchanged."""
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


def random_crop_flip(images: Tensor, padding: int = 4) -> Tensor:
    """Shift each image by up to ``padding`` pixels, filling with zeros, and flip half of them horizontally.

    Random numbers come from torch's global CPU generator on every device, so that a seed gives the same augmentation everywhere.

    Args:
        images: batch of shape (B, C, H, W). Apply it before normalization, so that the filling is black.
        padding: maximum shift in pixels.
    """
    count, channels, height, width = images.shape
    shift = torch.randint(0, 2 * padding + 1, (2, count, 1))
    mirrored = torch.rand(count, 1) < 0.5
    rows = torch.arange(height) + shift[0]
    columns = torch.arange(width) + shift[1]
    columns = torch.where(mirrored, columns.flip(1), columns)
    places = (rows[:, :, None] * (width + 2 * padding) + columns[:, None, :]).flatten(1).to(images.device)  # (B, H W)
    padded = pad(images, (padding,) * 4).flatten(2)
    return padded.gather(2, places[:, None].expand(-1, channels, -1)).view_as(images)
