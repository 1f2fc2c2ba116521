"""Layers replaced by two smaller consecutive ones: the low-rank networks of FedHM, usable without the method."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Self, cast

import torch
from torch import Tensor, nn

from lightning_fed.errors import FederationError
from lightning_fed.tensors import second_names


class Spectrum(NamedTuple):
    r"""A singular value decomposition :math:`W = P \Sigma Q^\top`, from which factors of any rank are cut.

    Attributes:
        left: P, ``(m, k)`` with ``k = min(m, n)``, float64.
        values: the diagonal of Σ, ``(k,)``, descending.
        right: Q, ``(n, k)``.
    """

    left: Tensor
    values: Tensor
    right: Tensor

    @classmethod
    def of(cls, matrix: Tensor) -> Self:
        """Decompose ``(m, n)``, in float64."""
        left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
        return cls(left, values, right.T)

    def rank(self, precision: torch.dtype) -> int:
        """Number of singular values above the rounding error of a matrix stored in this precision."""
        tolerance = max(len(self.left), len(self.right)) * torch.finfo(precision).eps
        return int((self.values > tolerance * self.values[0]).sum())

    def factors(self, rank: int) -> tuple[Tensor, Tensor]:
        r"""The best factors of a rank: :math:`W \approx UV^\top` with :math:`U = P_r \Sigma_r^{1/2}`, :math:`V = Q_r
        \Sigma_r^{1/2}`.

        Both share the singular values: :math:`U^\top U = V^\top V = \Sigma_r`.

        Args:
            rank: r, from 1 to min(m, n).

        Returns:
            ``U`` of shape ``(m, r)`` and ``V`` of shape ``(n, r)``, float64.
        """
        if not 1 <= rank <= len(self.values):
            rows, columns = len(self.left), len(self.right)
            raise FederationError(f"A rank of {rank} was asked for a {rows} x {columns} matrix: give 1 to {len(self.values)}.")
        root = self.values[:rank].sqrt()
        return self.left[:, :rank] * root, self.right[:, :rank] * root


class Energy:
    r"""The share of the squared norm of several matrices, :math:`\sum_l \lVert W_l \rVert_F^2`, that their best approximations
    keep. It uses existing decompositions and needs no product.
    """

    def __init__(self) -> None:
        self._total = torch.zeros((), dtype=torch.float64)
        self._kept: dict[float, Tensor] = {}

    def add(self, spectrum: Spectrum, ranks: Mapping[float, int]) -> None:
        """Add a matrix.

        Args:
            spectrum: its decomposition.
            ranks: of its approximations, by a number that identifies the same approximation of all matrices, such as a ratio.
        """
        squares = spectrum.values.square()
        self._total = self._total + squares.sum()
        for size, rank in ranks.items():
            self._kept[size] = self._kept.get(size, 0.0) + squares[:rank].sum()

    def shares(self) -> dict[float, float]:
        """Shares in [0, 1], by that number; 1 if all matrices are zero."""
        return {size: (kept / self._total).item() if self._total else 1.0 for size, kept in self._kept.items()}


def rank_of(weight: Tensor, ratio: float, layer: str) -> int:
    r""":math:`\max(1, \mathrm{round}(\gamma\, n))`. For a convolution :math:`n` is the number of output channels, which gives the
    sizes in Table 2 of the FedHM paper. For a matrix, which the paper does not factorize, it is the smaller side, the largest
    possible rank: with the outputs, a ratio of 1/2 would turn 800 x 2000 into two layers with more values than the original.

    Args:
        weight: of the layer.
        ratio: :math:`\gamma`, in (0, 1].
        layer: its name, for the error.

    Raises:
        FederationError: for a rank beyond the largest possible one, as with convolutions of few input channels.
    """
    rank = max(1, round(ratio * (len(weight) if weight.dim() == 4 else min(weight.shape))))
    rows, columns = unroll(weight).shape
    if rank > min(rows, columns):
        raise FederationError(
            f"Layer {layer!r} has rank {min(rows, columns)} at most, but a rank ratio of {ratio:g} asks for {rank}: "
            "leave it out of layers, or give a smaller ratio."
        )
    return rank


def require_plain_weight(network: nn.Module, layer: nn.Module, purpose: str, weight: str = "weight") -> None:
    """Refuse a layer whose weight is computed from other tensors, as by a spectral norm or a weight norm.

    Args:
        network: what the layer is in, for its name.
        layer: one of its layers.
        purpose: what the weight is for, as a part of the message.
        weight: name of the weight in the layer.

    Raises:
        FederationError: if the weight is no parameter of the layer.
    """
    if weight not in dict(layer.named_parameters(recurse=False, remove_duplicate=False)):
        name = next(name for name, other in network.named_modules() if other is layer)
        raise FederationError(
            f"The {weight} of layer {name!r} is computed from other tensors, as by a spectral norm, expected a parameter to "
            f"{purpose}: make it one with torch.nn.utils.parametrize.remove_parametrizations, or choose another layer or method."
        )


def require_own_tensors(network: nn.Module, layers: Collection[str], purpose: str) -> None:
    """Refuse layers of which a tensor has another name in the network, as a tied weight or as a part of a repeated layer.

    Args:
        network: what the layers are in.
        layers: names of some of its layers.
        purpose: see :func:`require_plain_weight`.

    Raises:
        FederationError: names one, and the other layer.
    """
    for second, first in second_names(network).items():
        for name, other in ((second, first), (first, second)):
            layer, _, tensor = name.rpartition(".")
            if layer in layers:
                raise FederationError(
                    f"Layer {layer!r} shares its {tensor} with {other.rpartition('.')[0]!r}, expected one of its own to {purpose}: "
                    "name only layers with tensors of their own in layers, or choose another method."
                )


def unroll(weight: Tensor) -> Tensor:
    """A weight as a matrix of the input side times the output side.

    A kernel ``(n, m, k_h, k_w)`` becomes ``(m·k_h, n·k_w)``; a linear layer's ``(out, in)`` becomes ``(in, out)``.
    """
    if weight.dim() == 2:
        return weight.T
    return weight.permute(1, 2, 0, 3).flatten(2).flatten(0, 1)


def roll_up(matrix: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of :func:`unroll`: a weight of a shape."""
    if len(shape) == 2:
        return matrix.T
    outputs, inputs, height, width = shape
    return matrix.view(inputs, height, outputs, width).permute(2, 0, 1, 3)


