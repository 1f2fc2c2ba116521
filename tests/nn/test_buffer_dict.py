"""Tensors by name that are no parameters."""

import pytest
import torch
from torch import nn

from lightning_fed.nn import BufferDict


def test_it_is_a_copy_under_the_same_names() -> None:
    network = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    tensors = BufferDict(dict(network.named_parameters()))
    assert list(tensors) == [name for name, _ in network.named_parameters()]
    assert all(torch.equal(tensors[name], p) and tensors[name] is not p for name, p in network.named_parameters())
    assert "0.weight" in tensors
    assert "2.weight" not in tensors
    assert len(tensors) == 4
    assert not list(tensors.parameters())


def test_values_are_taken_over_in_place() -> None:
    tensors = BufferDict({"a.b": torch.zeros(2)})
    place = tensors["a.b"]
    tensors.update({"a.b": nn.Parameter(torch.ones(2))})
    assert place.tolist() == [1, 1]
    assert not place.requires_grad
    with pytest.raises(KeyError):
        tensors.update({"a.c": torch.zeros(2)})


@pytest.mark.parametrize("persistent", [True, False])
def test_it_is_in_the_state_dict_if_it_is_to_stay(persistent: bool) -> None:
    module = nn.Module()
    module.kept = BufferDict({"a.b": torch.zeros(2)}, persistent)
    assert list(module.state_dict()) == (["kept.a/b"] if persistent else [])
    assert module.to(torch.float64).kept["a.b"].dtype == torch.float64
