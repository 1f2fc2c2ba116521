"""Sums of products of thin factors, against the matrices that are never formed."""

import pytest
import torch
from torch import Tensor

from lightning_fed.nn.low_rank_sums import averaging_error, product_spectrum, stacked

EXAMPLES: list[tuple[list[list[list[float]]], list[float], list[list[float]]]] = [
    ([[[1, 0], [1, 0]], [[0, 1], [0, 1]]], [0.5, 0.5], [[0.25, -0.25], [-0.25, 0.25]]),
    ([[[1, 2], [1, 0, 1]], [[3, 0], [0, 2, 1]]], [0.5, 0.5], [[-0.5, 1, 0], [0.5, -1, 0]]),
    ([[[1, 2], [1, 0, 1]], [[3, 0], [0, 2, 1]]], [0.75, 0.25], [[-0.375, 0.75, 0], [0.375, -0.75, 0]]),
]
"""B and A of two clients, their shares, and the mean of BA without the product of the means."""


@pytest.mark.parametrize(("clients", "shares", "expected"), EXAMPLES)
def test_the_averaging_error_of_small_numbers(
    clients: list[list[list[float]]], shares: list[float], expected: list[list[float]]
) -> None:
    """Exactly; the second and third are neither square nor symmetric."""
    left, right = [torch.tensor(b).float()[:, None] for b, _ in clients], [torch.tensor(a).float()[None] for _, a in clients]
    mean = sum((p * b for p, b in zip(shares, left, strict=True)), torch.zeros(()))
    outer, inner = averaging_error(left, right, shares, mean)
    assert (outer.shape, inner.shape) == ((2, 1), (1, len(clients[0][1])))
    assert torch.equal(outer @ inner, torch.tensor(expected))


def drawn(clients: int, rank: int, rows: int = 7, columns: int = 9) -> tuple[list[Tensor], list[Tensor], list[float]]:
    torch.manual_seed(clients)
    weights = torch.rand(clients, dtype=torch.float64) + 0.1
    left = [torch.randn(rows, rank, dtype=torch.float64) for _ in range(clients)]
    right = [torch.randn(rank, columns, dtype=torch.float64) for _ in range(clients)]
    return left, right, (weights / weights.sum()).tolist()


def mean_of(tensors: list[Tensor], shares: list[float]) -> Tensor:
    return torch.stack([p * tensor for p, tensor in zip(shares, tensors, strict=True)]).sum(dim=0)


@pytest.mark.parametrize(("clients", "rank"), [(1, 2), (2, 1), (3, 2), (5, 1)])
def test_the_averaging_error_is_what_the_product_of_the_means_lacks(clients: int, rank: int) -> None:
    left, right, shares = drawn(clients, rank)
    mean = mean_of(left, shares)
    outer, inner = averaging_error(left, right, shares, mean)
    assert outer.shape[1] == len(inner) == (clients - 1) * rank
    exact = mean_of([b @ a for b, a in zip(left, right, strict=True)], shares)
    torch.testing.assert_close(outer @ inner, exact - mean @ mean_of(right, shares), rtol=0, atol=1e-12)


def test_equal_factors_have_no_averaging_error() -> None:
    """Whichever of them is in common, and whatever rounding makes of the mean."""
    left, right, shares = drawn(3, 2)
    for sides in ((left, [right[0]] * 3), ([left[0]] * 3, right)):
        mean = mean_of(sides[0], shares) if sides[0] is left else left[0]
        assert averaging_error(*sides, shares, mean)[0].numel() == 0


def test_ranks_that_are_nobodys_are_left_out() -> None:
    left, right, shares = drawn(3, 2)
    for b in left:
        b[:, 1] = 0
    outer, inner = averaging_error(left, right, shares, mean_of(left, shares))
    assert outer.shape[1] == len(inner) == 2


def test_stacks_are_sums() -> None:
    """With the shares in one of the stacks; in both they would be squared."""
    left = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [0.0]])]
    right = [torch.tensor([[1.0, 0, 1]]), torch.tensor([[0.0, 2, 1]])]
    outer, inner = stacked(left, right, [torch.tensor(0.75), torch.tensor([0.25])])
    assert torch.equal(outer @ inner, torch.tensor([[0.75, 1.5, 1.5], [1.5, 0, 1.5]]))


@pytest.mark.parametrize(("rows", "columns", "rank"), [(7, 9, 3), (9, 7, 3), (4, 5, 8), (6, 6, 6)])
def test_the_spectrum_of_a_product(rows: int, columns: int, rank: int) -> None:
    [left], [right], _ = drawn(1, rank, rows, columns)
    spectrum, product = product_spectrum(left, right), left @ right
    values = torch.linalg.svdvals(product)
    kept = min(rows, columns, rank)
    torch.testing.assert_close(spectrum.values, values[:kept], rtol=0, atol=1e-12)
    torch.testing.assert_close(spectrum.left * spectrum.values @ spectrum.right.T, product, rtol=0, atol=1e-12)
    for side in (spectrum.left, spectrum.right):
        torch.testing.assert_close(side.T @ side, torch.eye(kept, dtype=torch.float64), rtol=0, atol=1e-12)
    first = product_spectrum(left, right, 1)
    assert torch.equal(first.values, spectrum.values)
    torch.testing.assert_close(first.left * first.values[:1] @ first.right.T, best_of_rank_one(product), rtol=0, atol=1e-12)


def best_of_rank_one(matrix: Tensor) -> Tensor:
    left, values, right = torch.linalg.svd(matrix)
    return values[0] * left[:, :1] @ right[:1]


def test_the_spectrum_of_a_product_that_lacks_ranks() -> None:
    [left], [right], _ = drawn(1, 3)
    left[:, 2] = 2 * left[:, 0]
    spectrum = product_spectrum(left, right)
    assert spectrum.rank(torch.float64) == 2
    assert product_spectrum(0 * left, right).rank(torch.float64) == 0
