"""Images in parquet files with the schema of the Hugging Face hub: bytes of PNG, JPEG or WebP and a label."""

from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fed.data.hub import load_from_hub, optional
from lightning_fed.data.vision.decode import told_of_image
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
    datasets = optional("datasets", "hub")
    rows = {part: FileRows([(file, rows_of(file)) for file in found]) for part, found in files.items()}
    # Streaming reads the files in place; otherwise datasets would first copy them into its cache.
    sets = datasets.load_dataset("parquet", data_files=files, streaming=True)
    return _both(sets, label_columns, rows["train"], rows["test"])


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
    whole = ({part: FileRows([(f"{name}, set {part}", len(sets[part]))])} for part in ("train", "test"))
    return _both(sets, label_columns, *(rows[part] for rows in whole for part in rows))


class FileRows:
    """Which file the row of a set is in.

    Args:
        files: their names and how many rows each has, one after the other.
    """

    def __init__(self, files: list[tuple[str, int]]) -> None:
        self.files = files

    def place(self, row: int) -> str:
        """File and row there, from 0."""
        for file, rows in self.files:
            if row < rows:
                return f"{file}, row {row}"
            row -= rows
        return f"row {row} behind the last file"


def _both(sets: Any, label_columns: tuple[str, ...], train_rows: FileRows, test_rows: FileRows) -> tuple[Examples, Examples, Names]:
    train, test = _read(sets["train"], label_columns, train_rows), _read(sets["test"], label_columns, test_rows)
    features = sets["train"].features
    names = getattr(features[_pick(list(features), label_columns)], "names", None)  # of a ClassLabel
    return train, test, names


def _read(dataset: Any, label_columns: tuple[str, ...], rows: FileRows) -> Examples:
    first = rows.files[0][0]
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
    files = [file for table in tables for file in table[image].combine_chunks().field("bytes").to_pylist()]
    labels = [number for table in tables for number in table[label].to_pylist()]
    for row, number in enumerate(labels):
        if not isinstance(number, int) or isinstance(number, bool):
            raise FederationError(f"{rows.place(row)}, has {number!r} in the column {label!r}: expected the number of a class.")
    return decode(files, rows.place), torch.tensor(labels)


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
        with told_of_image(f"{place(row)}, as {' or '.join(FORMATS)}"):
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
