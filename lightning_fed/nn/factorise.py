"""Layers replaced by two smaller ones in a row: the low-rank networks of FedHM, usable alone."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from lightning_fed.errors import FederationError


def spectral_factors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    r"""The best factors of a rank: :math:`W \approx UV^\top` with :math:`U = P_r \Sigma_r^{1/2}`, :math:`V = Q_r \Sigma_r^{1/2}`.

    Both factors share the singular values, so that :math:`U^\top U = V^\top V = \Sigma_r`. Computed in float64.

    Args:
        matrix: ``(m, n)``.
        rank: r, from 1 to min(m, n).

    Returns:
        ``U`` of shape ``(m, r)`` and ``V`` of shape ``(n, r)``, of the dtype of ``matrix``.
    """
    if not 1 <= rank <= min(matrix.shape):
        rows, columns = matrix.shape
        raise FederationError(f"A rank of {rank} was asked for a {rows} x {columns} matrix: give 1 to {min(rows, columns)}.")
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    root = values[:rank].sqrt()
    return (left[:, :rank] * root).to(matrix.dtype), (right[:rank].T * root).to(matrix.dtype)


class Factorised(nn.Sequential, ABC):
    """Two layers in a row, with nothing in between, that stand for one of low rank."""

    def __init__(self, first: nn.Module, second: nn.Module, original: nn.Conv2d | nn.Linear) -> None:
        super().__init__(first, second)
        if original.bias is not None:
            second.load_state_dict({"bias": original.bias}, strict=False)
        self.load_kernel(original.weight.detach())

    @property
    def _weights(self) -> tuple[Tensor, Tensor]:
        """Of the first and the second layer."""
        first, second = (cast(Tensor, layer.weight) for layer in self)
        return first, second

    @abstractmethod
    def factors(self) -> tuple[Tensor, Tensor]:
        """``U`` and ``V``, differentiable."""

    @abstractmethod
    def recover(self) -> Tensor:
        """The weight that the two layers have together, in the shape of the original's."""

    @abstractmethod
    def load_kernel(self, kernel: Tensor) -> None:
        """Take the best factors of another weight of the original's shape."""


class FactorisedConv2d(Factorised):
    """A convolution of rank r: a ``(k, 1)`` one to r channels, then a ``(1, k)`` one, with nothing in between.

    It computes exactly what one convolution with the kernel :meth:`recover` does, at the borders and for any stride, too. The
    kernel is unrolled to rows (input channel, height) and columns (output channel, width).

    Args:
        conv: an ungrouped convolution without dilation and with zero padding, whose weight is factorised.
        rank: r.
    """

    def __init__(self, conv: nn.Conv2d, rank: int) -> None:
        if conv.groups != 1 or conv.dilation != (1, 1) or conv.padding_mode != "zeros" or isinstance(conv.padding, str):
            raise FederationError(
                f"{conv} cannot be factorised: it has groups, dilation or padding other than with a number of zeros."
            )
        (height, width), (down, across), (above, beside) = conv.kernel_size, conv.stride, conv.padding
        first = nn.Conv2d(conv.in_channels, rank, (height, 1), (down, 1), (above, 0), bias=False)
        second = nn.Conv2d(rank, conv.out_channels, (1, width), (1, across), (0, beside), bias=conv.bias is not None)
        super().__init__(first, second, conv)

    def factors(self) -> tuple[Tensor, Tensor]:
        """``U`` of shape ``(m·k_h, r)`` and ``V`` of shape ``(n·k_w, r)``, differentiable."""
        first, second = self._weights
        return first[..., 0].permute(1, 2, 0).flatten(0, 1), second[:, :, 0].permute(0, 2, 1).flatten(0, 1)

    def recover(self) -> Tensor:
        """The kernel ``(n, m, k_h, k_w)`` that the two layers have together."""
        left, right = self.factors()
        (_, inputs, height, _), (outputs, _, _, width) = (weight.shape for weight in self._weights)
        return (left @ right.T).view(inputs, height, outputs, width).permute(2, 0, 1, 3)

    @torch.no_grad()
    def load_kernel(self, kernel: Tensor) -> None:
        """Take the best factors of another kernel ``(n, m, k_h, k_w)``."""
        outputs, inputs, height, width = kernel.shape
        first, second = self._weights
        left, right = spectral_factors(kernel.permute(1, 2, 0, 3).reshape(inputs * height, outputs * width), len(first))
        first.copy_(left.view(inputs, height, -1).permute(2, 0, 1).unsqueeze(-1))
        second.copy_(right.view(outputs, width, -1).permute(0, 2, 1).unsqueeze(2))


class FactorisedLinear(Factorised):
    """A linear layer of rank r: one to r features without bias, then one to the outputs with the bias.

    Args:
        linear: the layer whose weight is factorised.
        rank: r.
    """

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        first = nn.Linear(linear.in_features, rank, bias=False)
        second = nn.Linear(rank, linear.out_features, bias=linear.bias is not None)
        super().__init__(first, second, linear)

    def factors(self) -> tuple[Tensor, Tensor]:
        """``U`` of shape ``(out, r)`` and ``V`` of shape ``(in, r)``, differentiable."""
        first, second = self._weights
        return second, first.T

    def recover(self) -> Tensor:
        """The weight ``(out, in)`` that the two layers have together."""
        left, right = self.factors()
        return left @ right.T

    @torch.no_grad()
    def load_kernel(self, kernel: Tensor) -> None:
        """Take the best factors of another weight ``(out, in)``."""
        first, second = self._weights
        left, right = spectral_factors(kernel, len(first))
        second.copy_(left)
        first.copy_(right.T)


def factorise(module: nn.Module, layers: Iterable[str], ratio: float) -> None:
    r"""Replace convolutions and linear layers by factorised ones, in place; they start as the best approximation.

    The rank is :math:`\max(1, \mathrm{round}(\gamma\, n))` with :math:`n` the output channels, the rule that gives the sizes in
    Table 2 of the FedHM paper. A ratio of 1 leaves the layers as they are.

    Args:
        module: any network.
        layers: names of the layers, as in ``module.named_modules()``.
        ratio: the rank ratio :math:`\gamma`, in (0, 1].
    """
    if not 0 < ratio <= 1:
        raise FederationError(f"A rank ratio of {ratio} was asked for: give one in (0, 1].")
    for name in layers if ratio < 1 else ():
        layer = module.get_submodule(name)
        if isinstance(layer, nn.Conv2d):
            replacement: Factorised = FactorisedConv2d(layer, max(1, round(ratio * layer.out_channels)))
        elif isinstance(layer, nn.Linear):
            replacement = FactorisedLinear(layer, max(1, round(ratio * layer.out_features)))
        else:
            raise FederationError(f"{name!r} is a {type(layer).__name__}: only Conv2d and Linear layers can be factorised.")
        module.set_submodule(name, replacement)


def frobenius_decay(module: nn.Module, weight: float) -> Tensor:
    r"""Weight decay of the products instead of the factors: :math:`\frac{\lambda}{2} \sum_l \lVert U_l V_l^\top \rVert_F^2`.

    Computed as :math:`\mathrm{tr}[(U^\top U)(V^\top V)]`, without the product.

    Args:
        module: a network with factorised layers.
        weight: :math:`\lambda`.
    """
    squares = [torch.zeros(())]
    for layer in module.modules():
        if isinstance(layer, Factorised):
            left, right = layer.factors()
            squares.append(((left.T @ left) * (right.T @ right)).sum())
    return weight / 2 * torch.stack([square.to(squares[-1].device) for square in squares]).sum()
