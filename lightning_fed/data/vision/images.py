"""Image datasets in any file format."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn.functional import interpolate

from lightning_fed.data.batches import take
from lightning_fed.data.checked import Array, Given, as_labels, checked_inputs, pick_column
from lightning_fed.data.federated import FederatedDataModule, Pools, pools_of
from lightning_fed.data.lines import refuse_doubles
from lightning_fed.data.vision import parquet
from lightning_fed.errors import FederationError, error_text, require
from lightning_fed.options import ClosedUnitInterval, PositiveInt, require_from


class InMemory(FederatedDataModule):
    """Tensors or NumPy arrays in memory.

    Args:
        images: uint8 of shape (N, C, H, W), scaled to [0, 1] when used; or floats of any shape (N, …), used unchanged; or such
            tensors by their names in the network. Arrays may have the shapes that :func:`as_tensor` takes.
        labels: shape (N,), from 0.
        num_classes: number of classes. None: the number of ``class_names``, or of classes in the labels.
        test_images: an official test set.
        test_labels: its labels.
        columns: further columns, by name: values of shape (N,), by which a natural partition can divide the examples.
        test_columns: the same for the official test set.
        class_names: names of the classes.
        **kwargs: see :class:`FederatedDataModule`.
    """

    def __init__(
        self,
        images: Given,
        labels: Array,
        num_classes: PositiveInt | None = None,
        test_images: Given | None = None,
        test_labels: Array | None = None,
        columns: Mapping[str, ArrayLike] | None = None,
        test_columns: Mapping[str, ArrayLike] | None = None,
        class_names: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        inputs, targets = checked_inputs(images, "images"), as_labels(labels, "labels")
        self._pools: Pools = (
            inputs,
            targets,
            take(inputs, slice(0)) if test_images is None else checked_inputs(test_images, "test_images"),
            targets[:0] if test_labels is None else as_labels(test_labels, "test_labels"),
        )
        if num_classes is None:
            most = max((int(of_set.max()) for of_set in (self._pools[1], self._pools[3]) if len(of_set)), default=0)
            num_classes = most + 1 if class_names is None else len(class_names)
        self.num_classes: int = num_classes
        if class_names is not None:  # otherwise the class may have names
            self.class_names = class_names
        refuse_doubles(class_names or (), "class_names")
        require(
            class_names is None or len(class_names) == num_classes,
            f"Got {len(class_names or ())} class_names and num_classes={num_classes}: give a name per class.",
        )
        known, known_of_tests = ({name: np.asarray(v) for name, v in (of_set or {}).items()} for of_set in (columns, test_columns))
        for name, values in (*known.items(), *known_of_tests.items()):
            require(values.ndim == 1, f"The column {name!r} has the shape {values.shape}: give one value per example, shape (N,).")
        self._columns = {
            name: np.concatenate([values, known_of_tests[name]]) if name in known_of_tests else values
            for name, values in known.items()
        }

    def load(self) -> Pools:
        return self._pools

    def column(self, name: str) -> NDArray[Any]:
        return pick_column(type(self).__name__, self._columns, name)


class Digits(FederatedDataModule):
    """1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn; no download, no official test set.

    Args:
        image_size: height and width to which the images are resized, bilinearly.
        **kwargs: see :class:`FederatedDataModule`.
    """

    num_classes = 10
    class_names = tuple("0123456789")
    mean = (0.3055,) * 3
    std = (0.3235,) * 3

    def __init__(self, image_size: PositiveInt = 32, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.image_size: int = image_size

    def load(self) -> Pools:
        """The digits as colour images; an empty test set."""
        from sklearn.datasets import load_digits

        digits = load_digits()
        gray = torch.from_numpy(digits.images * (255 / 16)).round().to(torch.uint8)
        return pools_of(resize(gray[:, None], self.image_size), torch.from_numpy(digits.target))


class ImageFiles(FederatedDataModule):
    """A dataset of torchvision, read from its own files, from Parquet files or from the Hugging Face hub.

    A subclass sets ``torchvision_name`` and the columns of the labels in Parquet files.

    Args:
        root: folder with torchvision's files, or with Parquet files whose names contain ``train`` and ``test`` (columns
            ``img`` or ``image``, and ``label`` or ``fine_label``), or ``hf://owner/name``.
        download: whether to download what torchvision offers into ``root``.
        image_size: height and width to which the images are resized, bilinearly.
        portion: part of the training set to use, from start to end in the order of the files; (0.5, 1) is its second half. The
            first may have been used for something else, such as pretraining.
        mean: subtracted from the pixels in [0, 1], per channel or one number for all. Default: the dataset's mean.
        std: divisor of the pixels afterwards. Default: the dataset's standard deviation.
        **kwargs: see :class:`FederatedDataModule`.
    """

    torchvision_name: str
    label_columns: tuple[str, ...] = ("label",)

    def __init__(
        self,
        root: str,
        download: bool = False,
        image_size: PositiveInt = 32,
        portion: tuple[ClosedUnitInterval, ClosedUnitInterval] = (0, 1),
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        begin, end = portion
        require(0 <= begin < end <= 1, f"Got portion={portion}: give where it begins and where it ends, between 0 and 1.")
        require_from(1, image_size=image_size)
        self.root = root
        self.download = download
        self.image_size: int = image_size
        self.portion = portion
        self.mean, self.std = self._levels("mean", mean), self._levels("std", std)
        require(min(self.std) > 0, f"Got std={list(self.std)}: give numbers above 0.")

    def prepare_data(self) -> None:
        if not self.download:
            return
        try:
            self._torchvision(download=True)
        except (OSError, RuntimeError) as error:
            raise FederationError(
                f"Could not download {self.torchvision_name} to {self.root} ({error}): check the network and the "
                "folder, or set --data.init_args.root to where the files are."
            ) from error

    def load(self) -> Pools:
        """Both sets as colour images."""
        if self.root.startswith("hf://"):
            train, test, self.class_names = parquet.from_hub(self.root.removeprefix("hf://"), self.label_columns)
        elif files := parquet.find(self.root):
            train, test, self.class_names = parquet.from_files(files, self.label_columns)
        else:
            try:
                train, test = self._torchvision(download=False)
            except RuntimeError as error:
                raise FederationError(
                    f"Found no {self.torchvision_name} in {Path(self.root).expanduser().absolute()}. Looked for "
                    f"torchvision's files ({error}) and for parquet files with train and test in their names. Set "
                    "--data.init_args.root to the folder that has them, or --data.init_args.download true."
                ) from error
        used = slice(*(round(share * len(train[1])) for share in self.portion))
        return resize(train[0][used], self.image_size), train[1][used], resize(test[0], self.image_size), test[1]

    def _levels(self, name: str, given: Sequence[float] | None) -> tuple[float, ...]:
        """A number per channel; by default the class's."""
        own: tuple[float, ...] = getattr(type(self), name)
        if given is None:
            return own
        require(len(given) in (1, len(own)), f"Got {name}={list(given)}: give 1 number or {len(own)}, one per channel.")
        return tuple(given) if len(given) == len(own) else tuple(given) * len(own)

    def _torchvision(self, download: bool) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        import torchvision

        dataset = getattr(torchvision.datasets, self.torchvision_name)
        train, test = (dataset(self.root, train=part, download=download) for part in (True, False))
        self.class_names = list(train.classes)
        return _tensors(train), _tensors(test)


