"""Proximal terms, which keep a model near another one."""

from collections.abc import Iterable, Mapping
from functools import reduce

import torch
from torch import Tensor
from torch.optim import Optimizer


def half_squared_distance(parameters: Iterable[Tensor], anchors: Iterable[Tensor]) -> Tensor:
    r""":math:`\frac{1}{2} \lVert w - a \rVert^2` over all pairs of tensors, whose gradient in :math:`w` is :math:`w - a`."""
    squares = ((p - anchor).square().sum() for p, anchor in zip(parameters, anchors, strict=True))
    return reduce(torch.add, squares) / 2


@torch.no_grad()
def proximal_step(optimizer: Optimizer, anchors: Mapping[Tensor, Tensor], strength: float) -> None:
    r"""The exact proximal step for a term :math:`\frac{s}{2} \lVert w - a \rVert^2` that is not a part of the loss, after an
    optimizer's step with rate :math:`\eta`: :math:`w \leftarrow (w + c\,a) / (1 + c)`, :math:`c = \eta s`.

    Args:
        optimizer: the optimizer that has stepped.
        anchors: a, by parameter.
        strength: s.
    """
    for group in optimizer.param_groups:
        own = [p for p in group["params"] if p in anchors]
        way = group["lr"] * strength
        torch._foreach_lerp_(own, [anchors[p] for p in own], way / (1 + way))
