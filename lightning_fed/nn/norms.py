"""Normalization: static batch norm and the scaler of narrow networks (Diao et al., HeteroFL, ICLR 2021), and switchable norm."""

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

NORMS = (_BatchNorm, nn.GroupNorm, nn.LayerNorm)


def running_statistics(module: nn.Module) -> set[str]:
    """Names of the running means, variances and batch counters of all batch-norm layers, as in the state dict."""
    return {
        f"{name}.{buffer}" if name else buffer
        for name, layer in module.named_modules(remove_duplicate=False)
        if isinstance(layer, _BatchNorm)
        for buffer, _ in layer.named_buffers(recurse=False)
    }


class StatisticsPass(L.LightningModule):
    """Static batch norm (Diao et al., HeteroFL, ICLR 2021): running statistics do not travel, but are gathered when needed, in one
    pass over data that sets those of each batch-norm layer to the plain mean of the batches' means and variances.

    Batches are normalized by their own statistics, as in training; variances are unbiased; everything else is in eval mode. This
    is not the pooled variance: it leaves out the variance between batch means. ``Trainer.predict`` runs it.

    Args:
        module: the network; called with the inputs ``(B, …)`` of each batch.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._norms = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
        self._momenta: list[float | None] = []  # the layers' original momenta

    def on_predict_start(self) -> None:
        """Reset the statistics, with a momentum of None: PyTorch's cumulative average."""
        self._momenta = [norm.momentum for norm in self._norms]
        for norm in self._norms:
            norm.reset_running_stats()
            norm.momentum = None
            norm.train()

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> int:
        """Process a batch; returns its number of examples."""
        self.module(batch[0])
        return len(batch[0])

    def on_predict_end(self) -> None:
        """Restore the layers except for their statistics; Lightning restores their mode."""
        for norm, momentum in zip(self._norms, self._momenta, strict=True):
            norm.momentum = momentum


def scale_activations(module: nn.Module, factor: float) -> None:
    """The scaler of networks that are trained narrow and merged into wide ones (Diao et al., HeteroFL, ICLR 2021): multiply the
    input of each norm layer, or, in a network without any, the output of each layer but the last, in training only, in place,
    because a narrow layer's sums have fewer terms.

    Batch norm with the batch's own statistics undoes it, except for its epsilon. "Training" means that gradients are computed:
    running statistics gathered without gradients must be those of evaluation.

    Args:
        module: a network.
        factor: for a network of relative width s: 1 / s.
    """

    def scaled(layer: nn.Module, x: Tensor) -> Tensor:
        return x * factor if layer.training and torch.is_grad_enabled() else x

    norms = [layer for layer in module.modules() if isinstance(layer, (*NORMS, SwitchNorm2d))]
    for norm in norms:
        norm.register_forward_pre_hook(lambda layer, inputs: (scaled(layer, inputs[0]), *inputs[1:]))
    layers = [layer for layer in module.modules() if isinstance(layer, (_ConvNd, nn.Linear))]
    for layer in () if norms else layers[:-1]:
        layer.register_forward_hook(lambda layer, _, output: scaled(layer, output))


class SwitchNorm2d(nn.Module):
    """Switchable normalization of images (Luo et al., ICLR 2019, https://arxiv.org/abs/1806.10779): by a learned mixture of the
    statistics of instance, layer and batch norm.

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
