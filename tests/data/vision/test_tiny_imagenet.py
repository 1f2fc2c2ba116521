"""Tiny-ImageNet, on a small folder of the same layout."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lightning_fed.data import IID, TinyImageNet
from lightning_fed.errors import FederationError

CLASSES = ("n02", "n01")  # the order of wnids.txt is not the order of the labels


def write_image(path: Path, level: int, mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((64, 64), level, dtype=np.uint8)).convert(mode).save(path, format="JPEG")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny-imagenet-200"
    for number, name in enumerate(sorted(CLASSES)):
        for k in range(6):
            # Some of the real images are grey.
            write_image(folder / "train" / name / "images" / f"{name}_{k}.JPEG", 100 * number + 50, "L" if k == 0 else "RGB")
    lines = []
    for k in range(4):
        write_image(folder / "val" / "images" / f"val_{k}.JPEG", 100 * (k % 2) + 50)
        lines.append(f"val_{k}.JPEG\t{sorted(CLASSES)[k % 2]}\t0\t0\t62\t62")
    (folder / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    (folder / "wnids.txt").write_text("\n".join(CLASSES) + "\n")
    return folder


def test_images_and_labels(root: Path) -> None:
    images, labels, test_images, test_labels = TinyImageNet(str(root)).load()
    assert images.shape == (12, 3, 64, 64)
    assert labels.tolist() == [0] * 6 + [1] * 6
    assert test_labels.tolist() == [0, 1, 0, 1]
    for pixels, own in ((images, labels), (test_images, test_labels)):
        assert ((pixels.float().mean(dim=(1, 2, 3)) - 50 - 100 * own).abs() < 3).all()


def test_official_split_and_size(root: Path) -> None:
    data = TinyImageNet(str(root), image_size=32, num_clients=2, partition=IID(), split="official", val_share=0)
    assert [(client.num_train, client.num_test) for client in data.clients] == [(6, 2), (6, 2)]
    images, _ = next(iter(data.client(0).train_dataloader()))
    assert images.shape == (6, 3, 32, 32)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match=r"nowhere.*wnids.txt.*--data.init_args.root"):
        TinyImageNet(str(tmp_path / "nowhere")).load()
