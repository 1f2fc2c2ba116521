"""Switchable normalization."""

import pytest
import torch

from lightning_fed.nn.norms import SwitchNorm2d

X = 3 * torch.randn(6, 3, 5, 4, generator=torch.Generator().manual_seed(2)) + torch.arange(3.0).view(3, 1, 1)


def weighed(which: int) -> SwitchNorm2d:
    """One of the three kinds of statistics alone: instance, layer, batch."""
    norm = SwitchNorm2d(3)
    with torch.no_grad():
        for weight in (norm.mean_weight, norm.var_weight):
            weight.fill_(-1e4)
            weight[which] = 0.0
    return norm


def test_alone_its_kinds_are_what_they_are_called() -> None:
    """Up to the correction of variances, which is that of one image's pixels."""
    pixels, eps = 20, 1e-5
    instance = (X - X.mean((2, 3), keepdim=True)) / (X.var((2, 3), keepdim=True) + eps).sqrt()
    torch.testing.assert_close(weighed(0)(X), instance)
    for which, dims in ((1, (1, 2, 3)), (2, (0, 2, 3))):
        within = X.var((2, 3), correction=0, keepdim=True).mean([d for d in dims if d < 2], keepdim=True)
        var = X.var(dims, correction=0, keepdim=True) + within / (pixels - 1)
        torch.testing.assert_close(weighed(which)(X), (X - X.mean(dims, keepdim=True)) / (var + eps).sqrt())


def test_it_begins_with_equal_parts_and_12_parameters() -> None:
    norm = SwitchNorm2d(3)
    assert sum(p.numel() for p in norm.parameters()) == 12
    mean = (X.mean((2, 3), keepdim=True) + X.mean((1, 2, 3), keepdim=True) + X.mean((0, 2, 3), keepdim=True)) / 3
    spread = (X - mean) / norm(X)  # the same for all pixels of a channel
    torch.testing.assert_close(spread, spread.mean((2, 3), keepdim=True).expand_as(spread), rtol=1e-3, atol=1e-3)


def test_running_statistics_are_what_is_used_when_measured() -> None:
    norm = weighed(2)
    for _ in range(200):
        norm(X)
    trained = norm(X)
    norm.eval()
    torch.testing.assert_close(norm(X[:1]), trained[:1], rtol=1e-3, atol=1e-3)
    before = norm.running_mean.clone()
    norm(X + 1)
    assert torch.equal(norm.running_mean, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_variances_are_never_negative(dtype: torch.dtype) -> None:
    """Of images that are nearly the same, at any precision."""
    norm = SwitchNorm2d(3).to(dtype)
    constant = torch.full((4, 3, 5, 5), 100.0, dtype=dtype)
    assert torch.isfinite(norm(constant)).all()
    assert norm(X.to(dtype)).dtype == dtype
