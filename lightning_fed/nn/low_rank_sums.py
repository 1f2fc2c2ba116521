r"""Sums of products of thin factors, :math:`\sum_k B_k A_k`, without forming them: a sum of products is a product of stacks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_fed.nn.factorize import Spectrum


def stacked(left: Sequence[Tensor], right: Sequence[Tensor], scales: Sequence[Tensor] | None = None) -> tuple[Tensor, Tensor]:
    r""":math:`\sum_k B_k \mathrm{diag}(c_k) A_k = [B_1 \dots B_K] [\mathrm{diag}(c_1) A_1; \dots; \mathrm{diag}(c_K) A_K]`.

    Args:
        left: the :math:`B_k`, ``(m, r_k)``.
        right: the :math:`A_k`, ``(r_k, n)``.
        scales: the :math:`c_k`, each of shape ``()`` or ``(r_k,)``; None: all are 1.

    Returns:
        ``(m, q)`` and ``(q, n)`` with :math:`q = \sum r_k`.
    """
    ranks = [len(factor) for factor in right]
    beside = left[0].new_empty(len(left[0]), sum(ranks))
    for place, factor in zip(beside.split(ranks, dim=1), left, strict=True):  # torch.cat takes three times as long along rows
        place.copy_(factor)
    if scales is None:
        return beside, torch.cat(list(right))
    below = right[0].new_empty(sum(ranks), right[0].shape[1])
    for place, factor, scale in zip(below.split(ranks), right, scales, strict=True):
        torch.mul(factor, scale.to(factor.dtype).view(-1, 1), out=place)
    return beside, below


def averaging_error(
    left: Sequence[Tensor], right: Sequence[Tensor], weights: Sequence[float], mean: Tensor
) -> tuple[Tensor, Tensor]:
    r"""The error of the product of the means, :math:`\sum_k p_k B_k A_k - \bar B \bar A`, as factors of rank :math:`(K - 1) r`.

    It is :math:`\sum_k p_k (B_k - \bar B)(A_k - C)` for any C, because :math:`\sum_k p_k (B_k - \bar B) = 0`; with :math:`C = A_K`
    one term vanishes. This needs no decomposition, and with equal :math:`A_k` it is zero bit for bit.

    Args:
        left: the :math:`B_k`, ``(m, r)``.
        right: the :math:`A_k`, ``(r, n)``.
        weights: the :math:`p_k`, of sum 1.
        mean: :math:`\bar B`.

    Returns:
        ``(m, q)`` and ``(q, n)`` with :math:`q \le (K - 1) r`: ranks that are zero on one side are left out.
    """
    terms = list(zip(left, right, weights, strict=True))[:-1]
    if not terms:
        return mean[:, :0], right[-1][:0]
    centred = stacked([p * (b - mean) for b, _, p in terms], [a - right[-1] for _, a, _ in terms])
    used = centred[0].any(dim=0) & centred[1].any(dim=1)
    return centred if used.all() else (centred[0][:, used], centred[1][used])


def product_spectrum(left: Tensor, right: Tensor, rank: int | None = None) -> Spectrum:
    """The singular value decomposition of a product of thin factors, in float64, without forming it: with :math:`L = Q R` and
    :math:`M^T = Q' R'` it follows from that of the small :math:`R R'^T`.

    Args:
        left: L, ``(m, q)``.
        right: M, ``(q, n)``.
        rank: number of singular vectors; None: all.

    Returns:
        The decomposition of an ``(m, n)`` matrix, with min(m, n, q) singular values, and vectors of the first ones.
    """
    (outer, upper), (inner, lower) = (torch.linalg.qr(factor.double()) for factor in (left, right.T))
    small = Spectrum.of(upper @ lower.T)
    return Spectrum(outer @ small.left[:, :rank], small.values, inner @ small.right[:, :rank])
