"""Cross-entropy that leaves absent classes alone."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lightning_fed.nn import mask_absent


def loss_and_gradient(logits: list[list[float]], present: list[bool], labels: list[int]) -> tuple[Tensor, Tensor]:
    x = torch.tensor(logits, requires_grad=True)
    loss = cross_entropy(mask_absent(x, torch.tensor(present)), torch.tensor(labels))
    return loss, torch.autograd.grad(loss, x)[0]


def test_two_classes_of_which_one_is_absent() -> None:
    """The logits (2, 5) become (2, 0): the loss is log(1 + e^-2), its gradient 1 / (1 + e^-2) - 1."""
    loss, gradient = loss_and_gradient([[2.0, 5.0]], [True, False], [0])
    assert loss.item() == pytest.approx(0.126928, abs=1e-6)
    assert gradient[0, 0].item() == pytest.approx(-0.119203, abs=1e-6)
    assert gradient[0, 1].item() == 0


def test_an_absent_class_counts_one_in_the_denominator() -> None:
    loss, _ = loss_and_gradient([[1.0, -3.0, 0.5, 90.0]], [True, False, True, False], [2])
    assert loss.item() == pytest.approx(math.log(math.e + math.exp(0.5) + 1 + 1) - 0.5, abs=1e-6)


def test_absent_classes_have_no_gradient_and_the_others_do() -> None:
    stream = torch.Generator().manual_seed(0)
    logits = torch.randn(16, 5, generator=stream).tolist()
    _, gradient = loss_and_gradient(logits, [False, True, True, False, True], [1, 2, 4, 2] * 4)
    assert (gradient[:, [0, 3]] == 0).all()
    assert (gradient[:, [1, 2, 4]] != 0).all()


def test_where_nothing_is_absent_it_is_cross_entropy() -> None:
    logits, labels = torch.randn(16, 4), torch.arange(16) % 4
    assert torch.equal(mask_absent(logits, torch.ones(4, dtype=torch.bool)), logits)
    loss, gradient = loss_and_gradient(logits.tolist(), [True] * 4, labels.tolist())
    logits.requires_grad_()
    expected = cross_entropy(logits, labels)
    assert torch.equal(loss, expected)
    assert torch.equal(gradient, torch.autograd.grad(expected, logits)[0])


def test_dtype_stays() -> None:
    masked = mask_absent(torch.ones(2, 3, dtype=torch.bfloat16), torch.tensor([True, False, True]))
    assert masked.dtype == torch.bfloat16
    assert masked.tolist() == [[1, 0, 1]] * 2
