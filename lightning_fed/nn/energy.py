"""Compression of tensors to factors that hold a share of their energy, if these have fewer values."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_fed.nn.rank import spectral_rank

FACTORS = "/U", "/sigma", "/V"
"""What is added to the name of a tensor that is given as factors."""


def energy_factors(matrix: Tensor, share: float) -> tuple[Tensor, Tensor, Tensor]:
    r""":math:`U, \sigma, V` with :math:`M \approx U \mathrm{diag}(\sigma) V^\top`, of the smallest rank r for which
    :math:`\sum_{i \le r} \sigma_i^2 \ge e \sum_i \sigma_i^2`; of rank 0 if all is zero.

    They come from the eigenvectors of the smaller of :math:`MM^\top` and :math:`M^\top M`, in float64, which takes a third of the
    time of a singular value decomposition. The rank depends only on the squares; and the restored matrix is exact for
    small singular values too, because the other side is computed from the matrix.

    Args:
        matrix: M, ``(m, n)``.
        share: e, in (0, 1].

    Returns:
        ``(m, r)``, ``(r,)`` descending, ``(n, r)``, float64.
    """
    exact = matrix.double()
    tall = exact if len(exact) >= exact.shape[1] else exact.T
    energies, basis = torch.linalg.eigh(tall.T @ tall)
    rank = spectral_rank(energies.flip(0).clamp(min=0), share)
    short = basis.flip(1)[:, :rank]
    long = tall @ short
    values = long.norm(dim=0).clamp(min=torch.finfo(exact.dtype).tiny)
    sides = (long / values, short) if tall is exact else (short, long / values)
    return sides[0], values, sides[1]


def compressed(tensors: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
    r"""Compress matrices, and kernels as matrices of one row per output, to factors that hold a share of their energy: under the
    tensor's name followed by :data:`FACTORS`, in its dtype. Tensors that factors would not make smaller are unchanged: vectors, and
    matrices with :math:`r(m + n + 1) \ge mn`.

    Args:
        tensors: by name.
        share: see :func:`energy_factors`.
    """
    sent = {}
    for name, tensor in tensors.items():
        sent[name] = tensor
        if tensor.dim() < 2 or not tensor.is_floating_point() or not torch.isfinite(tensor.sum()):
            continue
        factors = energy_factors(tensor.flatten(1), share)
        if sum(factor.numel() for factor in factors) < tensor.numel():
            del sent[name]
            sent |= {f"{name}{part}": factor.to(tensor.dtype) for part, factor in zip(FACTORS, factors, strict=True)}
    return sent


def restored(sent: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Restore the arguments of :func:`compressed`, except for the truncated energy.

    Args:
        sent: its result.
        like: tensors with the names and shapes of the originals.
    """
    tensors = {}
    for name, tensor in like.items():
        if name in sent:
            tensors[name] = sent[name]
        else:
            left, values, right = (sent[f"{name}{part}"] for part in FACTORS)
            tensors[name] = ((left * values) @ right.T).view(tensor.shape)
    return tensors


def compressed_shapes(sent: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names, shapes and dtypes that compressed tensors must have, on the meta device: each uncompressed, or factors of a possible
    rank.

    Args:
        sent: the received tensors; only their ranks are used, if they are possible.
        like: tensors with the names, shapes and dtypes of the originals.
    """
    shapes: dict[str, Tensor] = {}
    for name, tensor in like.items():
        if tensor.dim() > 1 and (values := sent.get(f"{name}{FACTORS[1]}")) is not None:
            rows, columns = tensor.shape[0], tensor.shape[1:].numel()
            rank = min(values.numel(), rows, columns)
            sizes = (rows, rank), (rank,), (columns, rank)
            names = [f"{name}{part}" for part in FACTORS]
            shapes |= {key: torch.empty(size, dtype=tensor.dtype, device="meta") for key, size in zip(names, sizes, strict=True)}
        else:
            shapes[name] = tensor
    return shapes
