"""How many ranks of a matrix matter."""

import pytest
import torch

from lightning_fed.nn.rank import effective_rank, spectral_rank


@pytest.mark.parametrize(
    ("values", "share", "rank"),
    [
        ([9.0, 1], 0.9, 1),  # exactly nine tenths
        ([4.0, 3, 2, 1], 0.5, 2),
        ([4.0, 3, 2, 1], 0.39, 1),
        ([4.0, 3, 2, 1], 1.0, 4),
        ([1.0], 0.9, 1),
    ],
)
def test_how_many_singular_values_make_up_a_share_of_their_sum(values: list[float], share: float, rank: int) -> None:
    assert spectral_rank(torch.tensor(values), share) == rank


@pytest.mark.parametrize(("m", "r", "n"), [(9, 3, 7), (5, 8, 4), (6, 1, 6), (3, 3, 20)])
@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_a_product_need_not_be_formed(m: int, r: int, n: int, share: float) -> None:
    for _ in range(5):
        b, a = torch.randn(m, r) * torch.rand(r), torch.randn(r, n)
        assert effective_rank(b, a, share) == spectral_rank(torch.linalg.svdvals((b @ a).double()), share)


def test_a_product_with_a_zero_factor_has_no_rank() -> None:
    assert effective_rank(torch.zeros(6, 3), torch.randn(3, 5)) == 0
    b = torch.zeros(6, 3)
    b[:, 1] = torch.randn(6)
    assert effective_rank(b, torch.randn(3, 5)) == 1
