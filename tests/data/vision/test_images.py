"""Image datasets from every kind of file, made small here; the real ones where LIGHTNING_FED_DATA points to them."""

import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_files import REAL, put_into_cache, real, write_idx

from lightning_fed.data import CIFAR10, CIFAR100, IID, MNIST, Digits, FashionMNIST, FederatedDataModule, ImageFiles
from lightning_fed.data.vision.images import resize
from lightning_fed.errors import FederationError


def write_parquet(
    path: Path, count: int, image: str = "img", label: str = "label", size: int = 32, channels: int = 3
) -> np.ndarray:
    """Random PNG images in the hub's schema, grey ones with one channel; returns them."""
    datasets = pytest.importorskip("datasets")
    from PIL import Image

    images = np.random.default_rng(0).integers(0, 256, (count, channels, size, size), dtype=np.uint8)
    files = []
    for pixels in images:
        png = BytesIO()
        Image.fromarray(pixels.transpose(1, 2, 0).squeeze()).save(png, "PNG")
        files.append({"bytes": png.getvalue(), "path": None})
    features = datasets.Features({image: datasets.Image(decode=False), label: datasets.Value("int64")})
    table = datasets.Dataset.from_dict({image: files, label: [k % 10 for k in range(count)]}, features=features)
    path.parent.mkdir(parents=True, exist_ok=True)
    table.cast_column(image, datasets.Image()).to_parquet(path)
    return images


def everything(data: FederatedDataModule) -> tuple[torch.Tensor, torch.Tensor]:
    shared = data.pooled().data
    return shared.images, shared.labels


def test_digits() -> None:
    images, labels = everything(Digits(seed=3))
    assert images.shape == (1797, 3, 32, 32)
    assert images.dtype == torch.uint8
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    scaled = images[:, 0] / 255
    assert Digits.mean[0] == pytest.approx(float(scaled.mean()), abs=1e-4)
    assert Digits.std[0] == pytest.approx(float(scaled.std()), abs=1e-4)
    assert everything(Digits(image_size=8))[0].shape == (1797, 3, 8, 8)


def write_grey(root: Path, name: str) -> np.ndarray:
    """120 random images, 100 of them for training, in torchvision's folder of a set like MNIST; returns them."""
    raw = root / name / "raw"
    raw.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (120, 28, 28))
    for part, rows in (("train", slice(0, 100)), ("t10k", slice(100, 120))):
        write_idx(raw / f"{part}-images-idx3-ubyte", pixels[rows])
        write_idx(raw / f"{part}-labels-idx1-ubyte", np.arange(120)[rows] % 10)
    return pixels


@pytest.mark.parametrize("kind", [FashionMNIST, MNIST])
def test_grey_images_in_torchvisions_folder(tmp_path: Path, kind: type[ImageFiles]) -> None:
    pixels = write_grey(tmp_path, kind.__name__)
    data = kind(str(tmp_path), num_clients=2, partition=IID(), image_size=28)
    images, labels = everything(data)
    assert np.array_equal(images.numpy(), np.repeat(pixels[:, None], 3, axis=1))
    assert labels.tolist() == [k % 10 for k in range(120)]
    assert labels.dtype == torch.int64
    assert data.class_names[9] == {"FashionMNIST": "Ankle boot", "MNIST": "9 - nine"}[kind.__name__]
    assert kind(str(tmp_path), num_clients=2, partition=IID()).client(0).data.images.shape == (120, 3, 32, 32)


@pytest.mark.parametrize("kind", [FashionMNIST, MNIST])
def test_grey_images_can_keep_their_one_channel(tmp_path: Path, kind: type[ImageFiles]) -> None:
    pixels = write_grey(tmp_path, kind.__name__)
    data = kind(str(tmp_path), num_clients=2, partition=IID(), split="official", image_size=28, channels=1)
    assert np.array_equal(everything(data)[0].numpy(), pixels[:, None])
    assert (data.mean, data.std) == (kind.mean[:1], kind.std[:1])
    images, _ = data.client(0).on_after_batch_transfer(next(iter(data.client(0).train_dataloader())), 0)
    assert images.shape[1:] == (1, 28, 28)
    with pytest.raises(FederationError, match="Got channels=2: give 1 or 3"):
        kind(str(tmp_path), channels=2)


