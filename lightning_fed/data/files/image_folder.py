"""Images in folders."""

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_fed.data.files.table import ROLES, Table, TableData
from lightning_fed.data.paths import is_hidden
from lightning_fed.data.split import TRAIN
from lightning_fed.data.vision.decode import IMAGENET_MEAN, IMAGENET_STD, ImagePaths
from lightning_fed.errors import require
from lightning_fed.options import PositiveInt, require_from

log = logging.getLogger(__name__)

CLASS, SET, FILE = "class", "split", "file"
"""Names of folder levels with a meaning, and of the column that an image always has."""


class ImageFolder(TableData):
    """Images in folders named after their classes, as torchvision's class of this name reads them: ``<class>/…/<image>``.

    Further levels of folders hold more information: ``layout: hospital/class`` reads ``<hospital>/<class>/<image>``, and
    ``client: hospital`` makes each hospital a client. An example has a column for each level, and ``file``, its path. Images are
    decoded when a batch needs them; only their paths are in memory. Files and folders whose names start with a dot are skipped.

    Args:
        path: the folder.
        layout: levels of its folders, including ``class``; a level ``split`` has the names of sets (``train``, ``val``,
            ``test``). None: ``split/class`` if there is a folder ``train``, or there are folders of a training and of another set
            by any of their names (``Training`` and ``Testing``), else ``class``.
        image_size: height and width to which images are resized, bilinearly.
        in_memory: decode all images at once and keep them, which is faster over several rounds if they fit into memory.
        mean: mean of the pixels in [0, 1], per channel. Default: ImageNet's.
        std: standard deviation, in the same form. Default: ImageNet's.
        **kwargs: see :class:`TableData`.
    """

    def __init__(
        self,
        path: str,
        layout: str | None = None,
        image_size: PositiveInt = 32,
        in_memory: bool = False,
        mean: tuple[float, float, float] = IMAGENET_MEAN,
        std: tuple[float, float, float] = IMAGENET_STD,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        levels = [] if layout is None else layout.strip("/").split("/")
        require(
            layout is None or (CLASS in levels and len(set(levels)) == len(levels) and FILE not in levels),
            f"Got layout={layout!r}: give the name of each level of folders, one of them {CLASS}, as in hospital/{CLASS}.",
        )
        require_from(1, image_size=image_size)
        self.path = path
        self.layout = layout
        self.image_size: int = image_size
        self.in_memory = in_memory
        self.mean, self.std = tuple(mean), tuple(std)

    def read(self) -> Table:
        """The paths of all images, and the columns of their folders. Links are followed."""
        from torchvision.datasets.folder import IMG_EXTENSIONS

        root = Path(self.path).expanduser().absolute()  # workers may have another working directory
        require(root.is_dir(), f"Found no folder {root}: set --data.init_args.path to the folder with the images.")
        layout = self.layout or (f"{SET}/{CLASS}" if _has_sets(root) else CLASS)
        levels = layout.strip("/").split("/")
        placed: list[tuple[tuple[str, ...], str, str]] = []  # the levels' folders, the whole folder, and the name of each image
        astray: list[tuple[tuple[str, ...], str, str]] = []  # those in folders of fewer levels
        for folder, _, names in os.walk(root, followlinks=True):
            parts = Path(folder).relative_to(root).parts
            for name in names:
                if name.lower().endswith(IMG_EXTENSIONS) and not is_hidden(Path(folder, name), root):
                    (placed if len(parts) >= len(levels) else astray).append((parts[: len(levels)], folder, name))
        require(
            len(placed) > 0,
            f"Found no images in {root}, where the levels of folders should be {layout}: check path and layout.",
        )
        if astray:
            first = Path(*min(astray)[1:])
            log.warning(f"{root}: {len(astray)} images are left out, being in no folder of the levels {layout} (such as {first}).")
        found = [(*parts, str(Path(folder, name).relative_to(root))) for parts, folder, name in sorted(placed)]
        *values, files = zip(*found, strict=True)
        columns = {name: np.array(column) for name, column in zip([*levels, FILE], [*values, files], strict=True)}
        images = ImagePaths(files, self.image_size, str(root))
        inputs = images.read(torch.arange(len(files))) if self.in_memory else images
        return Table(inputs, columns[CLASS], columns, columns.get(SET))


def _has_sets(root: Path) -> bool:
    """Whether the folders in a folder are sets rather than classes."""
    roles = {ROLES[place.name.lower()] for place in root.iterdir() if place.is_dir() and place.name.lower() in ROLES}
    return (root / "train").is_dir() or (TRAIN in roles and len(roles) > 1)
