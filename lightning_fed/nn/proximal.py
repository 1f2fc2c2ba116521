"""The distance that keeps a model near another one."""

from collections.abc import Iterable

from torch import Tensor


def half_squared_distance(parameters: Iterable[Tensor], anchors: Iterable[Tensor]) -> Tensor | float:
    r""":math:`\frac{1}{2} \lVert w - a \rVert^2` over all pairs of tensors, whose gradient in :math:`w` is :math:`w - a`."""
    return sum(((p - anchor).square().sum() for p, anchor in zip(parameters, anchors, strict=True)), start=0.0) / 2
