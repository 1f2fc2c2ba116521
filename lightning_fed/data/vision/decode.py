"""Image files, decoded when a batch needs them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fed.data.lazy import LazyInputs
from lightning_fed.errors import FederationError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Of ImageNet's pixels in [0, 1], as torchvision's pretrained networks have them."""


class ImagePaths(LazyInputs):
    """Images in files of one's own, in colour and of one size. What is in memory is their paths.

    Args:
        root: the folder that they are in.
        files: their paths within it.
        size: height and width that they are resized to, bilinearly.
    """

    def __init__(self, root: str, files: Sequence[str], size: int) -> None:
        self.root = root
        self.files = files
        self.size = size

    def __len__(self) -> int:
        """Number of images."""
        return len(self.files)

    def read(self, rows: Tensor) -> Tensor:
        """The images at the given positions, uint8 of shape (B, 3, size, size)."""
        from PIL import Image, UnidentifiedImageError

        images = []
        for row in rows.tolist():
            path = Path(self.root) / self.files[row]
            try:
                with Image.open(path) as image:
                    images.append(resized(image, self.size))
            except (OSError, UnidentifiedImageError) as error:
                raise FederationError(
                    f"Could not read the image {path} ({error}): mend it, or take it out of the folder."
                ) from error
        return torch.stack(images)


def resized(image: Any, size: int) -> Tensor:
    """A Pillow image as bytes of shape (3, size, size): in colour, resized bilinearly (antialiased when shrinking)."""
    from PIL import Image

    image = image.convert("RGB")
    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)
