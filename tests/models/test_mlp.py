"""The multilayer perceptron."""

import pytest
import torch
from tiny import new_data, new_federation
from torch import nn

from lightning_fed.data import IID
from lightning_fed.methods import FedHM
from lightning_fed.models import MLP


@pytest.mark.parametrize(
    ("hidden", "width", "sizes"), [(None, 1.0, [64, 64]), ([], 1.0, []), ([8, 6], 1.0, [8, 6]), ([8, 6], 0.5, [4, 3])]
)
def test_it_is_linear_layers_with_relu_between(hidden: list[int] | None, width: float, sizes: list[int]) -> None:
    network = MLP(3, inputs=5, hidden=hidden, width=width)
    layers = [module for module in network.modules() if isinstance(module, nn.Linear)]
    assert [(layer.in_features, layer.out_features) for layer in layers] == list(zip([5, *sizes], [*sizes, 3], strict=True))
    x = torch.randn(7, 5)
    expected = nn.Sequential(*(each for layer in layers[:-1] for each in (layer, nn.ReLU())), layers[-1])(x)
    assert torch.equal(network(x), expected)
    assert torch.equal(network(x.view(7, 1, 5)), expected)
    assert network.cuts == {"features": [5, *sizes][-1]}


def test_it_can_be_factorized() -> None:
    data = new_data(2, 40, partition=IID())

    def network(num_classes: int, width: float = 1.0) -> MLP:
        return MLP(num_classes, inputs=48, hidden=[8, 6], width=width)

    federation = new_federation(1)
    federation.fit(FedHM(network, 4, ratios=[1 / 2]), data)
    shapes = [tuple(tensor.shape) for tensor in federation.client_module(0).shared_state().values() if tensor.dim() > 1]
    assert shapes == [(4, 48), (8, 4), (3, 8), (6, 3), (4, 6)]
