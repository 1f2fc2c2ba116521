"""Weights that are points of a simplex, and projections of points onto one."""

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

SCALES = 1000
"""How many simplices are tried by :func:`spread`, of sizes from 1e-4 to 1."""

NEAREST = 1e-4
"""A distance below which two points are as good as one."""


class Mixture(nn.Module):
    r"""A parametrization of :mod:`torch.nn.utils.parametrize`: a weight that is :math:`\sum_m \alpha_m W_m`.

    Args:
        others: :math:`W_2, \dots, W_M`, ``(M - 1, …)``. The first corner is the original weight.
    """

    point: Tensor
    r""":math:`\alpha`, ``(M,)``; in no state. It begins as the simplex's center."""

    def __init__(self, others: Tensor) -> None:
        super().__init__()
        self._others: Tensor | None = others
        count = len(others) + 1
        self.register_buffer("point", torch.full((count,), 1 / count), persistent=False)

    def forward(self, corners: Tensor) -> Tensor:
        return torch.tensordot(self.point.to(corners.dtype), corners, dims=1)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """The corners, ``(M, …)``, which replace the weight."""
        assert self._others is not None, "corners do not follow from a weight"
        corners, self._others = torch.cat([weight.unsqueeze(0), self._others]), None
        return corners


def mixed_weight(layer: nn.Linear, corners: int) -> Mixture:
    """Replace the weight of a layer by a mixture of so many; the first is its own, the others are drawn in the same way."""
    drawn = [torch.empty_like(layer.weight) for _ in range(corners - 1)]
    for weight in drawn:
        nn.init.kaiming_uniform_(weight, a=5**0.5)  # as nn.Linear does
    mixture = Mixture(torch.stack(drawn) if drawn else layer.weight.new_empty(0, *layer.weight.shape))
    register_parametrization(layer, "weight", mixture)
    return mixture


def principal_scores(vectors: Tensor, components: int) -> Tensor:
    """The first principal components of vectors ``(N, d)``: ``(N, components)``. The largest entry of an axis is positive, so that
    the order of the vectors does not matter.
    """
    u, s, vt = torch.linalg.svd(vectors - vectors.mean(dim=0), full_matrices=False)
    axes = vt[:components]
    signs = axes.gather(1, axes.abs().argmax(dim=1, keepdim=True)).sign().squeeze(1)
    return u[:, :components] * s[:components] * signs


def projected(points: Tensor, size: float) -> Tensor:
    """The nearest points ``(N, M)`` of the simplex whose coordinates sum to ``size`` (Duchi et al. 2008), divided by it."""
    ordered = points.sort(dim=1, descending=True).values
    places = torch.arange(1, points.shape[1] + 1)
    excess = (ordered.cumsum(dim=1) - size) / places
    last = (ordered > excess).sum(dim=1, keepdim=True) - 1
    nearest = (points - excess.gather(1, last)).clamp(min=0)
    return nearest / nearest.sum(dim=1, keepdim=True)


def spread(points: Tensor) -> Tensor:
    r"""Points ``(N, M)`` projected on the simplex, in the scale that separates them best: with the least Riesz energy, the mean
    of :math:`1 / \lVert \beta_i - \beta_j \rVert^2` over pairs. All scales are tried, which takes some seconds for 500 points
    and grows with the square of their number.
    """
    candidates = (projected(points, size) for size in torch.linspace(1e-4, 1, SCALES).tolist())
    return min(candidates, key=lambda betas: torch.pdist(betas).clamp(min=NEAREST).pow(-2).mean().item())
