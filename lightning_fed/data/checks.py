"""What a federation's data refuse before they are used."""

from typing import TYPE_CHECKING

from torch import Tensor

from lightning_fed.data.pools import require

if TYPE_CHECKING:
    from lightning_fed.data.federated import FederatedDataModule


def check_options(data: "FederatedDataModule") -> None:
    """Refuse what the command line's types would, and options that contradict each other."""
    for name in ("num_clients", "batch_size", "eval_batch_size"):
        require(getattr(data, name) >= 1, f"Got {name}={getattr(data, name)}: give a whole number from 1.")
    for name, known in (("split", ("pooled", "official")), ("augment", ("none", "crop_flip"))):
        value = getattr(data, name)
        require(value in known, f"Got {name}={value!r}: give one of {', '.join(known)}.")
    require(data.seed >= 0, f"Got seed={data.seed}: give a whole number from 0.")
    require(
        data.split == "pooled" or data.test_share is None,
        f"Got test_share={data.test_share} with split=official, which tests on the official test set: leave test_share "
        "out or set split to pooled.",
    )
    test_share = data.test_share or 0.0
    require(
        data.val_share >= 0 and (data.split == "official" or test_share > 0) and data.val_share + test_share < 1,
        f"Got val_share={data.val_share} and test_share={data.test_share}: give val_share from 0, test_share above 0, "
        "and together less than 1.",
    )


def check_labels(name: str, num_classes: int, num_images: int, labels: Tensor) -> None:
    """Refuse labels that do not fit the images or the number of classes."""
    require(len(labels) == num_images, f"Got {num_images} images and {len(labels)} labels: give one label per image.")
    require(num_images > 0, f"{name} has no images: give at least one per client.")
    low, high = int(labels.min()), int(labels.max())
    require(
        low >= 0 and high < num_classes,
        f"{name} has {num_classes} classes, so labels go from 0 to {num_classes - 1}, but got {low} to {high}: is this "
        "another dataset?",
    )
