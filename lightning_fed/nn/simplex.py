"""Projection onto the simplex."""

import torch
from torch import Tensor


def on_simplex(weights: Tensor) -> Tensor:
    """The nearest weights, row by row, that are not negative and add up to 1 (Duchi et al., ICML 2008, Figure 1).

    Args:
        weights: ``(m, n)``.
    """
    falling = weights.sort(dim=1, descending=True).values
    excess = falling.cumsum(dim=1) - 1
    count = torch.arange(1, weights.shape[1] + 1, dtype=weights.dtype)
    last = (falling * count > excess).sum(dim=1, keepdim=True)
    return (weights - excess.gather(1, last - 1) / last).clamp_(min=0)
