"""Random crops and flips of batches."""

from argparse import Namespace

import pytest
import torch
from torch import Tensor

from lightning_fed.data import IID, InMemory, LazyInputs, random_crop_flip
from lightning_fed.data.batches import INPUT, TARGETS, Inputs
from lightning_fed.errors import FederationError


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


IMAGES, MASKS = torch.zeros(20, 3, 8, 8, dtype=torch.uint8), torch.zeros(20, 8, 8, dtype=torch.int64)


class Lazily(LazyInputs):
    def __len__(self) -> int:
        return len(MASKS)

    def read(self, rows: Tensor) -> dict[str, Tensor]:
        return {INPUT: IMAGES[rows], TARGETS: MASKS[rows]}


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (IMAGES.float(), "which is for images of bytes"),
        ({"x": IMAGES, "y": IMAGES}, "which is for images of bytes"),
        ({INPUT: IMAGES, TARGETS: MASKS}, "would move images, but not their targets"),
        (Lazily(), "would move images, but not their targets"),
    ],
    ids=["numbers", "several", "masks", "lazily read masks"],
)
def test_what_cannot_be_augmented_is_refused(inputs: Inputs, message: str) -> None:
    with pytest.raises(FederationError, match=message):
        InMemory(inputs, torch.arange(20) % 2, num_clients=2, partition=IID(), augment="crop_flip").setup()
    InMemory(inputs, torch.arange(20) % 2, num_clients=2, partition=IID()).setup()


def test_images_with_several_labels_each_are_augmented() -> None:
    inputs = {INPUT: torch.randint_like(IMAGES, 1, 255), TARGETS: torch.eye(20)}
    client = InMemory(inputs, torch.arange(20) % 2, num_clients=2, partition=IID(), augment="crop_flip").client(0)
    client.trainer = Namespace(training=True, precision_plugin=Namespace(convert_input=lambda images: images))
    batch = next(iter(client.train_dataloader()))
    images, targets = client.on_after_batch_transfer(batch, 0)
    assert (images != batch[0] / 255).flatten(1).any(1).all()
    assert torch.equal(targets, batch[1])
