"""The additive decomposition of weights."""

import pytest
import torch
from torch import nn

from lightning_fed.errors import FederationError
from lightning_fed.models import CNN1, ResNet8, ResNet10, TextTransformer
from lightning_fed.nn.low_rank import LowRankDelta, decompose, factors


def conv(in_channels: int, out_channels: int, kernel: int) -> torch.Tensor:
    return torch.randn(out_channels, in_channels, kernel, kernel)


@pytest.mark.parametrize(
    ("in_channels", "out_channels", "kernel", "paper", "official"),
    [
        (3, 64, 7, 7, 266),  # ⌊.6·3⌋·7 and ⌊.6·64⌋·7
        (64, 64, 3, 114, 114),
        (64, 128, 3, 114, 228),
        (128, 256, 3, 228, 459),
        (256, 256, 3, 459, 459),
        (64, 128, 1, 38, 76),
        (512, 512, 3, 921, 921),
    ],
)
def test_inner_rank_of_a_convolution(in_channels: int, out_channels: int, kernel: int, paper: int, official: int) -> None:
    weight = conv(in_channels, out_channels, kernel)
    assert LowRankDelta(weight, 0.6, "paper").rank == paper
    assert LowRankDelta(weight, 0.6, "official").rank == official


def test_inner_rank_of_a_matrix_survives_floats_and_is_at_least_one() -> None:
    assert LowRankDelta(torch.randn(100, 200), 0.29).rank == 29  # 0.29 · 100 = 28.999999999999996
    assert LowRankDelta(torch.randn(10, 500), 0.01).rank == 1


@pytest.mark.parametrize(
    ("network", "classes", "conv_ratio", "linear_ratio", "variant", "expected"),
    [
        (CNN1, 10, 0.6, 0.6, "paper", 2_108_335),
        (CNN1, 10, 0.6, 0.4, "paper", 1_409_315),
        (CNN1, 10, 0.8, 0.4, "paper", 1_413_390),
        (ResNet8, 10, 0.6, 0.4, "paper", 1_335_763 + 1_064),
        (ResNet8, 10, 0.6, 0.6, "paper", 1_335_763 + 1_596),
        (ResNet8, 10, 0.6, 0.4, "official", 1_825_874 + 1_064),
        (ResNet10, 100, 0.8, 0.4, "paper", 7_124_774 + 24_480),
        (ResNet10, 100, 0.8, 0.4, "official", 9_349_641 + 24_480),
    ],
)
def test_size_of_the_low_rank_part(
    network: type[nn.Module], classes: int, conv_ratio: float, linear_ratio: float, variant: str, expected: int
) -> None:
    model = network(classes)
    decompose(model, conv_ratio, linear_ratio, variant)
    assert sum(p.numel() for p in factors(model)) == expected


@pytest.mark.parametrize("variant", ["paper", "official"])
@pytest.mark.parametrize("network", [lambda: ResNet8(10), lambda: TextTransformer(4, vocab_size=50, max_length=8, width=16)])
def test_at_first_the_network_is_the_plain_one(network: type[nn.Module], variant: str) -> None:
    model = network().train()
    x = torch.randint(0, 50, (3, 8)) if isinstance(model, TextTransformer) else torch.rand(3, 3, 32, 32)
    torch.manual_seed(1)
    plain = model(x)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    decompose(model, 0.5, 0.5, variant)
    torch.manual_seed(1)
    assert torch.equal(model(x), plain)
    full_rank = {name.replace(".parametrizations.", ".").replace(".original", ""): p for name, p in model.named_parameters()}
    assert all(torch.equal(full_rank[name], weight) for name, weight in weights.items())


def test_what_is_decomposed() -> None:
    model = TextTransformer(4, vocab_size=50, max_length=8, width=16, layers=1)
    decompose(model, 0.5, 0.5)
    low_rank = [name for name, _ in model.named_parameters() if name.endswith(".A")]
    attention = [f"encoder.layers.0.self_attn.parametrizations.in_proj_weight.0.deltas.{k}.A" for k in range(3)]
    linear = ["self_attn.out_proj", "linear1", "linear2"]
    assert set(low_rank) == {
        *attention,
        *(f"encoder.layers.0.{name}.parametrizations.weight.0.A" for name in linear),
        "head.parametrizations.weight.0.A",
    }


@pytest.mark.parametrize("variant", ["paper", "official"])
@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (8, 5, 3, 3), (5, 8, 3, 3), (4, 6, 1, 1)])
def test_rank_is_bounded_under_the_inverse_reshape(shape: tuple[int, ...], variant: str) -> None:
    delta = LowRankDelta(torch.randn(shape), 0.4, variant)
    nn.init.normal_(delta.B)
    tau = delta.delta(torch.Size(shape)).detach()
    assert tau.shape == shape
    matrix = delta.matrix(tau)
    assert torch.allclose(matrix, delta.B @ delta.A, atol=1e-5)
    assert torch.linalg.matrix_rank(matrix, rtol=1e-4) == min(delta.rank, *matrix.shape)


def test_the_papers_convolution_is_a_product_of_two() -> None:
    """τ[o, i, k1, k2] = Σ_r B[(i, k1), r] A[r, (o, k2)], written out."""
    delta = LowRankDelta(conv(2, 3, 2), 1.0, "paper")
    nn.init.normal_(delta.B)
    tau = delta.delta(torch.Size((3, 2, 2, 2)))
    for o, i, k1, k2 in [(0, 0, 0, 0), (2, 1, 0, 1), (1, 1, 1, 0), (2, 0, 1, 1)]:
        assert torch.isclose(tau[o, i, k1, k2], delta.B[2 * i + k1] @ delta.A[:, 2 * o + k2], atol=1e-6)


def test_variants_scale_differently() -> None:
    assert LowRankDelta(conv(64, 128, 3), 0.6, "official").scale == 1 / 76
    assert LowRankDelta(torch.randn(10, 256), 0.4, "official").scale == 1 / 4
    assert LowRankDelta(conv(64, 128, 3), 0.6, "paper").scale == 1


def test_a_frozen_part_is_computed_once_and_again_when_it_changed() -> None:
    delta = LowRankDelta(torch.randn(4, 4), 0.5).requires_grad_(False)
    first = delta.delta(torch.Size((4, 4)))
    assert delta.delta(torch.Size((4, 4))) is first
    with torch.no_grad():
        delta.B.fill_(1.0)
    assert torch.equal(delta.delta(torch.Size((4, 4))), (delta.B @ delta.A).T)
    delta.requires_grad_(True)
    assert delta.delta(torch.Size((4, 4))).requires_grad


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.5])
def test_impossible_ratios_are_refused(ratio: float) -> None:
    with pytest.raises(FederationError, match="rank ratio"):
        LowRankDelta(torch.randn(4, 4), ratio)


def test_a_weight_of_another_shape_is_refused() -> None:
    with pytest.raises(FederationError, match=r"shape \(4, 4, 3, 1\)"):
        LowRankDelta(torch.randn(4, 4, 3, 1), 0.5)