def layer_weights(left: Tensor, right: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The weights of two consecutive layers that replace one.

    Args:
        left: the factor of the input side, ``(m·k_h, r)`` or ``(in, r)``.
        right: of the output side, ``(n·k_w, r)`` or ``(out, r)``.
        shape: of the original weight.

    Returns:
        Kernels ``(r, m, k_h, 1)`` and ``(n, r, 1, k_w)``, or matrices ``(r, in)`` and ``(out, r)``.
    """
    if len(shape) == 2:
        return left.T, right
    outputs, inputs, height, width = shape
    first = left.view(inputs, height, -1).permute(2, 0, 1).unsqueeze(-1)
    return first, right.view(outputs, width, -1).permute(0, 2, 1).unsqueeze(2)


def layer_factors(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of :func:`layer_weights`: the left and the right factor."""
    if first.dim() == 2:
        return first.T, second
    return first[..., 0].permute(1, 2, 0).flatten(0, 1), second[:, :, 0].permute(0, 2, 1).flatten(0, 1)


def recover(first: Tensor, second: Tensor) -> Tensor:
    """The single weight that two consecutive layers are equivalent to, in the original shape."""
    left, right = layer_factors(first, second)
    shape = (len(second), first.shape[1], *first.shape[2:3], *second.shape[3:])
    return roll_up(left @ right.T, shape)


class Factorized(nn.Sequential):
    """Two consecutive layers, with nothing in between, that replace one of low rank. It has the attributes of the original layer
    (``weight``, ``bias``, ``kernel_size``, ``in_features``).
    """

    def __init__(self, first: nn.Module, second: nn.Module, original: nn.Conv2d | nn.Linear, spectral: bool) -> None:
        super().__init__(first, second)
        for constant in original.__constants__:  # PyTorch's list of a layer's sizes
            if hasattr(original, constant):
                setattr(self, constant, getattr(original, constant))
        if original.bias is not None:
            second.load_state_dict({"bias": original.bias}, strict=False)
        if spectral:
            weight = original.weight.detach()
            layers = layer_weights(*Spectrum.of(unroll(weight)).factors(len(self.weights[0])), weight.shape)
            for mine, its in zip(self.weights, layers, strict=True):
                mine.data.copy_(its)

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        """Weights of the first and the second layer."""
        first, second = (cast(Tensor, layer.weight) for layer in self)
        return first, second

    @property
    def weight(self) -> Tensor:
        """Weight of the layer it replaces, computed on access: see :meth:`recover`."""
        return self.recover()

    @property
    def bias(self) -> Tensor | None:
        """Bias of the second layer."""
        return cast(Tensor | None, self[1].bias)

    def recover(self) -> Tensor:
        """The single weight that the two layers are equivalent to, in the original shape; differentiable."""
        return recover(*self.weights)


class FactorizedConv2d(Factorized):
    """A convolution of rank r: a ``(k, 1)`` one to r channels, then a ``(1, k)`` one, with nothing in between.

    It computes exactly the convolution with the kernel :meth:`recover`, also at the borders and for any stride.

    Args:
        conv: an ungrouped convolution without dilation and with zero padding.
        rank: r.
        spectral: start as the best approximation of ``conv``; otherwise with PyTorch's random weights, without an SVD.
    """

    def __init__(self, conv: nn.Conv2d, rank: int, spectral: bool = True) -> None:
        if conv.groups != 1 or conv.dilation != (1, 1) or conv.padding_mode != "zeros" or isinstance(conv.padding, str):
            raise FederationError(
                f"{conv} cannot be factorized: it has groups, dilation or padding other than with a number of zeros."
            )
        (height, width), (down, across), (above, beside) = conv.kernel_size, conv.stride, conv.padding
        new = partial(nn.Conv2d, device=conv.weight.device, dtype=conv.weight.dtype)
        first = new(conv.in_channels, rank, (height, 1), (down, 1), (above, 0), bias=False)
        second = new(rank, conv.out_channels, (1, width), (1, across), (0, beside), bias=conv.bias is not None)
        super().__init__(first, second, conv, spectral)


class FactorizedLinear(Factorized):
    """A linear layer of rank r: one to r features without bias, then one to the outputs with the bias.

    Args:
        linear: any linear layer.
        rank: r.
        spectral: start as the best approximation of ``linear``; otherwise with PyTorch's random weights.
    """

    def __init__(self, linear: nn.Linear, rank: int, spectral: bool = True) -> None:
        new = partial(nn.Linear, device=linear.weight.device, dtype=linear.weight.dtype)
        first = new(linear.in_features, rank, bias=False)
        super().__init__(first, new(rank, linear.out_features, bias=linear.bias is not None), linear, spectral)


def factorize(module: nn.Module, layers: Iterable[str], ratio: float, spectral: bool = True) -> None:
    r"""Replace convolutions and linear layers by factorized ones, in place.

    The rank is that of :func:`rank_of`, which raises an error if it is impossible. A ratio of 1 does not change the layers.

    Args:
        module: any network.
        layers: names of the layers, as in ``module.named_modules()``.
        ratio: the rank ratio :math:`\gamma`, in (0, 1].
        spectral: start as the best approximation of the layers; otherwise with PyTorch's random weights, without an SVD.
    """
    if not 0 < ratio <= 1:
        raise FederationError(f"A rank ratio of {ratio} was asked for: give one in (0, 1].")
    for name in layers if ratio < 1 else ():
        layer = module.get_submodule(name)
        if isinstance(layer, nn.Conv2d):
            replacement: Factorized = FactorizedConv2d(layer, rank_of(layer.weight, ratio, name), spectral)
        elif isinstance(layer, nn.Linear):
            replacement = FactorizedLinear(layer, rank_of(layer.weight, ratio, name), spectral)
        else:
            raise FederationError(f"{name!r} is a {type(layer).__name__}: only Conv2d and Linear layers can be factorized.")
        module.set_submodule(name, replacement)


def frobenius_decay(module: nn.Module, weight: float) -> Tensor:
    r"""Weight decay of the products instead of the factors: :math:`\frac{\lambda}{2} \sum_l \lVert U_l V_l^\top \rVert_F^2`.

    Computed as :math:`\mathrm{tr}[(U^\top U)(V^\top V)]`, without the product.

    Args:
        module: a network with factorized layers.
        weight: :math:`\lambda`.
    """
    squares = [torch.zeros(())]
    for layer in module.modules():
        if isinstance(layer, Factorized):
            left, right = layer_factors(*layer.weights)
            squares.append(((left.T @ left) * (right.T @ right)).sum())
    return weight / 2 * torch.stack([square.to(squares[-1].device) for square in squares]).sum()
