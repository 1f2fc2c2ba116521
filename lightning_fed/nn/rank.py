"""Effective ranks of matrices, and norms of products."""

import math

import torch
from torch import Tensor


def spectral_rank(values: Tensor, share: float = 0.9) -> int:
    r"""The smallest :math:`j` with :math:`\sigma_1 + \dots + \sigma_j \ge \rho \sum_i \sigma_i`; 0 if all are zero.

    PF2LoRA's paper calls this the rank (Appendix C). The singular values are not squared.

    Args:
        values: singular values in descending order, ``(k,)``.
        share: :math:`\rho`, in (0, 1).

    >>> [spectral_rank(torch.tensor(values)) for values in ([1.0, 1, 1, 0], [8.5, 1, 0.5], [9.5, 0.5], [0.0, 0])]
    [3, 2, 1, 0]
    """
    sums = values.double().cumsum(0)
    if sums[-1] == 0:
        return 0
    return min(int((sums < share * sums[-1]).sum()) + 1, len(values))


def effective_rank(b: Tensor, a: Tensor, share: float = 0.9) -> int:
    """The :func:`spectral_rank` of a product BA, without forming it: with :math:`B = QR` and :math:`A^T = Q'R'` its singular
    values are those of the small :math:`R R'^T`. Computed on the CPU: one factor may be frozen and on another device.

    Args:
        b: ``(m, r)``.
        a: ``(r, n)``.
        share: see :func:`spectral_rank`.
    """
    left, right = (torch.linalg.qr(factor.cpu().double(), mode="r").R for factor in (b, a.T))
    return spectral_rank(torch.linalg.svdvals(left @ right.T), share)


def product_norm(b: Tensor, a: Tensor) -> float:
    r""":math:`\lVert BA \rVert_F` of a product, without forming it: its square is :math:`\sum (B^\top B) \circ (A A^\top)`.

    Args:
        b: ``(m, r)``.
        a: ``(r, n)``.
    """
    b, a = b.double(), a.double()
    return max(0.0, ((b.T @ b) * (a @ a.T)).sum().item()) ** 0.5


def floor_of(share: float, count: int) -> int:
    r""":math:`\lfloor s n \rfloor` of the intended numbers: in floating point 0.29 · 100 is slightly less than 29.

    Args:
        share: s, at least 0, in decimals or as computed.
        count: n.

    >>> floor_of(0.29, 100), floor_of(1 / 3, 3), floor_of(0.99, 5), floor_of(0.7, 90)
    (29, 1, 4, 63)
    """
    return math.floor(share * count * (1 + 1e-12))
