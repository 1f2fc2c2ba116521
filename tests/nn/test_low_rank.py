"""The additive decomposition of weights."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_fed.errors import FederationError
from lightning_fed.models import CNN1, ResNet8, ResNet10, TextTransformer
from lightning_fed.nn import low_rank
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


def test_some_layers_are_decomposed_and_the_others_are_as_they_were() -> None:
    """Attention and classifier, the language experiments of the paper (Appendix E)."""
    model = TextTransformer(4, vocab_size=50, max_length=8, width=16, layers=2)
    decompose(model, 0.5, 0.5, layers=["*.self_attn", "head"])
    low_rank = {name.partition(".parametrizations")[0] for name, _ in model.named_parameters() if name.endswith(".A")}
    attention = [f"encoder.layers.{k}.self_attn" for k in range(2)]
    assert low_rank == {*attention, *(f"{name}.out_proj" for name in attention), "head"}
    assert type(model.encoder.layers[0].linear1) is nn.Linear
    with pytest.raises(FederationError, match=r"layers names 'norm\*', in which TextTransformer has nothing to decompose: .* head"):
        decompose(TextTransformer(4, vocab_size=50, max_length=8, width=16), 0.5, 0.5, layers=["head", "norm*"])


@pytest.mark.parametrize("layers", [None, ["1"], ["2"]], ids=str)
def test_a_tied_weight_has_one_low_rank_part_in_all_layers_that_have_it(layers: list[str] | None) -> None:
    model = nn.Sequential(nn.Embedding(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 5))
    model[0].weight = model[1].weight = model[2].weight
    decompose(model, 0.5, 0.5, layers=layers)
    assert len(factors(model)) == 2 * (2 if layers is None else 1)
    nn.init.normal_(factors(model)[0])
    assert torch.equal(model[0].weight, model[1].weight)
    assert torch.equal(model[0].weight, model[2].weight)
    assert not torch.equal(model[0].weight, model[0].parametrizations.weight.original)
    model(torch.arange(6)).sum().backward()
    assert all(p.grad is not None for p in factors(model))


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


def test_what_was_computed_stays_with_its_factors() -> None:
    """It follows them to no copy, whose versions are counted anew, and to no other precision or device."""
    delta = LowRankDelta(torch.randn(4, 4), 0.5).requires_grad_(False)
    delta.delta(torch.Size((4, 4)))
    copied = copy.deepcopy(delta)
    for factor, own in ((copied.A, delta.A), (copied.B, delta.B)):
        while factor._version < own._version:
            factor.normal_()
    assert torch.equal(copied.delta(torch.Size((4, 4))), (copied.B @ copied.A).T)
    assert copied.double().delta(torch.Size((4, 4))).dtype == torch.float64


LAYERS = [
    (partial(nn.Linear, 30, 20), (4, 30)),
    (partial(nn.Linear, 30, 20, bias=False), (2, 5, 30)),
    (partial(nn.Linear, 12, 40), (500, 12)),
    (partial(nn.Conv2d, 4, 6, 3, padding=1), (2, 4, 7, 6)),
    (partial(nn.Conv2d, 24, 32, 3, stride=2, padding=1), (1, 24, 4, 4)),
    (partial(nn.Conv2d, 4, 6, 3, stride=2, padding=2, dilation=2, bias=False), (2, 4, 9, 8)),
    (partial(nn.Conv2d, 16, 32, 1, stride=2), (1, 16, 3, 4)),
    (partial(nn.Conv2d, 4, 6, 3, padding="same"), (2, 4, 5, 5)),
    (partial(nn.Conv2d, 4, 6, 3, padding=1, padding_mode="circular"), (2, 4, 5, 5)),
]


def one_and_both_ways(
    layer: nn.Module, shape: tuple[int, ...], variant: str, together: bool, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[int, list[torch.Tensor]]]:
    """FLOPs, and output and gradients, of a decomposed layer: as it chooses, always composed, and always apart."""
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    model = nn.Sequential(layer).double()
    decompose(model, 0.5, 0.5, variant)
    for part in factors(model):
        nn.init.normal_(part)
    model[0].parametrizations.weight.original.requires_grad_(together)
    learning = [p for p in model.parameters() if p.requires_grad]
    found = []
    for choice in (None, False, True):
        with monkeypatch.context() as patch, FlopCounterMode(display=False) as counter:
            if choice is not None:
                patch.setattr(low_rank, "_apart_is_cheaper", lambda *_, choice=choice: choice)
            for leaf in (*learning, x):
                leaf.grad = None
            out = model(x)
            out.square().sum().backward()
        found.append((counter.get_total_flops(), [out, *(leaf.grad for leaf in (*learning, x))]))
    return found


@pytest.mark.parametrize("together", [False, True], ids=["alternating", "together"])
@pytest.mark.parametrize("variant", ["paper", "official"])
@pytest.mark.parametrize(("layer", "shape"), LAYERS)
def test_apart_and_composed_are_one_function_and_the_cheaper_one_is_taken(
    layer: partial[nn.Module], shape: tuple[int, ...], variant: str, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (chosen, _), (composed, ours), (apart, theirs) = one_and_both_ways(layer(), shape, variant, together, monkeypatch)
    assert chosen == min(composed, apart)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_small_batches_are_computed_apart_and_large_ones_composed(monkeypatch: pytest.MonkeyPatch) -> None:
    for rows, is_apart in ((4, True), (4000, False)):
        chosen, composed, apart = (
            flops for flops, _ in one_and_both_ways(nn.Linear(300, 200), (rows, 300), "paper", True, monkeypatch)
        )
        assert (apart < composed) == is_apart
        assert chosen == min(apart, composed)


def test_what_was_measured_with_can_be_trained_with() -> None:
    """τ of the measurement is kept; σ then learns beside it."""
    model = nn.Sequential(nn.Linear(4, 4))
    decompose(model, 0.5, 0.5)
    x = torch.randn(3, 4)
    [delta] = [part for part in model.modules() if isinstance(part, LowRankDelta)]
    nn.init.normal_(delta.B)
    with torch.inference_mode():
        before = model(x).clone()
        assert delta.delta(torch.Size((4, 4))) is delta.delta(torch.Size((4, 4)))
    delta.requires_grad_(False)
    out = model(x)
    assert torch.equal(out, before)
    out.sum().backward()
    assert model[0].parametrizations.weight.original.grad is not None


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.5])
def test_impossible_ratios_are_refused(ratio: float) -> None:
    with pytest.raises(FederationError, match="rank ratio"):
        LowRankDelta(torch.randn(4, 4), ratio)


def test_a_weight_of_another_shape_is_refused() -> None:
    with pytest.raises(FederationError, match=r"shape \(4, 4, 3, 1\)"):
        LowRankDelta(torch.randn(4, 4, 3, 1), 0.5)
