"""Layers replaced by two smaller ones."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fed.errors import FederationError
from lightning_fed.models import CNN1, ResNet18, ResNet34
from lightning_fed.nn import Energy, FactorizedConv2d, FactorizedLinear, Spectrum, factorize, frobenius_decay


def test_what_is_factorized() -> None:
    assert len(ResNet18().factorizable) == 14
    assert len(ResNet34().factorizable) == 18
    model = ResNet18()
    factorize(model, model.factorizable, 0.5, spectral=False)
    replaced = {name for name, layer in model.named_modules() if isinstance(layer, FactorizedConv2d)}
    assert replaced == set(model.factorizable)
    assert "stages.0.0.conv1" not in replaced
    assert not any("downsample" in name for name in replaced)
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [7, 8])
@pytest.mark.parametrize("bias", [True, False])
def test_at_full_rank_two_layers_are_one(stride: int, size: int, bias: bool) -> None:
    conv = nn.Conv2d(4, 6, 3, stride, padding=1, bias=bias)
    pair = FactorizedConv2d(conv, rank=12)  # min(4·3, 6·3)
    x = torch.randn(2, 4, size, size)
    assert torch.allclose(pair.recover(), conv.weight, atol=1e-5)
    assert torch.allclose(pair(x), conv(x), atol=1e-5)
    linear = nn.Linear(size, 9, bias=bias)
    of_linear = FactorizedLinear(linear, rank=size)
    assert torch.allclose(of_linear.recover(), linear.weight, atol=1e-6)
    assert torch.allclose(of_linear(x), linear(x), atol=1e-6)


@pytest.mark.parametrize(
    ("layer", "pair"), [(nn.Conv2d(4, 6, 3, 2, padding=1), FactorizedConv2d), (nn.Linear(5, 7, bias=False), FactorizedLinear)]
)
def test_a_pair_answers_what_is_asked_of_the_layer_that_it_stands_for(layer: Any, pair: Any) -> None:
    """A patch embedding asks its convolution for the dtype of its weight, others for sizes."""
    replaced = pair(layer, rank=2)
    assert torch.equal(replaced.weight, replaced.recover())
    assert replaced.weight.shape == layer.weight.shape
    assert (replaced.bias is None) if layer.bias is None else torch.equal(replaced.bias, layer.bias)
    for name in ("in_channels", "kernel_size", "stride", "padding", "groups", "in_features", "out_features"):
        assert getattr(replaced, name, None) == getattr(layer, name, None)
    assert replaced.state_dict().keys() <= {"0.weight", "1.weight", "1.bias"}  # it is no further parameter
    replaced.weight.sum().backward()
    assert all(weight.grad is not None for weight in replaced.weights)


@pytest.mark.parametrize("stride", [1, 2])
def test_at_any_rank_the_recovered_kernel_is_what_the_pair_computes(stride: int) -> None:
    conv = nn.Conv2d(4, 6, 3, stride, padding=1)
    pair = FactorizedConv2d(conv, rank=3)
    x = torch.randn(2, 4, 9, 9)
    assert torch.allclose(pair(x), nn.functional.conv2d(x, pair.recover(), conv.bias, stride, 1), atol=1e-5)


@pytest.mark.parametrize(
    ("ratio", "ranks", "size"), [(1 / 2, (400, 250), 1_766_558), (1 / 4, (200, 125), 894_058), (1 / 8, (100, 62), 456_558)]
)
def test_the_rank_of_a_linear_layer_is_a_part_of_its_smaller_side(ratio: float, ranks: tuple[int, int], size: int) -> None:
    network = CNN1()
    factorize(network, ["fc1", "fc2"], ratio, spectral=False)  # 800 × 2000 and 2000 × 500, of 2,621,558 values in all
    assert (len(network.fc1.weights[0]), len(network.fc2.weights[0])) == ranks
    assert sum(p.numel() for p in network.parameters()) == size


def test_a_rank_that_a_layer_cannot_have_is_refused_with_its_name() -> None:
    with pytest.raises(FederationError, match=r"Layer 'conv1' has rank 15 at most, but a rank ratio of 0.999 asks for 16"):
        factorize(CNN1(), ["conv1"], 0.999, spectral=False)


def unrolled(kernel: Tensor) -> Tensor:
    """Rows (input channel, height), columns (output channel, width), one entry at a time."""
    outputs, inputs, height, width = kernel.shape
    rows = [[kernel[o, i, h, w] for o in range(outputs) for w in range(width)] for i in range(inputs) for h in range(height)]
    return torch.tensor(rows)


def test_the_error_is_the_tail_of_the_singular_values() -> None:
    conv = nn.Conv2d(4, 6, 3)
    for rank in (1, 5, 11):
        error = (FactorizedConv2d(conv, rank).recover() - conv.weight).norm().item()
        tail = torch.linalg.svdvals(unrolled(conv.weight.detach()))[rank:].square().sum().sqrt().item()
        assert math.isclose(error, tail, rel_tol=1e-5)


def test_factors_are_balanced_and_stable() -> None:
    matrix = torch.randn(9, 6, dtype=torch.float64)
    left, right = Spectrum.of(matrix).factors(4)
    values = torch.linalg.svdvals(matrix.double())[:4]
    assert torch.allclose(left.T @ left, values.diag(), atol=1e-5)
    assert torch.allclose(right.T @ right, values.diag(), atol=1e-5)
    again_left, again_right = Spectrum.of(left @ right.T).factors(4)
    assert torch.allclose(again_left @ again_right.T, left @ right.T, atol=1e-5)


def test_frobenius_decay_is_that_of_the_product() -> None:
    model = nn.Sequential(
        FactorizedConv2d(nn.Conv2d(4, 6, 3), 3), nn.Flatten(), FactorizedLinear(nn.Linear(6, 5), 2), nn.Linear(5, 2)
    )
    expected = 0.05 / 2 * sum(model[layer].recover().square().sum() for layer in (0, 2))
    wanted = torch.autograd.grad(expected, [model[0][0].weight, model[2][1].weight])
    value = frobenius_decay(model, 0.05)
    assert torch.allclose(value, expected, rtol=1e-5)
    for gradient, want in zip(torch.autograd.grad(value, [model[0][0].weight, model[2][1].weight]), wanted, strict=True):
        assert torch.allclose(gradient, want, atol=1e-6)
    assert frobenius_decay(nn.Linear(2, 2), 0.05) == 0


def test_what_cannot_be_done_is_refused() -> None:
    with pytest.raises(FederationError, match="rank of 7 was asked for a 6 x 9 matrix: give 1 to 6"):
        Spectrum.of(torch.randn(6, 9)).factors(7)
    with pytest.raises(FederationError, match="groups"):
        FactorizedConv2d(nn.Conv2d(4, 4, 3, groups=2), 2)
    with pytest.raises(FederationError, match="'0' is a ReLU"):
        factorize(nn.Sequential(nn.ReLU()), ["0"], 0.5)
    with pytest.raises(FederationError, match="rank ratio of 0"):
        factorize(nn.Sequential(nn.Linear(2, 2)), ["0"], 0)


def test_the_energy_is_what_approximations_keep_of_all_matrices_together() -> None:
    matrices, energy = [torch.randn(6, 4), torch.randn(5, 9)], Energy()
    ranks = [{0.5: 2, 0.25: 1}, {0.5: 4, 0.25: 2}]
    for matrix, of_ratio in zip(matrices, ranks, strict=True):
        energy.add(Spectrum.of(matrix), of_ratio)
    total = sum(matrix.double().square().sum() for matrix in matrices)
    for ratio in (0.5, 0.25):
        kept = sum(torch.linalg.svdvals(m.double())[: r[ratio]].square().sum() for m, r in zip(matrices, ranks, strict=True))
        assert energy.shares()[ratio] == pytest.approx((kept / total).item())
    nothing = Energy()
    nothing.add(Spectrum.of(torch.zeros(3, 3)), {1: 1})
    assert nothing.shares() == {1: 1.0}
