"""Images in Parquet files with the schema of the Hugging Face hub: bytes of PNG, JPEG or WebP and a label."""

from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fed.data.hub import load_from_hub, optional
from lightning_fed.data.paths import is_hidden
from lightning_fed.data.vision.decode import image_errors, in_colour
from lightning_fed.errors import FederationError, one_line, require

IMAGE_COLUMNS = ("img", "image")
FORMATS = ("WEBP", "PNG", "JPEG")
"""Formats of hub datasets; trying every format that Pillow knows takes half as long again."""

Examples = tuple[Tensor, Tensor]
"""Images, uint8 of shape (N, 3, H, W), and labels."""

Names = list[str] | None
"""Names of the classes, if the files have them."""


def find(root: str) -> dict[str, list[str]]:
    """All Parquet files under a folder that are not hidden, by the set in their names; empty unless both sets are there."""
    folder = Path(root).expanduser()
    files = [file for file in sorted(folder.rglob("*.parquet")) if not is_hidden(file, folder)]
    found = {part: [file for file in files if part in file.name.lower()] for part in ("train", "test")}
    both = next((file for file in found["train"] if file in found["test"]), None)
    require(both is None, f"{both} has train and test in its name (as latest has), so its set is unknown: rename it.")
    return {part: [*map(str, of_part)] for part, of_part in found.items()} if all(found.values()) else {}


def from_files(files: dict[str, list[str]], label_columns: tuple[str, ...]) -> tuple[Examples, Examples, Names]:
    """The training and the test set in Parquet files, and the names of the classes."""
    parquet = optional("pyarrow.parquet", "hub")

    def table(file: str) -> tuple[str, Any]:
        try:
            return file, parquet.ParquetFile(file).read()
        except (OSError, ValueError) as error:
            raise FederationError(f"{file} is not a complete parquet file ({one_line(error)}): get it again.") from error

    return _both({part: list(map(table, found)) for part, found in files.items()}, label_columns)


def from_hub(name: str, label_columns: tuple[str, ...]) -> tuple[Examples, Examples, Names]:
    """The training and the test set of a hub dataset, and the names of the classes."""
    sets = load_from_hub(name)
    require(
        {"train", "test"} <= set(sets),
        f"The hub dataset {name} has the sets {', '.join(sets)}, but train and test are needed.",
    )
    # Arrow tables hold the files' bytes; any other format would decode the images one by one.
    return _both({part: [(f"{name}, set {part}", sets[part].with_format("arrow")[:])] for part in ("train", "test")}, label_columns)


def _both(tables: dict[str, list[tuple[str, Any]]], label_columns: tuple[str, ...]) -> tuple[Examples, Examples, Names]:
    """Both sets, from tables with the names of their files."""
    train, test = (_read(tables[part], label_columns) for part in ("train", "test"))
    schema = tables["train"][0][1].schema
    features = optional("datasets", "hub").Features.from_arrow_schema(schema)
    names = getattr(features[_pick(schema.names, label_columns)], "names", None)  # of a ClassLabel
    return train, test, names


def _read(tables: list[tuple[str, Any]], label_columns: tuple[str, ...]) -> Examples:
    images: list[bytes | None] = []
    labels: list[int] = []
    places: list[str] = []
    for file, table in tables:
        image, label = _pick(table.column_names, IMAGE_COLUMNS), _pick(table.column_names, label_columns)
        kind = table[image].type
        holds_bytes = hasattr(kind, "fields") and any(field.name == "bytes" for field in kind.fields)
        require(holds_bytes, f"{file} has the column {image!r} of {kind}: expected images, as bytes and path.")
        for row, number in enumerate(table[label].to_pylist()):
            if not isinstance(number, int) or isinstance(number, bool):
                raise FederationError(f"{file}, row {row}, has {number!r} in the column {label!r}: expected the number of a class.")
            labels.append(number)
            places.append(f"{file}, row {row}")
        images += [content for chunk in table[image].chunks for content in chunk.field("bytes").to_pylist()]
    require(len(images) > 0, f"{tables[0][0]} has no rows: give at least one image per client.")
    return decode(images, places.__getitem__), torch.tensor(labels)


def decode(files: Sequence[bytes | None], place: Callable[[int], str]) -> Tensor:
    """Images of one size. Threads would not help: Pillow holds the interpreter's lock most of the time."""
    from PIL import Image

    Image.init()
    pixels = []
    for row, file in enumerate(files):
        if not file:
            raise FederationError(f"{place(row)}, has no image: leave the row out.")
        with image_errors(f"{place(row)}, as {' or '.join(FORMATS)}"):
            pixels.append(np.asarray(in_colour(Image.open(BytesIO(file), formats=FORMATS))))
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
