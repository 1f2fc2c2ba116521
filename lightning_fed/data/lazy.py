"""Inputs that are read on demand: images that stay in their files until a batch needs them."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import cast
from zlib import crc32

import torch
from torch import Tensor


class LazyInputs(ABC):
    """Inputs that are read batch by batch. Clients share one such object, as they share a tensor.

    It is sent to worker processes with the data: hold what can be pickled, such as paths rather than open files.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Number of examples."""

    def checksum(self, start: int = 0) -> int:
        """CRC-32 by which a run knows its data again, continued from another one. It is computed at each start: use what is quickly
        known, such as sizes of files. It must not depend on the machine. Default: of the number of examples only.
        """
        return crc32(str(len(self)).encode(), start)

    @abstractmethod
    def read(self, rows: Tensor) -> Tensor | dict[str, Tensor]:
        """The inputs of the examples at the given positions, in this order.

        Args:
            rows: positions from 0, shape (B,), int64. A Poisson sample may be empty, B = 0.

        Returns:
            Shape (B, …). Images are bytes, (B, C, H, W), which are normalized and augmented like those in memory. Or named inputs
            of a network, each of shape (B, …), possibly with targets, like those in memory.
        """


@dataclass(eq=False)
class Taken(LazyInputs):
    """A selection of the examples, in any order.

    Args:
        inputs: all inputs.
        rows: positions of the selected ones, shape (N,).
    """

    inputs: LazyInputs
    rows: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def checksum(self, start: int = 0) -> int:
        return self.inputs.checksum(crc32(self.rows.numpy().tobytes(), start))

    def read(self, rows: Tensor) -> Tensor | dict[str, Tensor]:
        return self.inputs.read(self.rows[rows])


@dataclass(eq=False)
class Joined(LazyInputs):
    """The examples of one object, then those of another.

    Args:
        first: the first examples.
        second: the examples after them.
    """

    first: LazyInputs
    second: LazyInputs

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def checksum(self, start: int = 0) -> int:
        return self.second.checksum(self.first.checksum(start))

    def read(self, rows: Tensor) -> Tensor | dict[str, Tensor]:
        early = rows < len(self.first)
        pieces = [(self.first, rows[early]), (self.second, rows[~early] - len(self.first))]
        read = [inputs.read(own) for inputs, own in pieces if len(own)] or [self.first.read(rows)]
        place = torch.cat([early.nonzero(), (~early).nonzero()]).flatten().argsort()
        if isinstance(read[0], dict):
            named = cast(list[dict[str, Tensor]], read)
            return {name: torch.cat([part[name] for part in named])[place] for name in read[0]}
        return torch.cat(cast(list[Tensor], read))[place]
