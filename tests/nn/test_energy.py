"""Factors that hold a share of a matrix's energy."""

import pytest
import torch
from torch import Tensor

from lightning_fed.models import CNN1
from lightning_fed.nn.energy import compressed, compressed_shapes, energy_factors, restored
from lightning_fed.tensors import count_floats

SHARES = [0.3, 0.5, 0.9, 0.95, 0.98, 0.999]
SHAPES = [(7, 4), (4, 7), (6, 6), (1, 5), (12, 3, 2, 2), (2, 5, 3, 3)]


def spectral(*shape: int, decay: float = 0.7) -> Tensor:
    """A tensor with singular values that fall, so that some shares need few of them."""
    matrix = torch.randn(shape[0], shape[1:] and int(torch.tensor(shape[1:]).prod()), dtype=torch.float64)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    return ((u * decay ** torch.arange(len(s))) @ v).view(shape).float()


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("shape", SHAPES)
def test_enough_is_kept_and_no_more(share: float, shape: tuple[int, ...]) -> None:
    """By singular values from another routine."""
    matrix = spectral(*shape).flatten(1)
    left, values, right = energy_factors(matrix, share)
    known = torch.linalg.svdvals(matrix.double())
    energy = known.square()
    assert left.shape == (len(matrix), len(values))
    assert right.shape == (matrix.shape[1], len(values))
    assert energy[: len(values)].sum() >= share * energy.sum()
    assert energy[: len(values) - 1].sum() < share * energy.sum()
    torch.testing.assert_close(values, known[: len(values)], rtol=1e-9, atol=1e-9)
    for side in (left, right):
        torch.testing.assert_close(side.T @ side, torch.eye(len(values), dtype=torch.float64))
    lost = (matrix - (left * values) @ right.T).square().sum()
    torch.testing.assert_close(lost, energy[len(values) :].sum(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("decay", [1.0, 0.5, 0.01])
def test_all_of_the_energy_is_all_of_the_matrix(shape: tuple[int, ...], decay: float) -> None:
    """With singular values that are all needed, and with some that float32 could not square."""
    tensors = {"w": spectral(*shape, decay=decay), "b": torch.randn(3), "n": torch.tensor(4)}
    sent = compressed(tensors, 1.0)
    back = restored(sent, tensors)
    torch.testing.assert_close(back["w"], tensors["w"], rtol=0, atol=1e-5)
    assert torch.equal(back["b"], tensors["b"])
    assert torch.equal(back["n"], tensors["n"])
    assert count_floats(sent) <= count_floats(tensors)


@pytest.mark.parametrize("share", [0.95, 1.0])
def test_nothing_is_rank_0(share: float) -> None:
    zero = {"w": torch.zeros(5, 4)}
    sent = compressed(zero, share)
    assert [tuple(tensor.shape) for tensor in sent.values()] == [(5, 0), (0,), (4, 0)]
    assert torch.equal(restored(sent, zero)["w"], zero["w"])


@pytest.mark.parametrize(("layer", "pays"), [("conv1", 13), ("conv2", 29), ("head", 9)])
def test_the_cost_is_that_of_the_cheaper_form(layer: str, pays: int) -> None:
    """min(mn, r (m + n + 1)), at the rank where factors of a layer of CNN-1 just pay, and one above."""
    shape = CNN1(10).get_submodule(layer).weight.shape
    rows, columns = shape[0], shape[1:].numel()
    for rank in (pays, pays + 1):
        tensor = (torch.randn(rows, rank) @ torch.randn(rank, columns)).view(shape)
        cost = count_floats(compressed({"w": tensor}, 1 - 1e-9))
        assert cost == min(rows * columns, rank * (rows + columns + 1))
        assert (cost < rows * columns) == (rank == pays)


@pytest.mark.parametrize("shape", [(3, 50, 2, 2), (3, 7), (3,), (3, 1)])
def test_a_first_dimension_of_3_is_no_triple(shape: tuple[int, ...]) -> None:
    """Some programs know factors by there being three of them."""
    tensors = {"w": torch.randn(shape)}
    torch.testing.assert_close(restored(compressed(tensors, 1.0), tensors)["w"], tensors["w"], rtol=0, atol=1e-5)


def test_a_search_that_never_tries_all_would_wipe_a_new_head() -> None:
    """Its spectrum is nearly flat: 95 % of its energy takes all 10 values, of which FedKD's public search tries 9."""
    head = CNN1(10).head.weight.detach()
    energy = torch.linalg.svdvals(head.double()).square()
    assert len(energy_factors(head, 0.95)[1]) == 10
    tried = [rank for rank in range(len(energy)) if energy[:rank].sum() > 0.95 * energy.sum()]
    assert tried == []  # so that it goes on with the rank 0 that it began with
    assert torch.equal(restored(compressed({"w": head}, 0.95), {"w": head})["w"], head)  # as it is: factors would be larger


def test_what_is_expected_is_what_there_can_be() -> None:
    like = {"w": torch.zeros(5, 4), "b": torch.zeros(5)}
    good = compressed({"w": torch.outer(torch.randn(5), torch.randn(4)), "b": torch.randn(5)}, 0.95)
    expected = compressed_shapes(good, like)
    assert {name: tensor.shape for name, tensor in expected.items()} == {name: tensor.shape for name, tensor in good.items()}
    boasting = good | {"w/U": torch.zeros(5, 9), "w/sigma": torch.zeros(9), "w/V": torch.zeros(4, 9)}
    assert compressed_shapes(boasting, like)["w/sigma"].shape == (4,)
    assert compressed_shapes({}, like).keys() == like.keys()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_factors_have_the_dtype_of_the_tensor(dtype: torch.dtype) -> None:
    tensor = torch.outer(torch.randn(6), torch.randn(5)).to(dtype)
    sent = compressed({"w": tensor}, 0.95)
    assert {factor.dtype for factor in sent.values()} == {dtype}
    assert restored(sent, {"w": tensor})["w"].dtype == dtype


def test_what_is_not_finite_is_left_for_the_server_to_refuse() -> None:
    broken = {"w": torch.full((3, 2), float("nan"))}
    assert compressed(broken, 0.95).keys() == {"w"}
