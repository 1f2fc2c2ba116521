"""Random crops and flips of batches."""

import pytest
import torch

from lightning_fed.data import random_crop_flip


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_shape_and_type_stay(dtype: torch.dtype) -> None:
    images = torch.randint(0, 255, (5, 3, 8, 6)).to(dtype)
    augmented = random_crop_flip(images)
    assert augmented.shape == images.shape
    assert augmented.dtype == dtype
    assert augmented.is_contiguous()


def test_draws_come_from_the_global_generator() -> None:
    images = torch.rand(16, 3, 8, 8)
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        results.append(random_crop_flip(images))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_without_padding_images_are_mirrored_or_not() -> None:
    images = torch.rand(200, 3, 4, 4)
    augmented = random_crop_flip(images, padding=0)
    same = (augmented == images).flatten(1).all(1)
    mirrored = (augmented == images.flip(3)).flatten(1).all(1)
    assert (same ^ mirrored).all()
    assert 60 < same.sum() < 140


def test_each_result_is_a_shifted_crop_of_the_padded_image() -> None:
    torch.manual_seed(0)
    images = torch.rand(20, 2, 5, 5)
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2))
    crops = [padded[:, :, y : y + 5, x : x + 5] for y in range(5) for x in range(5)]
    choices = torch.stack(crops + [crop.flip(3) for crop in crops])
    found = (choices == random_crop_flip(images, padding=2)).flatten(2).all(2)
    assert found.any(0).all()
    assert found.float().argmax(0).unique().numel() > 10
