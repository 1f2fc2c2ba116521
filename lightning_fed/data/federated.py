"""A federation's data: many clients that share one copy."""

from collections.abc import Sequence
from typing import Any, Literal
from zlib import crc32

import lightning as L
import numpy as np
import torch
from jsonargparse.typing import ClosedUnitInterval, NonNegativeInt, PositiveInt
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_fed.data.batches import EXAMPLE, Batch, BatchTransform, Inputs, SharedTensors, count, join
from lightning_fed.data.client import ClientDataModule
from lightning_fed.data.partition.base import ClassesPerClient, Partitioner
from lightning_fed.data.split import Split, rows_of, split_official, split_pooled, union
from lightning_fed.errors import require
from lightning_fed.exchange import ClientInfo
from lightning_fed.tasks import TaskName

Pools = tuple[Inputs, Tensor, Inputs, Tensor]
"""Training images and labels, test images and labels. Instead of images: inputs that a network takes by name."""


class FederatedDataModule(L.LightningDataModule):
    """Data of a federation. A dataset overrides :meth:`load` and sets ``num_classes``, ``mean`` and ``std``.

    The data are loaded by :meth:`setup`, at the latest when they are first asked for. As a datamodule of its own it is
    everybody's data pooled: ``L.Trainer().fit(module, data)`` trains the centralised reference.

    Args:
        num_clients: number of clients.
        partition: who holds what; default, two classes per client.
        batch_size: of training.
        eval_batch_size: of validation and test.
        split: ``pooled`` joins training and test set, partitions them and divides each client's part by shares (8:1:1
            by default, as in the text of pFedLoRA). ``official`` partitions both sets alike and holds out validation
            examples of the training part (as in the code of pFedLoRA, where ``val_share`` is 0.2, and of FedDecomp,
            where it is 0).
        val_share: share of a client's examples (official: of its training part) held out for validation.
        test_share: share of a client's examples held out for test, 0.1 if not given; for ``pooled`` only.
        augment: what training batches go through: nothing, or a random crop after padding by 4 pixels and a random
            mirroring.
        seed: of the partition and the split, and of the order of batches outside a federation.
    """

    num_classes: int

    predicts_labels = True
    """Whether the labels by which the data are partitioned are also what is predicted. If not, the inputs have the targets, see
    :data:`lightning_fed.data.batches.TARGETS`, and labels say what an example is about (its topic, say).
    """

    problem: TaskName = "multiclass"
    """What is predicted: one class of several, any number of labels, or numbers; see :mod:`lightning_fed.tasks`. Labels or numbers
    are the inputs' targets, and ``num_classes`` says how many there are.
    """

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __init__(
        self,
        num_clients: PositiveInt = 10,
        partition: Partitioner | None = None,
        batch_size: PositiveInt = 64,
        eval_batch_size: PositiveInt = 512,
        split: Literal["pooled", "official"] = "pooled",
        val_share: ClosedUnitInterval = 0.1,
        test_share: ClosedUnitInterval | None = None,
        augment: Literal["none", "crop_flip"] = "none",
        seed: NonNegativeInt = 0,
    ) -> None:
        super().__init__()
        self.num_clients: int = num_clients
        self.partition: Partitioner = ClassesPerClient(2) if partition is None else partition
        self.batch_size: int = batch_size
        self.eval_batch_size: int = eval_batch_size
        self.split: Literal["pooled", "official"] = split
        self.val_share: float = val_share
        self.test_share: float | None = 0.1 if test_share is None and split == "pooled" else test_share
        self.augment: Literal["none", "crop_flip"] = augment
        self.seed: int = seed
        check_options(self)
        self._data: SharedTensors | None = None
        self._splits: list[Split] = []
        self._clients: list[ClientInfo] = []

    def load(self) -> Pools:
        """Training images and labels, test images and labels. The test tensors may be empty.

        Images of type uint8 and shape (N, C, H, W) are normalised and augmented; other tensors reach the module as they
        are. Instead of images there may be tensors by the name by which the network takes them; where one of them is an
        ``attention_mask``, a batch is cut to its longest text. Where one is :data:`lightning_fed.data.batches.EXAMPLE`, rows of one
        example stay together; examples are numbered from 0, those of the test set after all others.
        """
        raise NotImplementedError(f"{type(self).__name__} must override load().")

    # ------------------------------------------------------------------------------------------------ for a federation

    def setup(self, stage: str | None = None) -> None:
        """Load and partition, once."""
        if self._data is not None:
            return
        train_images, train_labels, test_images, test_labels = self.load()
        labels = torch.cat([train_labels, test_labels]).long()
        check_labels(type(self).__name__, self.num_labels, count(train_images) + count(test_images), labels)
        images = join(train_images, test_images) if count(test_images) else train_images
        groups, num_train = labels.numpy(), len(train_labels)  # one per example, of which the training set has so many
        example = images[EXAMPLE].numpy() if isinstance(images, dict) and EXAMPLE in images else None
        if example is not None:
            groups, num_train = groups[np.unique(example, return_index=True)[1]], len(np.unique(example[:num_train]))
        if self.split == "official":
            require(len(test_labels) > 0, f"{type(self).__name__} has no official test set: set split to pooled.")
            pools = groups[:num_train], groups[num_train:]
            splits = split_official(*pools, self.partition, self.num_clients, self.seed, self.val_share)
        else:
            shares = (self.val_share, self.test_share or 0.0)
            splits = split_pooled(groups, self.partition, self.num_clients, self.seed, *shares)
        splits = splits if example is None else rows_of(splits, example)
        self._clients = [self._describe(client, split, labels) for client, split in enumerate(splits)]
        self._splits = splits
        self._data = SharedTensors(images, labels)

    @property
    def clients(self) -> list[ClientInfo]:
        """What is known about each client, in order of their ids."""
        self._loaded()
        return list(self._clients)

    def client(self, client: int) -> ClientDataModule:
        """The data of one client; the images are shared, not copied."""
        self._loaded()
        require(0 <= client < self.num_clients, f"There is no client {client}: ids go from 0 to {self.num_clients - 1}.")
        return self._datamodule(self._clients[client], self._splits[client])

    def pooled(self) -> ClientDataModule:
        """Everybody's data as one client with id -1, without duplicates: what anyone tests on, nobody trains on."""
        labels = self._loaded().labels
        split = union(self._splits)
        return self._datamodule(self._describe(-1, split, labels), split)

    @property
    def num_labels(self) -> int:
        """How many labels there are to partition by. Default: the classes."""
        return self.num_classes

    def score(self, answers: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
        """Scores of texts that a network answers with, by name.

        Args:
            answers: for each batch, the numbers of its examples, ``(B,)``, and what the network's ``predict`` gave for them,
                ``(B, …)``.
        """
        raise NotImplementedError(f"{type(self).__name__} has no texts to compare answers with: it must override score().")

    def label_counts(self) -> Tensor:
        """Training examples of each client and label, shape (num_clients, num_labels)."""
        return torch.tensor([client.label_counts for client in self.clients])

    def majority_accuracy(self) -> Tensor | None:
        """Test accuracy of each client if it always predicts its most frequent training label (ties: the smallest); None where
        labels are not what is predicted.
        """
        if not self.predicts_labels:
            return None
        labels = self._loaded().labels
        guesses = self.label_counts().argmax(dim=1)
        tests = [labels[torch.from_numpy(split.test)] for split in self._splits]
        return torch.stack([(test == guess).float().mean() for test, guess in zip(tests, guesses, strict=True)])

    def fingerprint(self) -> str:
        """Checksum of labels and splits: a run goes on only with the data it began with."""
        checksum = crc32(self._loaded().labels.numpy().tobytes())
        for split in self._splits:
            for part in split:
                checksum = crc32(part.tobytes(), crc32(str(len(part)).encode(), checksum))
        return f"{checksum:08x}"

    # ----------------------------------------------------------------------------------------------- as one datamodule

    def train_dataloader(self) -> DataLoader[Batch]:
        """See :meth:`pooled`."""
        return self.pooled().train_dataloader()

    def val_dataloader(self) -> DataLoader[Batch] | list[Batch]:
        """See :meth:`pooled`."""
        return self.pooled().val_dataloader()

    def test_dataloader(self) -> DataLoader[Batch] | list[Batch]:
        """See :meth:`pooled`; this is the server's test set."""
        return self.pooled().test_dataloader()

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Any:
        """Normalise and, in training, augment on the device."""
        return self._transform()(batch, self.trainer)

    # ------------------------------------------------------------------------------------------------------- internals

    def _loaded(self) -> SharedTensors:
        if self._data is None:
            self.prepare_data()
            self.setup()
        assert self._data is not None
        return self._data

    def _transform(self) -> BatchTransform:
        return BatchTransform(self.mean, self.std, self.augment)

    def _datamodule(self, info: ClientInfo, split: Split) -> ClientDataModule:
        train, val, test = map(torch.from_numpy, split)
        sizes = (self.batch_size, self.eval_batch_size)
        loaded, parts = self._loaded(), (train, val, test)
        return ClientDataModule(info, loaded, parts, self._transform(), *sizes, order_seed=self.seed, score=self.score)

    def _describe(self, client: int, split: Split, labels: Tensor) -> ClientInfo:
        counts = np.bincount(labels.numpy()[split.train], minlength=self.num_labels)
        return ClientInfo(client, len(split.train), len(split.val), len(split.test), tuple(counts.tolist()))


def check_options(data: FederatedDataModule) -> None:
    """Refuse what the command line's types would, and options that contradict each other."""
    for name in ("num_clients", "batch_size", "eval_batch_size"):
        require(getattr(data, name) >= 1, f"Got {name}={getattr(data, name)}: give a whole number from 1.")
    for name, known in (("split", ("pooled", "official")), ("augment", ("none", "crop_flip"))):
        value = getattr(data, name)
        require(value in known, f"Got {name}={value!r}: give one of {', '.join(known)}.")
    require(data.seed >= 0, f"Got seed={data.seed}: give a whole number from 0.")
    require(
        data.split == "pooled" or data.test_share is None,
        f"Got test_share={data.test_share} with split=official, which tests on the official test set: leave test_share "
        "out or set split to pooled.",
    )
    test_share = data.test_share or 0.0
    require(
        data.val_share >= 0 and (data.split == "official" or test_share > 0) and data.val_share + test_share < 1,
        f"Got val_share={data.val_share} and test_share={data.test_share}: give val_share from 0, test_share above 0, "
        "and together less than 1.",
    )


def check_labels(name: str, num_classes: int, num_images: int, labels: Tensor) -> None:
    """Refuse labels that do not fit the images or the number of classes."""
    require(len(labels) == num_images, f"Got {num_images} images and {len(labels)} labels: give one label per image.")
    require(num_images > 0, f"{name} has no images: give at least one per client.")
    low, high = int(labels.min()), int(labels.max())
    require(
        low >= 0 and high < num_classes,
        f"{name} has {num_classes} classes, so labels go from 0 to {num_classes - 1}, but got {low} to {high}: is this "
        "another dataset?",
    )
