"""Image files that are decoded when a batch needs them."""

import logging
import struct
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from lightning_fed.data.lazy import LazyInputs
from lightning_fed.errors import FederationError

SAMPLED = 256
"""About the number of image files whose content is in a checksum."""

log = logging.getLogger(__name__)

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
        images = torch.empty(len(rows), 3, self.size, self.size, dtype=torch.uint8)
        for place, row in enumerate(rows.tolist()):
            with image_errors(f"the image {self.place(row)}"):
                images[place] = resized(self.image(row), self.size)
        return images


class ImagePaths(LazyImages):
    """Images in files: ``images`` are their paths within the folder ``origin``, and only these are in memory."""

    def checksum(self, start: int = 0) -> int:
        """Of all paths and sizes of files, and of the content of :data:`SAMPLED` files. Times are left out: copies have others."""
        start, step = crc32(str(self.size).encode(), start), max(1, len(self) // SAMPLED)
        for row, name in enumerate(self.images):
            with image_errors(f"the image {self.place(row)}"):
                start = crc32(f"{name} {self.image(row).stat().st_size}".encode(), start)
                start = start if row % step else crc32(self.image(row).read_bytes(), start)
        return start

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
            image = in_colour(opened)
    else:
        image = in_colour(given)
    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def in_colour(image: Any) -> Any:
    """A Pillow image with three channels of 8 bits. Grey ones of 16 bits lose their lower 8, as Pillow does in colour images.

    Raises:
        ValueError: for pixels whose range is unknown: floats, and integers of 32 bits or with a sign.
    """
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):  # the mode of PNG before Pillow 11.1
        levels = np.asarray(image)
        if levels.max() < 4096:
            warn_of_dark_images()
        image = Image.fromarray((levels >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError(f"pixels of the mode {image.mode} have no known range: convert it to 8 bits, or 16 without a sign")
    return image.convert("RGB")  # alone, this cuts larger numbers off at 255


@cache
def warn_of_dark_images() -> None:
    """Warn, once per process, that an image of 16 bits may hold only 12, as X-rays often do."""
    log.warning(
        "An image of 16 bits has no value from 4096 on. The 8 highest bits are read, so at most 16 levels of grey remain: if the "
        "images have 12 bits, multiply their values by 16, or convert them to 8 bits."
    )
