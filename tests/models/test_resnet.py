"""The shallow residual networks."""

import pytest
import torch
from torch import nn

from lightning_fed.models import ResNet8, ResNet10


@pytest.mark.parametrize(
    ("network", "classes", "parameters", "convolutions", "norms"),
    [
        (ResNet8, 10, 1_235_274, 1_230_016, 2_688),
        (ResNet10, 100, 4_957_092, 4_900_032, 5_760),
        (ResNet10, 200, 5_008_392, 4_900_032, 5_760),
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


def test_the_first_stage_has_no_shortcut_layer() -> None:
    names = {name for name, _ in ResNet8().named_modules()}
    assert "stages.0.downsample.1" not in names
    assert {"stages.1.downsample.1", "stages.2.downsample.1"} <= names
