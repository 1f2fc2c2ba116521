"""Inputs that are made when a batch needs them: images that stay in their files until then."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor


class LazyInputs(ABC):
    """Inputs of which only the batch that is needed is in memory. Clients share one such object as they would share a tensor.

    It travels to worker processes with the data: hold what can be pickled, paths rather than open files.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Number of examples."""

    @abstractmethod
    def read(self, rows: Tensor) -> Tensor | dict[str, Tensor]:
        """The examples at the given positions, in their order.

        Args:
            rows: positions from 0, shape (B,), int64.

        Returns:
            Shape (B, …). Images are bytes, (B, C, H, W), which are normalized and augmented as those in memory are. Or what a
            network takes by name, each of shape (B, …), and perhaps targets, as those in memory.
        """


@dataclass(eq=False)
class Taken(LazyInputs):
    """Some of the examples, in an order of their own.

    Args:
        inputs: all of them.
        rows: positions of those that are taken, shape (N,).
    """

    inputs: LazyInputs
    rows: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, rows: Tensor) -> Tensor | dict[str, Tensor]:
        return self.inputs.read(self.rows[rows])


@dataclass(eq=False)
class Joined(LazyInputs):
    """The examples of one, then those of another.

    Args:
        first: what comes first.
        second: what comes then.
    """

    first: LazyInputs
    second: LazyInputs

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def read(self, rows: Tensor) -> Tensor:
        early = rows < len(self.first)
        pieces = [(self.first, rows[early]), (self.second, rows[~early] - len(self.first))]
        read = torch.cat([cast(Tensor, inputs.read(own)) for inputs, own in pieces if len(own)])
        place = torch.cat([early.nonzero(), (~early).nonzero()]).flatten().argsort()
        return read[place]
