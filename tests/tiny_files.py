"""Data of one's own, written small: two clients, two classes, in every form that is read."""

import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

USERS = {"ann": 12, "bob": 20}
"""Two clients and how many examples each has."""

CLASS_NAMES = ["cat", "dog"]

REAL = os.environ.get("LIGHTNING_FED_DATA", "")
"""The folder with real data sets, where there is one."""

real = pytest.mark.skipif(not REAL, reason="needs real datasets: set LIGHTNING_FED_DATA")


def write_idx(path: Path, array: np.ndarray) -> None:
    """The file format of MNIST."""
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


def write_images(root: Path, layout: str = "user/class", sizes: dict[str, int] = USERS) -> str:
    """Random PNG images of different sizes in folders, by the levels of a layout: of each user so many, the classes in turn, and in
    a level ``split`` every third for test.
    """
    from PIL import Image

    stream = np.random.default_rng(0)
    for user, size in sizes.items():
        for k in range(size):
            levels = {"user": user, "class": CLASS_NAMES[k % 2], "split": "test" if k % 3 == 0 else "train"}
            folder = root.joinpath(*(levels[level] for level in layout.split("/")))
            folder.mkdir(parents=True, exist_ok=True)
            shape = (10 + k % 3, 12, 3) if k % 4 else (9, 9)  # some are grey
            Image.fromarray(stream.integers(0, 256, shape, dtype=np.uint8)).save(folder / f"{user}{k}.png")
    return str(root)


def rows() -> list[tuple[str, float, float, str, str]]:
    """User, two numbers, class and set of each example."""
    return [
        (user, float(k), k / 2, CLASS_NAMES[k % 2], ("train", "train", "val", "test")[k % 4])
        for user, size in USERS.items()
        for k in range(size)
    ]


def write_csv(path: Path) -> str:
    """A table of numbers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [",".join(map(str, row)) for row in rows()]
    path.write_text("\n".join(["user,height,weight,kind,split", *lines]) + "\n")
    return str(path)


def write_arrays(path: Path) -> str:
    """Images, labels and users, as NumPy's or PyTorch's file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    images = np.random.default_rng(0).integers(0, 256, (32, 10, 12, 3), dtype=np.uint8)
    labels, users = np.arange(32) % 2, np.repeat([0, 1], list(USERS.values()))
    if path.suffix == ".npz":
        np.savez(path, images=images, labels=labels, user=np.array(list(USERS))[users])
    else:
        tensors = {"images": images.transpose(0, 3, 1, 2), "labels": labels, "user": users}
        torch.save({name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in tensors.items()}, path)
    return str(path)


def write_dataset(path: Path, kind: str = "image", sets: tuple[str, ...] = ("train",)) -> str:
    """A dataset of the Hugging Face library, as ``save_to_disk`` writes it: images, texts or numbers, of both users in each set."""
    import datasets
    from PIL import Image

    kinds = {"image": datasets.Image(), "text": datasets.Value("string"), "numbers": datasets.Sequence(datasets.Value("float32"))}
    columns = {
        "image": [Image.fromarray(np.full((10 + k % 2, 12, 3), 7 * k, np.uint8)) for k in range(32)],
        "text": [f"a b {'c' * (k % 3 + 1)}" for k in range(32)],
        "numbers": [[float(k), k / 2] for k in range(32)],
    }
    table = {
        kind: columns[kind],
        "label": [k % 2 for k in range(32)],
        "user": np.repeat(list(USERS), list(USERS.values())).tolist(),
    }
    features = {kind: kinds[kind], "label": datasets.ClassLabel(names=CLASS_NAMES), "user": datasets.Value("string")}
    datasets.disable_progress_bars()
    whole = datasets.Dataset.from_dict(table, features=datasets.Features(features))
    saved = whole if len(sets) == 1 else datasets.DatasetDict(dict.fromkeys(sets, whole))
    saved.save_to_disk(str(path))
    return str(path)


COMMIT = "0123456789abcdef"
"""Of the hub datasets in the cache of a test."""


def put_into_cache(monkeypatch: pytest.MonkeyPatch, name: str, sets: Mapping[str, Any], config: str = "default") -> None:
    """Hub datasets as the library keeps them once they are downloaded, in a cache of this test's own."""
    import datasets

    cache = Path("hub-cache").absolute()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    folder, short = cache / name.replace("/", "___") / config / "0.0.0" / COMMIT, name.split("/")[-1]
    folder.mkdir(parents=True)
    for part, rows in sets.items():
        with datasets.arrow_writer.ArrowWriter(path=str(folder / f"{short}-{part}.arrow"), features=rows.features) as writer:
            for row in rows:
                writer.write(row)
            writer.finalize()
    splits = {part: {"name": part, "num_examples": len(rows), "dataset_name": short} for part, rows in sets.items()}
    features = next(iter(sets.values())).features
    info = datasets.DatasetInfo(features=features, splits=splits, dataset_name=short, config_name=config, version="0.0.0")
    info.write_to_directory(str(folder))
