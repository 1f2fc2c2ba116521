"""Images in parquet files with the schema of the Hugging Face hub: bytes of PNG, JPEG or WebP and a label."""

from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fed.data.hub import load_from_hub, optional
from lightning_fed.data.vision.decode import image_errors
from lightning_fed.errors import FederationError, require

IMAGE_COLUMNS = ("img", "image")
FORMATS = ("WEBP", "PNG", "JPEG")
"""What hub datasets use; trying every format that Pillow knows takes half as long again."""

Examples = tuple[Tensor, Tensor]
"""Images, uint8 of shape (N, 3, H, W), and labels."""

Files = list[tuple[str, int]]
"""Files of a set, one after the other, and how many rows each has."""

Names = list[str] | None
"""What the classes are called, where the files say it."""


def find(root: str) -> dict[str, list[str]]:
    """The parquet files anywhere under a folder, by the set their name tells; empty if there is none of either set."""
    files = sorted(Path(root).expanduser().rglob("*.parquet"))
    found = {part: [str(file) for file in files if part in file.name.lower()] for part in ("train", "test")}
    return found if all(found.values()) else {}


def from_files(files: dict[str, list[str]], label_columns: tuple[str, ...]) -> tuple[Examples, Examples, Names]:
    """The training and the test set in parquet files, and what the classes are called."""
    datasets = optional("datasets", "hub")
    rows = {part: [(file, rows_of(file)) for file in found] for part, found in files.items()}
    # Streaming reads the files in place; otherwise datasets would first copy them into its cache.
    sets = datasets.load_dataset("parquet", data_files=files, streaming=True)
    return _both(sets, label_columns, rows)


def rows_of(file: str) -> int:
    """How many rows a parquet file has."""
    parquet = optional("pyarrow.parquet", "hub")
    try:
        return int(parquet.read_metadata(file).num_rows)
    except (OSError, ValueError) as error:
        raise FederationError(f"{file} is no complete parquet file ({' '.join(str(error).split())}): get it again.") from error


def from_hub(name: str, label_columns: tuple[str, ...]) -> tuple[Examples, Examples, Names]:
    """The training and the test set of a hub dataset, and what the classes are called."""
    sets = load_from_hub(name)
    require(
        {"train", "test"} <= set(sets),
        f"The hub dataset {name} has the sets {', '.join(sets)}, but train and test are needed.",
    )
    return _both(sets, label_columns, {part: [(f"{name}, set {part}", len(sets[part]))] for part in ("train", "test")})


def place_of(row: int, files: Files) -> str:
    """The file that a row of a set is in, and the row there, from 0."""
    place = 0
    while row >= files[place][1]:
        row -= files[place][1]
        place += 1
    return f"{files[place][0]}, row {row}"


def _both(sets: Any, label_columns: tuple[str, ...], files: dict[str, Files]) -> tuple[Examples, Examples, Names]:
    train, test = (_read(sets[part], label_columns, files[part]) for part in ("train", "test"))
    features = sets["train"].features
    names = getattr(features[_pick(list(features), label_columns)], "names", None)  # of a ClassLabel
    return train, test, names


def _read(dataset: Any, label_columns: tuple[str, ...], files: Files) -> Examples:
    first = files[0][0]
    try:
        # Arrow batches hold the files' bytes; any other format would decode the images one by one.
        tables = list(dataset.with_format("arrow").iter(batch_size=1000))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise FederationError(
            f"{first}, or a file after it, cannot be read ({' '.join(str(error).split())}): get it again, or give files with the "
            "same columns."
        ) from error
    require(len(tables) > 0, f"{first} has no rows: give at least one image per client.")
    names = tables[0].column_names
    image, label = _pick(names, IMAGE_COLUMNS), _pick(names, label_columns)
    kind = tables[0][image].type
    holds_bytes = hasattr(kind, "fields") and any(field.name == "bytes" for field in kind.fields)
    require(holds_bytes, f"{first} has the column {image!r} of {kind}: expected images, as bytes and path.")
    images = [content for table in tables for content in table[image].combine_chunks().field("bytes").to_pylist()]
    labels = [number for table in tables for number in table[label].to_pylist()]
    for row, number in enumerate(labels):
        if not isinstance(number, int) or isinstance(number, bool):
            raise FederationError(
                f"{place_of(row, files)}, has {number!r} in the column {label!r}: expected the number of a class."
            )
    return decode(images, lambda row: place_of(row, files)), torch.tensor(labels)


def decode(files: Sequence[bytes | None], place: Callable[[int], str]) -> Tensor:
    """Images of one size. Threads would not help: Pillow holds the interpreter's lock most of the time.

    Args:
        files: what is in them.
        place: where one of them is, by its position.
    """
    from PIL import Image

    Image.init()
    pixels = []
    for row, file in enumerate(files):
        if not file:
            raise FederationError(f"{place(row)}, has no image: leave the row out.")
        with image_errors(f"{place(row)}, as {' or '.join(FORMATS)}"):
            pixels.append(np.asarray(Image.open(BytesIO(file), formats=FORMATS).convert("RGB")))
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
