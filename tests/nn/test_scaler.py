"""What goes into the norm layers of narrow networks."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from lightning_fed.models import CNN, ResNet8
from lightning_fed.nn import scale_activations

NORMS: dict[str, Callable[..., nn.Module]] = {
    "batch": partial(nn.BatchNorm2d, 8),
    "group": partial(nn.GroupNorm, 4, 8),
    "layer": partial(nn.LayerNorm, (8, 5, 5)),
}


@pytest.mark.parametrize("kind", NORMS)
def test_in_training_the_input_is_multiplied_and_in_evaluation_it_is_not(kind: str) -> None:
    """An epsilon as large as the variance does not let the norm undo it; a small one does."""
    x = torch.randn(6, 8, 5, 5)
    for eps in (1.0, 1e-5):
        norm = NORMS[kind](eps=eps)
        plain = copy.deepcopy(norm)
        scale_activations(norm, 4.0)
        assert torch.equal(norm(x), plain(4 * x))
        assert torch.allclose(norm(x), plain(x), atol=5e-5) == (eps < 1)
        plain.load_state_dict(norm.state_dict())  # statistics
        assert torch.equal(norm.eval()(x), plain.eval()(x))


def test_every_norm_of_a_network_is_scaled_once() -> None:
    """All norms put out ones, so that what goes into them does not depend on how they normalize."""
    network, x = ResNet8(width=0.1), torch.rand(2, 3, 32, 32)
    scale_activations(network, 2.0)
    seen: list[float] = []
    norms = [layer for layer in network.modules() if isinstance(layer, nn.BatchNorm2d)]
    for norm in norms:
        nn.init.zeros_(norm.weight)
        nn.init.ones_(norm.bias)
        norm.register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0].mean().item()))
    network(x)
    scaled, seen[:] = list(seen), []
    network.eval()(x)
    assert len(scaled) == len(norms) == 9
    assert scaled == pytest.approx([2 * mean for mean in seen], rel=1e-5)


def test_without_norms_every_layer_but_the_last_is_scaled() -> None:
    network, x = CNN(width=0.1), torch.rand(2, 3, 32, 32)
    plain, seen = copy.deepcopy(network), list[bool]()
    scale_activations(network, 2.0)
    layers = [(name, layer) for name, layer in network.named_modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    for name, layer in layers:
        own = plain.get_submodule(name)
        layer.register_forward_hook(lambda _, inputs, output, own=own: seen.append(torch.equal(output, 2 * own(*inputs))))
    network(x)
    assert seen == [True] * (len(layers) - 1) + [False]
    assert torch.equal(network.eval()(x), plain.eval()(x))
