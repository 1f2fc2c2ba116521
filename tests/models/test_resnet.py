"""The residual networks."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fed.errors import FederationError
from lightning_fed.models import CIFARResNet, ResNet8, ResNet10, ResNet18, ResNet34
from lightning_fed.nn import factorize


@pytest.mark.parametrize(
    ("network", "classes", "parameters", "convolutions", "norms"),
    [
        (ResNet8, 10, 1_235_274, 1_230_016, 2_688),
        (ResNet10, 100, 4_957_092, 4_900_032, 5_760),
        (ResNet10, 200, 5_008_392, 4_900_032, 5_760),
        (ResNet34, 100, 21_328_292, 21_259_968, 17_024),
    ],
)
def test_sizes(network: type[nn.Module], classes: int, parameters: int, convolutions: int, norms: int) -> None:
    model = network(classes)

    def count(kind: type[nn.Module]) -> int:
        return sum(p.numel() for module in model.modules() if isinstance(module, kind) for p in module.parameters())

    assert sum(p.numel() for p in model.parameters()) == parameters
    assert count(nn.Conv2d) == convolutions
    assert count(nn.BatchNorm2d) == norms
    buffers = list(model.buffers())
    assert sum(b.numel() for b in buffers if b.is_floating_point()) == norms


def test_resolution_of_the_stages() -> None:
    model = ResNet8()
    x = model.stem(torch.rand(1, 3, 32, 32))
    sizes = [x.shape[-1]]
    for stage in model.stages:
        x = stage(x)
        sizes.append(x.shape[-1])
    assert sizes == [8, 8, 4, 2]
    assert model(torch.rand(2, 3, 64, 64)).shape == (2, 10)


def test_resnet_8_names_the_convolutions_of_all_blocks_but_the_first() -> None:
    names = ["stages.1.conv1", "stages.1.conv2", "stages.2.conv1", "stages.2.conv2"]
    model = ResNet8(width=0.1)
    assert model.factorizable == names
    assert all(model.get_submodule(name).kernel_size == (3, 3) for name in names)


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def test_a_width_multiplies_the_hidden_channels_and_nothing_else() -> None:
    narrow = shapes(ResNet8(7, width=0.35))
    assert narrow["stem.0.weight"] == (22, 3, 7, 7)
    assert narrow["stages.0.conv2.weight"] == (22, 22, 3, 3)
    assert narrow["stages.1.downsample.0.weight"] == (45, 22, 1, 1)
    assert narrow["stages.2.bn1.weight"] == (90,)
    assert narrow["head.weight"] == (7, 90)


@pytest.mark.parametrize(
    ("depth", "width", "parameters"),
    [(8, 1.0, 78_042), (8, 0.66, 34_324), (8, 0.54, 23_533), (8, 0.45, 16_044), (20, 1.0, 272_474), (56, 1.0, 855_770)],
)
def test_the_thin_networks_for_cifar(depth: int, width: float, parameters: int) -> None:
    """Depths 20 and 56 have the sizes that are known of them with projections in the shortcuts."""
    model = CIFARResNet(10, depth, width)
    assert sum(p.numel() for p in model.parameters()) == parameters
    shortcuts = {layer for layer in model.modules() if isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1)}
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear) and layer not in shortcuts]
    assert len(layers) == depth
    assert model(torch.rand(2, 3, 16, 16)).shape == (2, 10)


@pytest.mark.parametrize(("ratio", "parameters"), [(1 / 2, 35_802), (1 / 4, 22_362), (1 / 8, 15_642)])
def test_low_rank_versions_of_the_thin_network_leave_its_first_block(ratio: float, parameters: int) -> None:
    model = CIFARResNet(10, depth=8)
    factorize(model, model.factorizable, ratio)
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize("depth", [2, 9, 18])
def test_a_depth_that_there_is_not_is_refused(depth: int) -> None:
    with pytest.raises(FederationError, match=rf"^depth is {depth}: give 6n \+ 2, such as 8, 14 or 20"):
        CIFARResNet(10, depth)


@pytest.mark.parametrize("build", [ResNet8, ResNet10, ResNet18, ResNet34, partial(CIFARResNet, depth=8)], ids=str)
def test_group_norm_has_no_statistics_and_as_many_parameters(build: Any) -> None:
    """Each channel count of these networks is divided into groups of equal size."""
    group, batch = build(10, width=0.25, norm="group"), build(10, width=0.25)
    assert not list(group.buffers())
    assert {name: p.shape for name, p in group.named_parameters()} == {name: p.shape for name, p in batch.named_parameters()}
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(group.eval()(images)[:1], group.train()(images[:1]), rtol=1e-4, atol=1e-5)
