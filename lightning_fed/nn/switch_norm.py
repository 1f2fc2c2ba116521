"""Switchable normalization of images (Luo et al., ICLR 2019, https://arxiv.org/abs/1806.10779)."""

import torch
from torch import Tensor, nn


class SwitchNorm2d(nn.Module):
    """Normalises images by a learned mixture of the statistics of instance, layer and batch norm.

    Args:
        channels: C of images ``(B, C, H, W)``.
        momentum: share of the running statistics that each batch keeps.
        eps: added to variances.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, momentum: float = 0.9, eps: float = 1e-5) -> None:
        super().__init__()
        self.momentum = momentum
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels, 1, 1))
        self.bias = nn.Parameter(torch.zeros(channels, 1, 1))
        self.mean_weight = nn.Parameter(torch.ones(3))
        self.var_weight = nn.Parameter(torch.ones(3))
        self.register_buffer("running_mean", torch.zeros(channels, 1, 1))
        self.register_buffer("running_var", torch.zeros(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        var, mean = torch.var_mean(x, dim=(2, 3), keepdim=True)  # of each channel of each image
        layer_var = var.mean(dim=1, keepdim=True) + mean.var(dim=1, correction=0, keepdim=True)
        layer_mean = mean.mean(dim=1, keepdim=True)
        if self.training:
            batch_var, batch_mean = var.mean(dim=0) + mean.var(dim=0, correction=0), mean.mean(dim=0)
            with torch.no_grad():
                self.running_mean.lerp_(batch_mean.to(self.running_mean.dtype), 1 - self.momentum)
                self.running_var.lerp_(batch_var.to(self.running_var.dtype), 1 - self.momentum)
        else:
            batch_mean, batch_var = self.running_mean, self.running_var
        first, second, third = self.mean_weight.softmax(dim=0)
        mixed_mean = first * mean + second * layer_mean + third * batch_mean
        first, second, third = self.var_weight.softmax(dim=0)
        mixed_var = first * var + second * layer_var + third * batch_var
        return (x - mixed_mean) * (mixed_var + self.eps).rsqrt() * self.weight + self.bias
