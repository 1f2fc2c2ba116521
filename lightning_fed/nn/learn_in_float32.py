"""Trains parts of a half-precision network in single precision."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

HALF = (torch.bfloat16, torch.float16)


def learn_in_float32(network: nn.Module) -> None:
    """Convert trainable half-precision parameters to float32: most training steps are smaller than half the spacing of such
    numbers, and would be rounded away. Frozen parameters of other layers keep their precision, and their memory. Trainable layers
    convert their inputs and, except for heads, after which no frozen layer comes, their outputs back.

    Args:
        network: changed in place; its parameters stay the same objects. Which layers come after others follows from the order of
            its modules.
    """
    of_layers = [[*layer.parameters(recurse=False)] for layer in network.modules()]
    widened = [p for own in of_layers if any(p.requires_grad and p.dtype in HALF for p in own) for p in own if p.dtype in HALF]
    for parameter in widened:
        parameter.data = parameter.data.float()
    learning = {id(p) for p in widened}
    has_half = any(p.dtype in HALF for p in network.parameters())
    half: torch.dtype | None = None  # of the layers after the one at hand
    for layer in reversed([*network.modules()]):
        own = [*layer.parameters(recurse=False)]
        if not learning.isdisjoint(map(id, own)):
            for name, buffer in layer.named_buffers(recurse=False):  # statistics of norms
                if buffer.dtype in HALF:
                    setattr(layer, name, buffer.float())
            if has_half:
                layer.register_forward_pre_hook(as_its_weights)
            if half is not None:
                layer.register_forward_hook(partial(as_the_rest, half))
        half = next((p.dtype for p in own if p.dtype in HALF), half)


def as_its_weights(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Forward pre-hook: convert inputs to the precision of the layer's weights."""
    dtype = next(layer.parameters(recurse=False)).dtype
    return tuple(value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value for value in inputs)


def as_the_rest(half: torch.dtype, layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    """Forward hook: convert float32 outputs to half precision; others come of a network in another precision."""
    return tree_map(lambda value: value.to(half) if isinstance(value, Tensor) and value.dtype == torch.float32 else value, output)
