"""Images in parquet files with the schema of the Hugging Face hub: bytes of PNG, JPEG or WebP and a label."""

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fed.data.hub import load_from_hub, optional
from lightning_fed.errors import FederationError, require

IMAGE_COLUMNS = ("img", "image")
FORMATS = ("WEBP", "PNG", "JPEG")
"""What hub datasets use; trying every format that Pillow knows takes half as long again."""

Examples = tuple[Tensor, Tensor]
"""Images, uint8 of shape (N, 3, H, W), and labels."""

Names = list[str] | None
"""What the classes are called, where the files say it."""


def find(root: str) -> dict[str, list[str]]:
    """The parquet files anywhere under a folder, by the set their name tells; empty if there is none of either set."""
    files = sorted(Path(root).expanduser().rglob("*.parquet"))
    found = {part: [str(file) for file in files if part in file.name.lower()] for part in ("train", "test")}
    return found if all(found.values()) else {}


def from_files(files: dict[str, list[str]], label_columns: tuple[str, ...]) -> tuple[Examples, Examples, Names]:
    """The training and the test set in parquet files, and what the classes are called."""
    # Streaming reads the files in place; otherwise datasets would first copy them into its cache.
    sets = optional("datasets", "hub").load_dataset("parquet", data_files=files, streaming=True)
    return _both(sets, label_columns)


def from_hub(name: str, label_columns: tuple[str, ...]) -> tuple[Examples, Examples, Names]:
    """The training and the test set of a hub dataset, and what the classes are called."""
    sets = load_from_hub(name)
    require(
        {"train", "test"} <= set(sets),
        f"The hub dataset {name} has the sets {', '.join(sets)}, but train and test are needed.",
    )
    return _both(sets, label_columns)


def _both(sets: Any, label_columns: tuple[str, ...]) -> tuple[Examples, Examples, Names]:
    train, test = _read(sets["train"], label_columns), _read(sets["test"], label_columns)
    features = sets["train"].features
    names = getattr(features[_pick(list(features), label_columns)], "names", None)  # of a ClassLabel
    return train, test, names


def _read(dataset: Any, label_columns: tuple[str, ...]) -> Examples:
    names = list(dataset.features)
    image, label = _pick(names, IMAGE_COLUMNS), _pick(names, label_columns)
    # Arrow batches hold the files' bytes; any other format would decode the images one by one.
    tables = list(dataset.with_format("arrow").iter(batch_size=1000))
    files = [file for table in tables for file in table[image].combine_chunks().field("bytes").to_pylist()]
    labels = torch.cat([torch.from_numpy(table[label].to_numpy().copy()) for table in tables])
    return decode(files), labels


def decode(files: list[bytes]) -> Tensor:
    """Images of one size. Threads would not help: Pillow holds the interpreter's lock most of the time."""
    from PIL import Image

    Image.init()
    pixels = [np.asarray(Image.open(BytesIO(file), formats=FORMATS).convert("RGB")) for file in files]
    sizes = sorted({image.shape[:2] for image in pixels})
    require(len(sizes) == 1, f"Images have {len(sizes)} sizes, such as {sizes[:2]}, but must have one.")
    return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous()


def _pick(names: list[str], wanted: tuple[str, ...]) -> str:
    for name in wanted:
        if name in names:
            return name
    raise FederationError(
        f"The parquet files have the columns {', '.join(names)}, but one named {' or '.join(wanted)} is needed: is "
        "this the dataset that was asked for?"
    )
