"""What crosses the wire."""

import pytest
import torch

from lightning_fed.errors import FederationError
from lightning_fed.tensors import check_finite, count_bytes, count_floats, pack_bits, unpack_bits


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1000])
def test_a_mask_is_a_bit_per_value(count: int) -> None:
    mask = torch.rand(count) < 0.5
    packed = pack_bits(mask)
    assert (packed.dtype, packed.shape) == (torch.uint8, (-(-count // 8),))
    assert torch.equal(unpack_bits(packed, count), mask)
    assert torch.equal(unpack_bits(packed, count // 2), mask[: count // 2])
    assert (count_floats({"mask": packed}), count_bytes({"mask": packed})) == (0, -(-count // 8))


def test_equal_masks_are_equal_bytes() -> None:
    """What is left over in the last byte is 0; the first value is the highest bit of the first byte."""
    assert pack_bits(torch.tensor([[True, False, False], [False, False, False], [True, True, True]])).tolist() == [
        0b10000011,
        0b10000000,
    ]


def test_large_numbers_whose_sum_is_infinite_are_finite() -> None:
    large = torch.full((4,), torch.finfo(torch.float32).max)
    assert large.sum().isinf()
    check_finite({"large": large}, "The update")
    with pytest.raises(FederationError, match="The update holds NaN or infinity in 'large'"):
        check_finite({"large": large * 2}, "The update")
