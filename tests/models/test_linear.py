"""The linear model."""

import torch
from torch import nn

from lightning_fed.models import LinearModel


def test_its_first_weights_are_pytorchs_right_after_the_seed_and_nothing_else_is_drawn() -> None:
    torch.manual_seed(43)
    expected = nn.Linear(13, 1)
    torch.manual_seed(7)
    undisturbed = torch.rand(3)
    torch.manual_seed(7)
    network = LinearModel(1, 13, seed=43)
    assert torch.equal(network.head.weight, expected.weight)
    assert torch.equal(network.head.bias, expected.bias)
    assert torch.equal(torch.rand(3), undisturbed)
    x = torch.randn(4, 13)
    assert torch.equal(network(x), expected(x))


def test_without_one_it_follows_the_stream() -> None:
    torch.manual_seed(7)
    first = LinearModel(2, 3).head.weight
    torch.manual_seed(7)
    assert torch.equal(LinearModel(2, 3).head.weight, first)
    assert not torch.equal(LinearModel(2, 3).head.weight, first)
