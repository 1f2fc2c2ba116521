"""Tiny-ImageNet from its unpacked archive."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_fed.data.federated import FederatedDataModule, Pools
from lightning_fed.data.vision.images import resize
from lightning_fed.data.vision.parquet import decode
from lightning_fed.errors import require
from lightning_fed.options import PositiveInt


class TinyImageNet(FederatedDataModule):
    """100,000 training and 10,000 validation images of 64 x 64 pixels, 200 classes (Le & Yang, 2015).

    The validation images, whose labels are public, are the test pool; the archive's own test images have no labels.

    Args:
        root: the folder ``tiny-imagenet-200``, with ``wnids.txt``, ``train/<class>/images/`` and ``val/val_annotations.txt``.
        image_size: height and width to which the images are resized, bilinearly.
        **kwargs: see :class:`FederatedDataModule`.
    """

    num_classes = 200
    mean = (0.4802, 0.4481, 0.3975)
    std = (0.2770, 0.2691, 0.2821)

    def __init__(self, root: str, image_size: PositiveInt = 64, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.root = root
        self.image_size: int = image_size

    def load(self) -> Pools:
        """Both sets; the whole archive takes a minute or two."""
        root = Path(self.root).expanduser()
        annotations = root / "val" / "val_annotations.txt"
        for needed in (root / "wnids.txt", annotations):
            require(
                needed.is_file(),
                f"Found no Tiny-ImageNet in {root.absolute()}: {needed.relative_to(root)} is missing. Unpack "
                "tiny-imagenet-200.zip and set --data.init_args.root to its folder.",
            )
        label_of = {name: label for label, name in enumerate(sorted((root / "wnids.txt").read_text().split()))}
        words = root / "words.txt"
        called = dict(line.split("\t") for line in words.read_text().splitlines()) if words.is_file() else {}
        self.class_names = [called.get(name, name) for name in label_of]
        train = [(file, label) for name, label in label_of.items() for file in sorted((root / "train" / name).rglob("*.JPEG"))]
        lines = [line.split("\t") for line in annotations.read_text().splitlines()]
        test = [(root / "val" / "images" / file, label_of[name]) for file, name, *_ in lines]
        return *self._read(train), *self._read(test)

    def _read(self, files: list[tuple[Path, int]]) -> tuple[Tensor, Tensor]:
        require(len(files) > 0, f"Found no images in {self.root}: set --data.init_args.root to the folder tiny-imagenet-200.")
        images = decode([file.read_bytes() for file, _ in files], lambda row: str(files[row][0]))
        return resize(images, self.image_size), torch.tensor([label for _, label in files])
