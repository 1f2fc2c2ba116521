"""Public inputs, which belong to no client and have no labels, for distillation on the server or on clients."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

from lightning_fed.data.batches import EXAMPLE, TARGETS, Inputs, SharedTensors, count
from lightning_fed.data.lazy import LazyInputs
from lightning_fed.errors import FederationError, require
from lightning_fed.options import ClosedUnitInterval

GREY = 0.299, 0.587, 0.114
"""Weights of red, green and blue in the brightness (ITU-R BT.601)."""


@dataclass(frozen=True)
class PublicShare:
    """A part of the training set that no client gets, drawn before the rest is partitioned.

    Args:
        share: share of the training set.
    """

    share: ClosedUnitInterval

    def drawn(self, num_train: int, seed: int) -> NDArray[np.int64]:
        """Sorted positions of the public examples in the training set, which comes first: a function of the partition's seed."""
        require(0 < self.share < 1, f"Got public.share={self.share}: give a share above 0 and below 1.")
        size = round(self.share * num_train)
        require(size > 0, f"A public share of {self.share} of {num_train} training examples is empty: give a larger one.")
        stream = np.random.default_rng([seed, PUBLIC])
        return np.sort(stream.choice(num_train, size, replace=False)).astype(np.int64)


PUBLIC = 0x9B11C
"""The random stream of a seed that draws the public examples."""


def as_of_clients(public: Inputs, own: Inputs, name: str) -> Inputs:
    """Convert public inputs to the clients' form: images of their size and channels, texts with the same parts.

    Raises:
        FederationError: if that is not possible.
    """
    require(
        not isinstance(public, LazyInputs) and not isinstance(own, LazyInputs),
        f"{name} cannot be public data for these clients: one of the two is read from files batch by batch. Set "
        "in_memory: true for both, or take a share of the clients' own data (public: {share: 0.1}).",
    )
    if isinstance(public, Tensor) and isinstance(own, Tensor):
        return _images(public, own, name)
    kinds = [sorted(inputs.keys() - {TARGETS, EXAMPLE}) if isinstance(inputs, dict) else ["images"] for inputs in (public, own)]
    if not isinstance(public, dict) or not isinstance(own, dict) or kinds[0] != kinds[1]:
        raise FederationError(
            f"{name} cannot be public data for these clients: it has {', '.join(kinds[0])}, they have {', '.join(kinds[1])}. "
            "Choose data of the same kind, with the same tokenizer."
        )
    return {part: public[part] for part in kinds[0]}


def _images(public: Tensor, own: Tensor, name: str) -> Tensor:
    """Images resized (bilinear, antialiased) and converted to grey or colour."""
    shape = own.shape[1:]
    if public.dtype != own.dtype or (
        public.shape[1:] != shape and not (public.dim() == own.dim() == 4 and own.dtype == torch.uint8)
    ):
        raise FederationError(
            f"{name} cannot be public data for these clients: its inputs are {public.dtype} of shape {tuple(public.shape[1:])}, "
            f"theirs {own.dtype} of {tuple(shape)}. Only byte images are converted."
        )
    has, channels = public.shape[1], shape[0]
    if has != channels:
        require({has, channels} == {1, 3}, f"{name} has images of {has} channels, the clients' have {channels}: give 1 or 3.")
        grey = (public * torch.tensor(GREY)[:, None, None]).sum(1, keepdim=True).round().to(torch.uint8) if has == 3 else public
        public = grey.expand(-1, channels, -1, -1)
    return public if public.shape[1:] == shape else interpolate(public, tuple(shape[1:]), mode="bilinear", antialias=True)


def numbered(inputs: Inputs, rows: NDArray[np.int64]) -> SharedTensors:
    """Inputs without targets, whose labels are the numbers of public examples, from 0, and -1 elsewhere. ``rows`` are the positions
    of the public ones, in the order of their numbers.
    """
    numbers = torch.full((count(inputs),), -1)
    numbers[rows] = torch.arange(len(rows))
    return SharedTensors(inputs, numbers, targets_are_labels=True)
