"""Parameters cut into blocks."""

from functools import partial

import pytest
import torch
from torch import nn

from lightning_fed.models import CNN1, CNN5, ResNet8
from lightning_fed.nn.blocks import Blocks

SMALL = partial(nn.Sequential, nn.Conv2d(2, 5, 3), nn.Linear(7, 4), nn.BatchNorm2d(6))


def test_blocks_of_cnn1() -> None:
    network = CNN1(10)
    blocks = Blocks(network, 5)
    assert len(blocks) == 49
    assert sum(blocks.sizes) == 2_621_558
    ends = [*blocks.first[1:], len(blocks)]
    sizes = [blocks.sizes[begin:end] for begin, end in zip(blocks.first, ends, strict=True)]
    by_name = dict(zip((name for name, _ in network.named_parameters()), sizes, strict=True))
    assert by_name["conv1.bias"] == [4, 4, 4, 4]
    assert by_name["conv2.bias"] == [7, 7, 7, 7, 4]
    assert by_name["fc1.weight"] == [320_000] * 5


@pytest.mark.parametrize("network", [CNN5, ResNet8, SMALL])
@pytest.mark.parametrize("count", [1, 3, 5, 1000])
def test_blocks_cover_everything(network: type[nn.Module], count: int) -> None:
    made = network()
    blocks = Blocks(made, count)
    assert sum(blocks.sizes) == sum(p.numel() for p in made.parameters())
    assert len(blocks.first) == len(list(made.parameters()))
    assert sorted([*blocks.first, *blocks.groups[0], *blocks.groups[1]]) == list(range(len(blocks)))
    assert all(size > 0 for size in blocks.sizes)


def test_linear_layers_are_a_group_of_their_own() -> None:
    blocks = Blocks(SMALL(), 3)
    linear, other = blocks.groups
    assert sum(blocks.sizes[block] for block in linear) == 28 + 4 - 10 - 2
    assert sum(blocks.sizes[block] for block in other) == (90 - 30) + (5 - 2) + 2 * (6 - 2)


@pytest.mark.parametrize("density", [0.2, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("network", [CNN5, SMALL])
def test_what_is_kept_fits_and_every_layer_keeps_something(network: type[nn.Module], density: float) -> None:
    blocks = Blocks(network(), 5)
    sizes = torch.tensor(blocks.sizes)
    for _ in range(5):
        importance = torch.rand(len(blocks)).clamp(min=blocks.least(density))
        kept = blocks.keep(importance, density)
        assert kept[blocks.first].all()
        tenths = (importance * 10).round()
        for group in blocks.groups:
            inside, room = [b for b in group if kept[b]], round((density - blocks.least(density)) * int(sizes[group].sum()))
            spent = int(sizes[inside].sum())
            assert spent <= room
            for left_out in set(group) - set(inside):  # what is as important as it, and fits, came before
                before = [b for b in inside if tenths[b] > tenths[left_out] or (tenths[b] == tenths[left_out] and b < left_out)]
                assert int(sizes[before].sum()) + sizes[left_out] > room


def test_at_density_1_everything_is_kept() -> None:
    assert Blocks(CNN1(10), 5).keep(torch.rand(49), 1).all()


@pytest.mark.parametrize("network", [CNN5, SMALL])
def test_cutting_and_filling_in(network: type[nn.Module]) -> None:
    made = network()
    blocks = Blocks(made, 5)
    before = {name: p.detach() for name, p in made.named_parameters()}
    kept = torch.rand(len(blocks)) < 0.5
    after = {name: p + blocks.spread(name, kept, p.shape) for name, p in before.items()}
    assert torch.equal(blocks.moved(after, before), kept)
    parts = blocks.cut(after, kept)
    assert sum(part.numel() for part in parts.values()) == (torch.tensor(blocks.sizes) * kept).sum()
    assert {name: part.shape for name, part in parts.items()} == {n: t.shape for n, t in blocks.parts(before, kept).items()}
    whole = blocks.filled(parts, kept, before)
    assert all(torch.equal(whole[name], tensor) for name, tensor in after.items())


def test_scales_multiply_their_blocks() -> None:
    layer = nn.Linear(4, 3)
    blocks = Blocks(layer, 5)
    by = torch.arange(1.0, len(blocks) + 1)
    scaled = blocks.scaled(dict(layer.named_parameters()), by)
    for name, expected in (("weight", [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]), ("bias", [5, 6, 7])):
        parameter = layer.get_parameter(name)
        assert torch.equal(scaled[name], parameter * torch.tensor(expected).view(parameter.shape))
