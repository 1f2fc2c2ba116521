"""Image files that are decoded when a batch needs them."""

import struct
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fed.data.lazy import LazyInputs
from lightning_fed.errors import FederationError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Statistics of ImageNet's pixels in [0, 1], as used by torchvision's pretrained networks."""


@dataclass(eq=False)
class LazyImages(LazyInputs):
    """Colour images of one size, each decoded when a batch needs it.

    Args:
        images: the images in Pillow's form, by position.
        size: height and width to which they are resized, bilinearly.
        origin: where they come from, for errors.
    """

    images: Sequence[Any]
    size: int
    origin: str

    def __len__(self) -> int:
        return len(self.images)

    def image(self, row: int) -> Any:
        """The image at a position: a Pillow image, or the path of a file."""
        return self.images[row]

    def place(self, row: int) -> str:
        """Location of the image at a position, for errors."""
        return f"in row {row} of {self.origin}"

    def read(self, rows: Tensor) -> Tensor:
        """The images at the given positions, uint8 of shape (B, 3, size, size)."""
        images = []
        for row in rows.tolist():
            with image_errors(f"the image {self.place(row)}"):
                images.append(resized(self.image(row), self.size))
        return torch.stack(images)


class ImagePaths(LazyImages):
    """Images in files: ``images`` are their paths within the folder ``origin``, and only these are in memory."""

    def image(self, row: int) -> Path:
        return Path(self.origin, self.images[row])

    def place(self, row: int) -> str:
        return str(self.image(row))


@contextmanager
def image_errors(what: str) -> Iterator[None]:
    """A context that names the image that Pillow cannot read: no image, a truncated one, or one that is too large."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            yield
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise FederationError(f"Could not read {what} ({error}): make it smaller, or take it out.") from error
    except (OSError, SyntaxError, ValueError, TypeError, AttributeError, EOFError, struct.error) as error:
        raise FederationError(f"Could not read {what} ({error}): repair it, or take it out.") from error


def resized(given: Any, size: int) -> Tensor:
    """An image, or the image in a file, as bytes of shape (3, size, size): in colour, resized bilinearly (antialiased when
    shrinking).
    """
    from PIL import Image

    if isinstance(given, Path):
        with Image.open(given) as opened:
            image = opened.convert("RGB")
    else:
        image = given.convert("RGB")
    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)
