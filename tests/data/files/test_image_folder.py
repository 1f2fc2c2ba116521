"""Images in folders, decoded when a batch needs them."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_files import CLASS_NAMES, USERS, write_images
from torchvision.datasets import ImageFolder as Reference

from lightning_fed.data import IID, ImageFolder
from lightning_fed.data.lazy import Joined, LazyInputs, Taken
from lightning_fed.data.vision.decode import resized, warn_of_dark_images
from lightning_fed.data.vision.parquet import decode
from lightning_fed.errors import FederationError


def one_client(path: str = "images", **options: Any) -> ImageFolder:
    return ImageFolder(path, partition=IID(), num_clients=1, image_size=16, **options)


def test_the_images_and_classes_are_torchvisions() -> None:
    """Pillow's resizing is the reference's, too: torchvision hands images on to it."""
    data = one_client(write_images(Path("images"), "class"))
    reference = Reference("images")
    assert data.num_classes == 2
    data.setup()
    assert data.class_names == reference.classes == CLASS_NAMES
    assert data._data is not None
    images, labels = data._data[torch.arange(len(reference))]
    assert labels.tolist() == reference.targets
    for image, (expected, _) in zip(images, reference, strict=True):
        resized = np.asarray(expected.resize((16, 16), Image.Resampling.BILINEAR))
        assert np.array_equal(image.permute(1, 2, 0).numpy(), resized)
    assert images.dtype == torch.uint8


def test_a_level_of_folders_is_a_client() -> None:
    data = ImageFolder(write_images(Path("images")), layout="user/class", client="user", image_size=8)
    assert data.num_clients == 2
    assert data.client_names == list(USERS)
    assert [sum(map(len, data.client(k).splits)) for k in range(2)] == list(USERS.values())
    files = data.column("file")
    assert all(Path("images", file).is_file() for file in files)
    for client, user in enumerate(USERS):
        assert all(user in files[row] for row in torch.cat([*data.client(client).splits]))


@pytest.mark.parametrize("layout", ["split/class", "split/user/class"])
def test_a_level_of_folders_is_a_set(layout: str) -> None:
    options: dict[str, Any] = {} if layout == "split/class" else {"layout": layout}
    data = one_client(write_images(Path("images"), layout), val_share=0, **options)
    [client] = data.clients
    assert (data.split, client.num_train, client.num_test) == ("official", 21, 11)
    files = data.column("file")
    assert all(files[row].startswith("test") for row in data.client(0).splits[2])


def test_sets_are_found_by_any_of_their_names() -> None:
    """With one such folder alone it is a class."""
    images = Path(write_images(Path("images"), "split/class"))
    for name, other in (("train", "Training"), ("test", "Testing")):
        (images / name).rename(images / other)
    data = one_client(str(images), val_share=0)
    assert ([(info.num_train, info.num_test) for info in data.clients], data.class_names) == ([(21, 11)], ["cat", "dog"])
    (images / "Testing").rename(images / "bus")
    data = one_client(str(images))
    data.setup()
    assert data.class_names == ["Training", "bus"]


def test_what_is_in_memory_are_paths() -> None:
    data = one_client(write_images(Path("images"), "class"))
    data.setup()
    assert isinstance(data._data.images, LazyInputs)  # type: ignore[union-attr]
    assert len(pickle.dumps(data)) < 10_000
    kept = one_client(in_memory=True)
    kept.setup()
    assert isinstance(kept._data.images, torch.Tensor)  # type: ignore[union-attr]
    for lazy, eager in zip(data.client(0).train_dataloader(), kept.client(0).train_dataloader(), strict=True):
        assert all(map(torch.equal, lazy, eager))


def test_the_fingerprint_is_that_of_the_files_wherever_they_are() -> None:
    before = one_client(write_images(Path("images"), "class")).fingerprint()
    shutil.copytree("images", "copy")
    assert one_client("copy").fingerprint() == before
    assert one_client("copy", mean=(0.5,) * 3).fingerprint() == before
    Path("copy/cat/ann0.png").write_bytes(Path("copy/dog/bob1.png").read_bytes())
    assert one_client("copy").fingerprint() != before
    pixels = np.asarray(Image.open("images/cat/ann0.png")).copy()
    Image.fromarray(pixels).save("images/cat/ann0.png", compress_level=0)
    assert one_client().fingerprint() != before
    Path("images/cat/ann0.png").unlink()
    unread = one_client()
    unread.setup()
    Path("images/cat/ann2.png").unlink()
    with pytest.raises(FederationError, match=r"Could not read the image .*/images/cat/ann2.png"):
        unread.fingerprint()


def test_workers_may_have_another_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = one_client(write_images(Path("images"), "class"))
    data.setup()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert data._data is not None
    assert len(data._data[torch.arange(3)][0]) == 3


def test_an_image_is_read_when_it_is_needed() -> None:
    data = one_client(write_images(Path("images"), "class"))
    data.setup()
    for path in Path("images").rglob("*.png"):
        path.unlink()
    with pytest.raises(FederationError, match=r"Could not read the image .*images/.*png .*: repair it, or take it out"):
        next(iter(data.client(0).train_dataloader()))


@pytest.mark.parametrize("format", ["png", "tiff"])
@pytest.mark.parametrize(("highest", "told"), [(65535, False), (4095, True)])
def test_grey_images_of_16_bits_keep_their_highest_8(
    format: str, highest: int, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_dark_images.cache_clear()
    levels = np.linspace(0, highest, 256).astype(np.uint16).reshape(16, 16)
    Image.fromarray(levels).save(f"grey.{format}")
    read = resized(Path(f"grey.{format}"), 16)
    assert read.shape == (3, 16, 16)
    assert all(np.array_equal(channel, levels >> 8) for channel in read)
    assert ("multiply their values by 16" in caplog.text) == told
    if format == "png":
        assert torch.equal(decode([Path("grey.png").read_bytes()], str)[0], read)


@pytest.mark.parametrize("kind", [np.float32, np.int32, np.int16])
def test_pixels_without_a_known_range_are_refused(kind: type) -> None:
    Path("images/a").mkdir(parents=True)
    Image.fromarray(np.ones((9, 9), kind)).save("images/a/1.tiff")
    with pytest.raises(FederationError, match=r"image .*/images/a/1.tiff \(pixels .* no known range: convert it to 8"):
        one_client(in_memory=True).setup()


class Squares(LazyInputs):
    def __len__(self) -> int:
        return 10

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.square()


def test_some_of_them_and_joined() -> None:
    some = Taken(Squares(), torch.tensor([9, 2, 4]))
    both = Joined(some, Squares())
    assert (len(some), len(both)) == (3, 13)
    assert some.read(torch.tensor([2, 0, 0])).tolist() == [16, 81, 81]
    assert both.read(torch.tensor([3, 0, 12, 2, 1])).tolist() == [0, 81, 81, 16, 4]
    assert both.read(torch.tensor([5])).tolist() == [4]
    assert both.read(torch.tensor([], dtype=torch.int64)).shape == (0,)


class NamedSquares(Squares):
    def read(self, rows: torch.Tensor) -> Any:
        return {"x": rows.square(), "targets": rows}


def test_named_inputs_joined() -> None:
    read = Joined(Taken(NamedSquares(), torch.tensor([9, 2])), NamedSquares()).read(torch.tensor([3, 0, 1]))
    assert {name: values.tolist() for name, values in read.items()} == {"x": [1, 81, 4], "targets": [1, 9, 2]}


def test_a_poisson_sample_may_have_no_image() -> None:
    data = one_client(write_images(Path("images"), "class"), batch_size=1).client(0)
    data.poisson = True
    shapes = {tuple(images.shape) for images, _ in data.train_dataloader()}
    assert (0, 3, 16, 16) in shapes


def test_folders_that_hold_something_else() -> None:
    write_images(Path("images"), "class")
    Path("images/.cache").mkdir()
    Path("images/cat/notes.txt").write_text("not an image")
    for hidden in ("images/cat/._cat0.png", "images/cat/.trash/cat0.png"):
        Path(hidden).parent.mkdir(exist_ok=True)
        Path(hidden).write_text("not to be seen")
    Path("images/cat/more").mkdir()
    Path("images/cat/cat0.png").write_bytes(Path("images/dog/ann1.png").read_bytes())
    Path("images/cat/more/deep.png").write_bytes(Path("images/dog/ann1.png").read_bytes())
    data = one_client()
    assert (data.num_classes, len(data.column("file"))) == (2, 34)


def test_images_of_too_few_levels_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """A hospital without folders of classes would be missing without a word."""
    write_images(Path("images"))
    write_images(Path("images/west"), "class", {"cy": 3})
    write_images(Path("images"), "user", {"dan": 3})
    data = ImageFolder("images", layout="user/class", client="user")
    assert data.num_clients == 3
    [line] = [record.message for record in caplog.records if "left out" in record.message]
    assert "3 images are left out, being in no folder of the levels user/class (such as" in line
    assert line.endswith("images/dan/dan0.png).")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "nowhere"}, "Found no folder .*nowhere: set --data.init_args.path"),
        ({"layout": "a/b/class"}, "Found no images in .*images, where the levels of folders should be a/b/class"),
        ({"layout": "user"}, "Got layout='user': give the name of each level of folders, one of them class"),
        ({"layout": "class/class"}, "Got layout='class/class'"),
        ({"image_size": 0}, "image_size=0"),
        ({"client": "hospital"}, "no column 'hospital', its columns are: class, file"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    write_images(Path("images"), "class", {"ann": 2})
    with pytest.raises(FederationError, match=message):
        ImageFolder(**{"path": "images"} | options).setup()