class GreyImageFiles(ImageFiles):
    """Grey images of 28 x 28 pixels, also for networks that take colour images.

    Args:
        channels: 3 equal ones, or the 1 of the images.
        **kwargs: see :class:`ImageFiles`. ``image_size: 28`` keeps the images' size.
    """

    def __init__(self, root: str, channels: Literal[1, 3] = 3, **kwargs: Any) -> None:
        super().__init__(root, **kwargs)
        require(channels in (1, 3), f"Got channels={channels}: give 1 or 3.")
        self.channels: Literal[1, 3] = channels
        self.mean, self.std = self.mean[:channels], self.std[:channels]

    def load(self) -> Pools:
        images, labels, test_images, test_labels = super().load()
        assert isinstance(images, Tensor)
        assert isinstance(test_images, Tensor)
        return images[:, : self.channels], labels, test_images[:, : self.channels], test_labels


class MNIST(GreyImageFiles):
    """70,000 grey images of handwritten digits (LeCun et al., 1998)."""

    num_classes = 10
    mean = (0.1307,) * 3
    std = (0.3081,) * 3
    torchvision_name = "MNIST"


class FashionMNIST(GreyImageFiles):
    """70,000 grey images of clothes (Xiao et al., 2017)."""

    num_classes = 10
    mean = (0.2860,) * 3
    std = (0.3530,) * 3
    torchvision_name = "FashionMNIST"


class CIFAR10(ImageFiles):
    """60,000 photos of 10 kinds of things (Krizhevsky, 2009)."""

    num_classes = 10
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2470, 0.2435, 0.2616)
    torchvision_name = "CIFAR10"


class CIFAR100(ImageFiles):
    """60,000 photos of 100 kinds of things (Krizhevsky, 2009)."""

    num_classes = 100
    mean = (0.5071, 0.4865, 0.4409)
    std = (0.2673, 0.2564, 0.2762)
    torchvision_name = "CIFAR100"
    label_columns = ("fine_label", "label")


def resize(images: Tensor, size: int) -> Tensor:
    """Bilinear (antialiased when shrinking) to ``size`` by ``size`` pixels and three channels; uint8 stays uint8."""
    if images.shape[-2:] != (size, size):
        try:
            images = interpolate(images, (size, size), mode="bilinear", antialias=True)
        except RuntimeError as error:  # not enough memory, or too many pixels to count
            raise FederationError(
                f"image_size is {size}, but {len(images)} images of that size cannot be made: {error_text(error)}"
            ) from error
    return images.expand(-1, 3, -1, -1)


def _tensors(dataset: Any) -> tuple[Tensor, Tensor]:
    """Raw images of a torchvision dataset, channels first, and labels."""
    images = torch.as_tensor(dataset.data)
    images = images[:, None] if images.ndim == 3 else images.permute(0, 3, 1, 2)
    return images.contiguous(), torch.as_tensor(dataset.targets)
