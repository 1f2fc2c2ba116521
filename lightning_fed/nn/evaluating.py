"""Eval mode for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Put a network in eval mode within this block; afterwards restore the mode of each layer."""
    modes = {layer: layer.training for layer in network.modules()}
    network.eval()
    try:
        yield
    finally:
        for layer, mode in modes.items():
            layer.training = mode
