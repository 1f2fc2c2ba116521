"""A full-rank weight plus a low-rank one: the additive decomposition of FedDecomp, usable alone."""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lightning_fed.errors import FederationError

Variant = Literal["paper", "official"]


class LowRankDelta(nn.Module):
    r"""Adds :math:`\tau = BA` to a weight :math:`\sigma`, as a parametrization of :mod:`torch.nn.utils.parametrize`.

    ``B`` starts at zero, so that at first the layer is the plain one. The inner rank is :math:`\lfloor R n \rfloor k`, at least
    ``k``, where ``k`` is the kernel size (1 for a matrix) and ``n`` depends on the variant:

    =================  ====================================================  ====================================================
    variant            ``"paper"`` (eqs. 3-5)                                ``"official"`` (the authors' code)
    =================  ====================================================  ====================================================
    ``n``              min(I, O)                                             O for convolutions, min(I, O) for matrices
    ``B`` (zero)       (I·k, r)                                              (O·k, r)
    ``A``              (r, O·k), Gaussian                                    (r, I·k), Kaiming-uniform with a = √5
    convolution        τ[o, i, k1, k2] = (BA)[(i, k1), (o, k2)]              the numbers of BA, (O·k) × (I·k), row by row
    matrix             τ = (BA)ᵀ                                             τ = BA
    scale              1                                                     1/⌊R·O⌋ for convolutions, 1/r for matrices
    =================  ====================================================  ====================================================

    The paper states no deviation for ``A``. Here its rows have unit expected norm, so that a first step on ``B`` moves the weight
    as far as a step of the same learning rate on :math:`\sigma` would within the rows' span. The paper's "Reshape" is read as the
    separable permutation; the code's reading mixes the axes within each output channel.

    Args:
        weight: the weight to add to: ``(O, I)`` or ``(O, I, k, k)``.
        ratio: R, in (0, 1].
        variant: which reading; see the table.
    """

    def __init__(self, weight: Tensor, ratio: float, variant: Variant = "paper") -> None:
        super().__init__()
        if not 0 < ratio <= 1:
            raise FederationError(f"A rank ratio of {ratio} was asked for: give one in (0, 1].")
        if weight.ndim not in (2, 4) or weight.shape[2:] != weight.shape[2:3] * (weight.ndim - 2):
            raise FederationError(
                f"A weight of shape {tuple(weight.shape)} cannot be decomposed: matrices and square convolutions can."
            )
        out_features, in_features = weight.shape[:2]
        kernel = weight.shape[2] if weight.ndim == 4 else 1
        widest = out_features if variant == "official" and weight.ndim == 4 else min(in_features, out_features)
        multiple = max(1, math.floor(ratio * widest + 1e-9))  # 0.29 · 100 is 28.999…
        self.rank = multiple * kernel
        self.variant = variant
        self.scale = 1 / multiple if variant == "official" else 1.0
        rows, columns = (in_features, out_features) if variant == "paper" else (out_features, in_features)
        self.B = nn.Parameter(weight.new_zeros(rows * kernel, self.rank))
        self.A = nn.Parameter(weight.new_empty(self.rank, columns * kernel))
        if variant == "paper":
            nn.init.normal_(self.A, std=(columns * kernel) ** -0.5)
        else:
            nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))
        self._cache: tuple[tuple[int, int], Tensor] | None = None

    def forward(self, weight: Tensor) -> Tensor:
        """σ + τ, of the shape of ``weight``."""
        return weight + self.delta(weight.shape)

    def delta(self, shape: torch.Size) -> Tensor:
        """τ. While neither factor learns it is computed once, not once per batch."""
        if self.A.requires_grad or self.B.requires_grad:
            self._cache = None
            return self._compute(shape)
        versions = (self.A._version, self.B._version)
        if self._cache is None or self._cache[0] != versions or self._cache[1].device != self.A.device:
            self._cache = versions, self._compute(shape).detach()
        return self._cache[1]

    def _compute(self, shape: torch.Size) -> Tensor:
        product = self.B @ self.A
        if self.variant == "official":
            return (self.scale * product).view(shape)
        if len(shape) == 2:
            return product.T
        out_features, in_features, kernel, _ = shape
        return product.view(in_features, kernel, out_features, kernel).permute(2, 0, 1, 3)

    def matrix(self, delta: Tensor) -> Tensor:
        """The product BA that ``delta`` was made from: the view of τ whose rank is at most :attr:`rank`."""
        if self.variant == "official":
            return delta.reshape(self.B.shape[0], self.A.shape[1]) / self.scale
        if delta.ndim == 2:
            return delta.T
        return delta.permute(1, 2, 0, 3).reshape(self.B.shape[0], self.A.shape[1])


class PackedLowRankDelta(nn.Module):
    """A low-rank delta for each of several matrices stacked in one weight, such as the query, key and value of attention.

    Args:
        weight: ``(parts · O, I)``.
        ratio: R of each part.
        variant: see :class:`LowRankDelta`.
        parts: how many matrices are stacked.
    """

    def __init__(self, weight: Tensor, ratio: float, variant: Variant = "paper", parts: int = 3) -> None:
        super().__init__()
        self.deltas = nn.ModuleList(LowRankDelta(part, ratio, variant) for part in weight.chunk(parts))

    def forward(self, weight: Tensor) -> Tensor:
        """σ + τ, part by part."""
        parts = weight.chunk(len(self.deltas))
        return torch.cat([delta(part) for delta, part in zip(self.deltas, parts, strict=True)])


def decompose(module: nn.Module, conv_ratio: float, linear_ratio: float, variant: Variant = "paper") -> None:
    """Decompose every convolutional, linear and attention weight of ``module`` in place.

    The module's own weights become the full-rank part and keep their values and their random stream: the factors are drawn after
    them. Biases, norms and embeddings stay as they are.

    Args:
        module: any network; its layers stay the objects they are.
        conv_ratio: rank ratio :math:`R_c` of convolutions.
        linear_ratio: rank ratio :math:`R_l` of linear and attention layers.
        variant: see :class:`LowRankDelta`.
    """
    for layer in list(module.modules()):
        for name, delta in _deltas(layer, conv_ratio, linear_ratio, variant):
            parametrize.register_parametrization(layer, name, delta)


def factors(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of all low-rank parts in ``module``."""
    return [p for part in module.modules() if isinstance(part, LowRankDelta) for p in part.parameters()]


def _deltas(layer: nn.Module, conv_ratio: float, linear_ratio: float, variant: Variant) -> list[tuple[str, nn.Module]]:
    """The weights of one layer that are decomposed, by name, and what is added to each."""
    if isinstance(layer, nn.Conv2d):
        return [("weight", LowRankDelta(layer.weight, conv_ratio, variant))]
    if isinstance(layer, nn.Linear):
        return [("weight", LowRankDelta(layer.weight, linear_ratio, variant))]
    if isinstance(layer, nn.MultiheadAttention):
        if layer.in_proj_weight is not None:
            return [("in_proj_weight", PackedLowRankDelta(layer.in_proj_weight, linear_ratio, variant))]
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        return [(name, LowRankDelta(getattr(layer, name), linear_ratio, variant)) for name in names]
    return []