@pytest.mark.parametrize(
    ("given", "mean", "std"), [((0.5,), (0.5,) * 3, (0.25,) * 3), ((0.1, 0.2, 0.3), (0.1, 0.2, 0.3), (0.25,) * 3)]
)
def test_other_levels_can_be_given(
    tmp_path: Path, given: tuple[float, ...], mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    pixels = write_grey(tmp_path, "MNIST")
    data = MNIST(str(tmp_path), num_clients=1, partition=IID(), image_size=28, mean=given, std=[0.25], batch_size=1000)
    assert (data.mean, data.std) == (mean, std)
    images, _ = data.pooled().on_after_batch_transfer((torch.from_numpy(pixels[:, None].repeat(3, 1)).byte(), torch.zeros(120)), 0)
    expected = (pixels[:, None] / 255 - np.array(mean)[:, None, None]) / 0.25
    assert np.allclose(images.numpy(), expected, atol=1e-5)
    with pytest.raises(FederationError, match=r"Got mean=\[0, 0\]: give 1 number or 3, one per channel"):
        MNIST(str(tmp_path), mean=[0, 0])
    with pytest.raises(FederationError, match=r"Got std=\[0, 0, 0\]: give numbers above 0"):
        MNIST(str(tmp_path), std=[0])


@pytest.mark.parametrize(
    ("kind", "image", "label"),
    [(CIFAR10, "img", "label"), (CIFAR100, "img", "fine_label"), (FashionMNIST, "image", "label")],
)
def test_parquet_files(tmp_path: Path, kind: Any, image: str, label: str) -> None:
    train = write_parquet(tmp_path / "plain_text" / "train-00000-of-00001.parquet", 50, image, label)
    test = write_parquet(tmp_path / "plain_text" / "test-00000-of-00001.parquet", 20, image, label)
    data = kind(str(tmp_path), num_clients=2, partition=IID(), split="official")
    images, labels = everything(data)
    assert images.is_contiguous()
    assert np.array_equal(images.numpy(), np.concatenate([train, test]))
    assert labels.tolist() == [k % 10 for k in range(50)] + [k % 10 for k in range(20)]
    assert [c.num_test for c in data.clients] == [10, 10]


def test_a_parquet_file_belongs_to_one_set(tmp_path: Path) -> None:
    """``latest-train`` has test in its name, too, and hidden copies are no data."""
    for name in ("a-train", "a-test", "._a-train"):
        write_parquet(tmp_path / f"{name}.parquet", 20)
    assert len(everything(CIFAR10(str(tmp_path), num_clients=2, partition=IID()))[1]) == 40
    (tmp_path / "a-train.parquet").rename(tmp_path / "latest-train.parquet")
    with pytest.raises(FederationError, match=r"latest-train.parquet has train and test in its name .*: rename it"):
        CIFAR10(str(tmp_path), num_clients=2, partition=IID()).setup()


@pytest.mark.parametrize("channels", [1, 3])
def test_grey_parquet_files(tmp_path: Path, channels: int) -> None:
    train = write_parquet(tmp_path / "train-00000-of-00001.parquet", 30, "image", size=28, channels=1)
    test = write_parquet(tmp_path / "test-00000-of-00001.parquet", 20, "image", size=28, channels=1)
    data = MNIST(str(tmp_path), num_clients=2, partition=IID(), image_size=28, channels=channels)
    images, _ = everything(data)
    assert images.is_contiguous()
    assert np.array_equal(images.numpy(), np.concatenate([train, test]).repeat(channels, axis=1))


def test_parquet_files_leave_the_cache_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    datasets = pytest.importorskip("datasets")
    cache = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    write_parquet(tmp_path / "data" / "train.parquet", 50)
    write_parquet(tmp_path / "data" / "test.parquet", 20)
    capfd.readouterr()
    CIFAR10(str(tmp_path / "data"), num_clients=2, partition=IID()).setup()
    assert capfd.readouterr() == ("", "")
    assert sum(file.stat().st_size for file in cache.rglob("*") if file.is_file()) == 0


def test_hub_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    expected = write_parquet(tmp_path / "train.parquet", 50)
    sets = {"train": datasets.Dataset.from_parquet(str(tmp_path / "train.parquet"), cache_dir=str(tmp_path / "cache"))}
    put_into_cache(monkeypatch, "owner/train_only", sets)
    with pytest.raises(FederationError, match="owner/train_only has the sets train, but train and test are needed"):
        CIFAR10("hf://owner/train_only").setup()
    put_into_cache(monkeypatch, "uoft-cs/cifar10", sets | {"test": sets["train"].select(range(20))})
    images, _ = everything(CIFAR10("hf://uoft-cs/cifar10", num_clients=2, partition=IID()))
    assert np.array_equal(images[:50].numpy(), expected)


def test_missing_data_say_where_and_what(tmp_path: Path) -> None:
    with pytest.raises(FederationError) as caught:
        CIFAR10(str(tmp_path / "nowhere")).setup()
    message = str(caught.value)
    for part in ("Found no CIFAR10", str(tmp_path / "nowhere"), "parquet", "data.init_args.root", "download true"):
        assert part in message


def test_another_dataset_is_noticed(tmp_path: Path) -> None:
    for part in ("train", "test"):
        write_parquet(tmp_path / f"{part}.parquet", 20, label="fine_label")
    with pytest.raises(FederationError, match="columns img, fine_label, but one named label is needed"):
        CIFAR10(str(tmp_path)).setup()


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("train", "test"):
        (tmp_path / f"{part}.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(FederationError, match=r'pip install "lightning-fed\[hub\]"'):
        CIFAR10(str(tmp_path)).setup()


def test_a_failed_download_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision

    def fail(root: str, train: bool, download: bool) -> None:
        raise RuntimeError("Error downloading")

    monkeypatch.setattr(torchvision.datasets, "CIFAR10", fail)
    with pytest.raises(FederationError, match="Could not download CIFAR10"):
        CIFAR10(str(tmp_path), download=True).prepare_data()


def test_resize_keeps_bytes_and_constant_images() -> None:
    images = torch.full((2, 1, 8, 8), 200, dtype=torch.uint8)
    resized = resize(images, 32)
    assert resized.dtype == torch.uint8
    assert resized.shape == (2, 3, 32, 32)
    assert (resized == 200).all()
    with pytest.raises(FederationError, match="image_size=0"):
        CIFAR10("", image_size=0)


@real
def test_real_cifar10() -> None:
    data = CIFAR10(f"{REAL}/cifar10", split="official")
    images, labels = everything(data)
    assert images.shape == (60_000, 3, 32, 32)
    assert labels[:50_000].bincount().tolist() == [5000] * 10
    mean = (images[:50_000].float() / 255).mean((0, 2, 3))
    torch.testing.assert_close(mean, torch.tensor(CIFAR10.mean), atol=1e-3, rtol=0)


@real
def test_real_fashion_mnist() -> None:
    data = FashionMNIST(f"{REAL}/fashion-mnist", image_size=28)
    images, labels = everything(data)
    assert images.shape == (70_000, 3, 28, 28)
    assert labels.bincount().tolist() == [7000] * 10
    mean = (images[:60_000, 0].float() / 255).mean()
    assert float(mean) == pytest.approx(FashionMNIST.mean[0], abs=1e-3)


def test_a_portion_of_the_training_set(tmp_path: Path) -> None:
    images = write_parquet(tmp_path / "train.parquet", 10)
    test = write_parquet(tmp_path / "test.parquet", 4)
    options: dict[str, Any] = {"num_clients": 2, "partition": IID(), "split": "pooled"}
    halves = [CIFAR10(str(tmp_path), portion=portion, **options).load() for portion in ((0, 0.5), (0.5, 1))]
    assert [np.array_equal(half[0], part) for half, part in zip(halves, (images[:5], images[5:]), strict=True)] == [True, True]
    assert [half[1].tolist() for half in halves] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert all(np.array_equal(half[2], test) for half in halves)


@pytest.mark.parametrize("portion", [(0.5, 0.5), (1, 0), (-0.1, 1), (0, 1.1)])
def test_a_portion_that_is_none(portion: tuple[float, float]) -> None:
    with pytest.raises(FederationError, match="give where it begins and where it ends, between 0 and 1"):
        CIFAR10("here", portion=portion)
