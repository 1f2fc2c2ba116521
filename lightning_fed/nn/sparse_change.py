"""Changes of a weight: trainable ones of entries that a random mask selects, and constant ones."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_fed.tensors import widened


class SparseChange(nn.Module):
    """A parametrization that adds trainable values to some entries of a weight. The other entries have no gradient at all, so that
    no optimizer can move them.

    Args:
        weight: of any shape; it is not changed.
        density: share of its entries that have values.
    """

    entries: Tensor

    def __init__(self, weight: Tensor, density: float) -> None:
        super().__init__()
        count = masked_count(weight.shape, density)
        self.values = nn.Parameter(torch.zeros(count, dtype=torch.promote_types(weight.dtype, torch.float32), device=weight.device))
        self.register_buffer("entries", torch.arange(count, device=weight.device), persistent=False)

    def forward(self, weight: Tensor) -> Tensor:
        """The weight with the values added, in its own precision."""
        return weight.flatten().scatter_add(0, self.entries, self.values.to(weight.dtype)).view_as(weight)


class Change(nn.Module):
    """A parametrization that adds a constant to a weight, in float32 at least; the sum has the weight's own precision.

    Args:
        weight: of any shape; it is not changed.
    """

    change: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("change", torch.zeros_like(widened(weight)), persistent=False)

    def forward(self, weight: Tensor) -> Tensor:
        return (weight + self.change).to(weight.dtype)


def masked_count(shape: torch.Size, density: float) -> int:
    """Number of entries of a matrix that a mask selects, at least one."""
    return max(1, round(density * shape.numel()))


def draw_masks(shapes: Mapping[str, torch.Size], density: float, seed: Tensor) -> dict[str, Tensor]:
    """Entries that the masks select, uniformly at random.

    Args:
        shapes: of the matrices.
        density: share of the entries.
        seed: of all masks, an integer.

    Returns:
        Distinct indices into the flattened entries of each matrix.
    """
    stream = torch.Generator().manual_seed(int(seed))
    return {
        name: torch.randperm(shape.numel(), generator=stream, device="cpu")[: masked_count(shape, density)]
        for name, shape in shapes.items()
    }


def scattered(values: Tensor, entries: Tensor, shape: torch.Size) -> Tensor:
    """A matrix with these values at these flat indices, and zeros elsewhere."""
    return values.new_zeros(shape.numel()).scatter(0, entries, values).view(shape)
