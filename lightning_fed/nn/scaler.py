"""The scaler of networks that are trained narrow and merged into wide ones (Diao et al., HeteroFL, ICLR 2021)."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

NORMS = (_BatchNorm, nn.GroupNorm, nn.LayerNorm)


def scale_before_norms(module: nn.Module, factor: float) -> None:
    """Multiply the input of each norm layer, in training only, in place: a narrow layer's sums have fewer terms.

    Batch norm with the batch's own statistics undoes it, except for its epsilon. "Training" means that gradients are computed:
    running statistics gathered without gradients must be those of evaluation.

    Args:
        module: a network.
        factor: for a network of relative width s: 1 / s.
    """

    def scale(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0] * factor, *inputs[1:]) if layer.training and torch.is_grad_enabled() else inputs

    for layer in module.modules():
        if isinstance(layer, NORMS):
            layer.register_forward_pre_hook(scale)
