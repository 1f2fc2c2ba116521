"""A full-rank weight plus a low-rank one: the additive decomposition of FedDecomp, usable without the method."""

import math
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, linear
from torch.nn.utils import parametrize

from lightning_fed.errors import FederationError
from lightning_fed.nn.factorize import layer_weights, require_plain_weight, roll_up, unroll
from lightning_fed.nn.rank import floor_of

Variant = Literal["paper", "official"]


class LowRankDelta(nn.Module):
    r"""Adds :math:`\tau = BA` to a weight :math:`\sigma`, as a parametrization of :mod:`torch.nn.utils.parametrize`.

    ``B`` starts at zero, so that the layer is the plain one at first. The inner rank is :math:`\lfloor R n \rfloor k`, at least
    ``k``, where ``k`` is the kernel size (1 for a matrix) and ``n`` depends on the variant:

    =================  ====================================================  ====================================================
    variant            ``"paper"`` (eqs. 3-5)                                ``"official"`` (the authors' code)
    =================  ====================================================  ====================================================
    ``n``              min(I, O)                                             O for convolutions, min(I, O) for matrices
    ``B`` (zero)       (I·k, r)                                              (O·k, r)
    ``A``              (r, O·k), Gaussian                                    (r, I·k), Kaiming-uniform with a = √5
    convolution        τ[o, i, k1, k2] = (BA)[(i, k1), (o, k2)]              the entries of BA, (O·k) × (I·k), row by row
    matrix             τ = (BA)ᵀ                                             τ = BA
    scale              1                                                     1/⌊R·O⌋ for convolutions, 1/r for matrices
    =================  ====================================================  ====================================================

    The paper states no standard deviation for ``A``. Here its rows have unit expected norm, so that a first step on ``B`` moves the
    weight as far as a step of the same learning rate on :math:`\sigma` would within the rows' span. The paper's "Reshape" is read
    as the separable permutation; the code's reading mixes the axes within each output channel.

    Args:
        weight: the weight to add to: ``(O, I)`` or ``(O, I, k, k)``.
        ratio: R, in (0, 1].
        variant: reading of the paper; see the table.
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
        multiple = max(1, floor_of(ratio, widest))
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
        """τ. If neither factor learns, as in an evaluation, it is computed once instead of once per batch."""
        if self.learns:
            self._cache = None
            return self._compute(shape)
        versions = (self.A._version, self.B._version)
        if self._cache is None or self._cache[0] != versions:
            with torch.inference_mode(False), torch.no_grad():  # an evaluated module may be trained later
                self._cache = versions, self._compute(shape)
        return self._cache[1]

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self._cache = None  # it stays on no device and in no precision that the factors leave
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_cache": None}  # the factors of a copy count their versions anew

    @property
    def learns(self) -> bool:
        """Whether gradients of the factors are needed."""
        return torch.is_grad_enabled() and (self.A.requires_grad or self.B.requires_grad)

    def layers(self, shape: torch.Size) -> tuple[Tensor, Tensor] | None:
        """The weights of two consecutive layers that are equivalent to one with the weight τ: matrices, or kernels ``(r, I, k, 1)``
        and ``(O, r, 1, k)``. None for the official variant of a convolution, whose reshape mixes axes that the two would separate.

        Args:
            shape: of the weight.
        """
        if self.variant == "official":
            return (self.A, self.scale * self.B) if len(shape) == 2 else None
        return layer_weights(self.B, self.A.T, shape)

    def _compute(self, shape: torch.Size) -> Tensor:
        product = self.B @ self.A
        return (self.scale * product).view(shape) if self.variant == "official" else roll_up(product, shape)

    def matrix(self, delta: Tensor) -> Tensor:
        """The product BA that ``delta`` was made from: the view of τ whose rank is at most :attr:`rank`."""
        if self.variant == "official":
            return delta.reshape(self.B.shape[0], self.A.shape[1]) / self.scale
        return unroll(delta)


class PackedLowRankDelta(nn.Module):
    """A low-rank delta for each of several matrices stacked in one weight, such as the query, key and value of attention.

    Args:
        weight: ``(parts · O, I)``.
        ratio: R of each part.
        variant: see :class:`LowRankDelta`.
        parts: number of stacked matrices.
    """

    def __init__(self, weight: Tensor, ratio: float, variant: Variant = "paper", parts: int = 3) -> None:
        super().__init__()
        self.deltas = nn.ModuleList(LowRankDelta(part, ratio, variant) for part in weight.chunk(parts))

    def forward(self, weight: Tensor) -> Tensor:
        """σ + τ, part by part."""
        parts = weight.chunk(len(self.deltas))
        return torch.cat([delta(part) for delta, part in zip(self.deltas, parts, strict=True)])


class DecomposedLinear(nn.Linear):
    r"""A linear layer with a weight :math:`\sigma + \tau`. While :math:`\tau = BA` learns, it computes
    :math:`x\sigma^T + (xA^T)B^T` instead of :math:`x(\sigma + BA)^T` if that takes fewer operations: with small batches.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Features ``(…, out)`` of ``(…, in)``."""
        delta, weight = _decomposed(self)
        rows = x.shape[:-1].numel()
        if not delta.learns or not _apart_is_cheaper(delta, weight, x, rows, rows):
            return super().forward(x)
        layers = delta.layers(weight.shape)
        assert layers is not None
        first, second = layers
        return linear(x, weight, self.bias) + linear(linear(x, first), second)


class DecomposedConv2d(nn.Conv2d):
    r"""The same for a convolution, with :math:`\tau` as two consecutive convolutions; see :meth:`LowRankDelta.layers`."""

    def forward(self, x: Tensor) -> Tensor:
        """Features ``(B, O, H, W)``."""
        delta, weight = _decomposed(self)
        if not delta.learns or isinstance(self.padding, str) or self.padding_mode != "zeros" or self.groups != 1:
            return super().forward(x)
        layers = delta.layers(weight.shape)
        (down, across), (above, beside), (high, wide) = self.stride, self.padding, self.dilation
        height, width = (
            (size + 2 * pad - spread * (weight.shape[2] - 1) - 1) // step + 1
            for size, pad, spread, step in zip(x.shape[-2:], self.padding, self.dilation, self.stride, strict=True)
        )
        images = x.shape[:-3].numel()
        if layers is None or not _apart_is_cheaper(delta, weight, x, images * height * x.shape[-1], images * height * width):
            return super().forward(x)
        first, second = layers
        hidden = conv2d(x, first, None, (down, 1), (above, 0), (high, 1))
        own = conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation)
        return own + conv2d(hidden, second, None, (1, across), (0, beside), (1, wide))


def _decomposed(layer: nn.Module) -> tuple[LowRankDelta, Tensor]:
    """The low-rank part and the original weight of a layer."""
    parametrization = cast(parametrize.ParametrizationList, cast(nn.ModuleDict, layer.parametrizations)["weight"])
    return cast(LowRankDelta, parametrization[0]), parametrization.original


def _apart_is_cheaper(delta: LowRankDelta, weight: Tensor, x: Tensor, hidden: int, rows: int) -> bool:
    r"""Whether :math:`\sigma` and :math:`\tau` applied separately take fewer operations in a training step than their sum. The
    decision depends only on shapes and on what is trainable, so that it is the same everywhere.

    Args:
        delta: :math:`\tau`, which learns.
        weight: :math:`\sigma`.
        x: the input.
        hidden: rows that the first of the two layers computes: examples times positions.
        rows: output rows.
    """
    taps = weight.shape[2] if weight.dim() == 4 else 1
    # The product of the factors, forward and for the gradient of each; and the gradient of the sum, which σ alone may not need.
    composed = 3 * delta.A.numel() * len(delta.B) + (0 if weight.requires_grad else rows * weight.numel())
    # Two layers, each forward, for its weight's gradient and for its input's.
    first = (3 if x.requires_grad else 2) * hidden * weight.shape[1]
    return delta.rank * taps * (first + 3 * rows * len(weight)) < composed


def decompose(
    module: nn.Module, conv_ratio: float, linear_ratio: float, variant: Variant = "paper", layers: Iterable[str] | None = None
) -> None:
    """Decompose every trainable convolutional, linear and attention weight of ``module``, or of some layers, in place.

    The module's own weights become the full-rank part and keep their values and their random stream: the factors are drawn after
    them. Biases, norms, embeddings and frozen weights do not change. A tied weight has one low-rank part: it is decomposed in every
    layer that has it, also in an embedding or in a layer that is not among ``layers``.

    Args:
        module: any network; its layers stay the objects they are.
        conv_ratio: rank ratio :math:`R_c` of convolutions.
        linear_ratio: rank ratio :math:`R_l` of linear and attention layers.
        variant: see :class:`LowRankDelta`.
        layers: names of layers, or of modules with all layers in them, as in ``module.named_modules()``; ``*`` stands for anything:
            ``["*.self_attn", "head"]``. None: all.

    Raises:
        FederationError: for a name without a weight that can be decomposed, and for a weight that is computed from others.
    """
    known = dict(module.named_modules())
    chosen = list(known.values())
    if layers is not None:
        named = {pattern: [layer for name, layer in known.items() if fnmatchcase(name, pattern)] for pattern in layers}
        for pattern, found in named.items():
            if not any(decomposable(part) for layer in found for part in layer.modules()):
                possible = ", ".join(name for name, layer in known.items() if decomposable(layer))
                raise FederationError(
                    f"layers names {pattern!r}, in which {type(module).__name__} has nothing to decompose: give some of {possible}."
                )
        wanted = {part for found in named.values() for layer in found for part in layer.modules()}
        chosen = [layer for layer in chosen if layer in wanted]
    holders: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}  # a tied weight has several
    for part in known.values():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            holders.setdefault(parameter, []).append((part, name))
    weights: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    for layer in chosen:
        for name, weight in decomposable(layer).items():
            require_plain_weight(module, layer, "decompose", name)
            weights.setdefault(weight, (layer, name))
    for weight, (layer, name) in weights.items():
        ratio = conv_ratio if isinstance(layer, nn.Conv2d) else linear_ratio
        delta = (PackedLowRankDelta if name == "in_proj_weight" else LowRankDelta)(weight, ratio, variant)
        for holder, own in holders[weight]:
            if isinstance(delta, LowRankDelta):
                holder.__class__ = DECOMPOSED.get(type(holder), type(holder))
            parametrize.register_parametrization(holder, own, delta)


DECOMPOSED: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: DecomposedLinear, nn.Conv2d: DecomposedConv2d}
"""What decomposed layers become; their subclasses, which may compute something else, stay what they are."""


def factors(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of all low-rank parts in ``module``."""
    return [p for part in module.modules() if isinstance(part, LowRankDelta) for p in part.parameters()]


def decomposable(layer: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of one layer that can be decomposed, by name; a frozen one cannot."""
    names: tuple[str, ...] = ()
    if isinstance(layer, nn.Conv2d | nn.Linear):
        names = ("weight",)
    elif isinstance(layer, nn.MultiheadAttention):
        names = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")  # either the first or the others
    weights = {name: getattr(layer, name) for name in names}
    return {name: weight for name, weight in weights.items() if weight is not None and weight.requires_grad}
