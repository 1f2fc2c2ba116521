"""Trains parts of a half-precision network in single precision."""

from typing import Any

import torch
from torch import Tensor, nn

HALF = (torch.bfloat16, torch.float16)


def learn_in_float32(network: nn.Module) -> None:
    """Convert trainable half-precision parameters to float32: most training steps are smaller than half the spacing of such
    numbers, and would be rounded away. Frozen parameters keep their precision, and their memory. Trainable layers convert their
    inputs.

    Args:
        network: changed in place; its parameters stay the same objects.
    """
    widened = [p for p in network.parameters() if p.requires_grad and p.dtype in HALF]
    for parameter in widened:
        parameter.data = parameter.data.float()
    learning = {id(p) for p in widened}
    layers = [layer for layer in network.modules() if not learning.isdisjoint(map(id, layer.parameters(recurse=False)))]
    for layer in layers:
        for name, buffer in layer.named_buffers(recurse=False):  # statistics of norms
            if buffer.dtype in HALF:
                setattr(layer, name, buffer.float())
        if any(p.dtype in HALF for p in network.parameters()):
            layer.register_forward_pre_hook(as_its_weights)


def as_its_weights(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Forward pre-hook: convert inputs to the precision of the layer's weights."""
    dtype = next(layer.parameters(recurse=False)).dtype
    return tuple(value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value for value in inputs)
