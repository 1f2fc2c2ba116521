"""The data of a federation: many clients that share one copy in memory."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args
from zlib import crc32

import lightning as L
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_fed.data.batches import EXAMPLE, Batch, BatchTransform, Inputs, SharedTensors, SingleExample, count, join, take
from lightning_fed.data.checked import check_labels, checked_pools, refuse_no_numbers
from lightning_fed.data.checksum import checksum_of
from lightning_fed.data.client import ClientDataModule, refuse_overfitting
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.data.partition.base import ClassesPerClient, Partitioner
from lightning_fed.data.public import PublicShare, as_of_clients, numbered
from lightning_fed.data.split import TEST, TRAIN, VAL, Shares, Split, deal, divide_by_name, limited, union
from lightning_fed.errors import FederationError, require
from lightning_fed.options import AnySeed, ClosedUnitInterval, PositiveInt, require_from
from lightning_fed.tasks.task import TaskName

NUM_CLIENTS = 10
"""Default number of clients that examples are dealt to."""

Pools = tuple[Inputs, Tensor, Inputs, Tensor]
"""Training images and labels, test images and labels. Instead of images: named inputs of a network."""


def pools_of(inputs: Inputs, labels: Tensor, num_train: int | None = None) -> Pools:
    """Split examples into the first ``num_train`` for training and the others for test. None: all are for training."""
    train, test = slice(num_train), slice(len(labels) if num_train is None else num_train, None)
    return take(inputs, train), labels[train], take(inputs, test), labels[test]


class FederatedDataModule(L.LightningDataModule):
    """The data of a federation. A dataset overrides :meth:`load` and sets ``num_classes``, ``mean`` and ``std``.

    :meth:`setup` loads the data, at the latest when they are first needed. Used as a datamodule itself, it holds the pooled data of
    all clients: ``L.Trainer().fit(module, data)`` trains the centralized reference.

    Args:
        num_clients: number of clients that examples are dealt to; None: 10. With a natural partition (:class:`ByColumn`) the
            clients are those of the data: None takes all, a number draws that many.
        partition: how examples are divided among clients. Default: two classes per client.
        batch_size: batch size for training.
        eval_batch_size: batch size for validation and test.
        split: ``pooled`` joins training and test set, partitions them and divides each client's part by shares (8:1:1
            by default, as in the text of pFedLoRA). ``official`` partitions both sets in the same way and holds out validation
            examples from the training part (as in the code of pFedLoRA, where ``val_share`` is 0.2, and of FedDecomp,
            where it is 0), unless the data have their own validation set.
        val_share: share of a client's examples (``official``: of its training part) held out for validation. If clients share
            examples, it is the share of the whole training set, so that no client trains on another's validation examples.
        test_share: share of a client's examples held out for test, 0.1 if not given; for ``pooled`` only.
        augment: augmentation of training batches of byte images: none, or a random crop after padding by 4 pixels and random
            horizontal flips.
        single_example: what to do with an example that would be alone in a client's last training batch, which batch norm cannot
            train on: ``join`` adds it to the previous batch, ``drop`` leaves it out of the epoch, ``keep`` makes it a batch.
        continue_epochs: whether a client's next turn continues with the batch after its last one, also in the middle of an epoch:
            with ``steps``, no example is used a second time before all others (FLamby's and FedJAX's convention). Otherwise each
            turn starts with a new order. Lost turns do not count. For methods whose turns are all of one length: FedALA and FedAS
            refuse it.
        limit_examples: maximum number of a client's training, validation and test examples each, drawn by the partition's seed, for
            quick tests. None: all.
        public: inputs that belong to no client, for methods that distill on them: the training inputs of other data, converted to
            the clients' form (images of their size and channels, normalized in the same way), or a share of the training set that
            no client gets. Their labels are not used.
        seed: seed of the partition and the split, and of the order of batches outside a federation.
        partition_seed: seed of the partition and the split only: the clients' examples, the public ones, and each client's
            validation and test examples. None: ``seed``. Runs with the same value have the same clients.
    """

    if TYPE_CHECKING:
        num_classes: int
    else:  # classes set it, or objects once they have found their classes

        @cached_property
        def num_classes(self) -> int:
            """Number of classes, or of predicted labels or numbers."""
            raise FederationError(f"{type(self).__name__} has no num_classes: set it in the class, as in num_classes = 10.")

    class_names: Sequence[str] | None = None
    """Names of the classes, in the order of their numbers; None if the data have none, and before they are loaded."""

    client_names: Sequence[str] | None = None
    """Names of the clients in the data, in the order of their ids, once loaded; None if examples are dealt."""

    predicts_labels = True
    """Whether the labels by which the data are partitioned are also the targets. If not, the inputs hold the targets, see
    :data:`lightning_fed.data.batches.TARGETS`, and labels say what an example is about (its topic, for example).
    """

    problem: TaskName = "multiclass"
    """What is predicted: one class of several, any number of labels, or numbers; see :mod:`lightning_fed.tasks`. For labels and
    numbers, the inputs hold the targets, and ``num_classes`` is their number.
    """

    at_hand = True
    """Whether examples are available in this process; False if they stay at clients' sites."""

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __init__(
        self,
        num_clients: PositiveInt | None = None,
        partition: Partitioner | None = None,
        batch_size: PositiveInt = 64,
        eval_batch_size: PositiveInt = 512,
        split: Literal["pooled", "official"] = "pooled",
        val_share: ClosedUnitInterval = 0.1,
        test_share: ClosedUnitInterval | None = None,
        augment: Literal["none", "crop_flip"] = "none",
        single_example: SingleExample = "join",
        continue_epochs: bool = False,
        limit_examples: PositiveInt | None = None,
        public: "FederatedDataModule | PublicShare | None" = None,
        seed: AnySeed = 0,
        partition_seed: AnySeed | None = None,
    ) -> None:
        super().__init__()
        self.given_num_clients: int | None = num_clients
        self.partition: Partitioner = ClassesPerClient(2) if partition is None else partition
        self.batch_size: int = batch_size
        self.eval_batch_size: int = eval_batch_size
        self.split: Literal["pooled", "official"] = split
        self.val_share: float = val_share
        self.test_share: float | None = 0.1 if test_share is None and split == "pooled" else test_share
        self.augment: Literal["none", "crop_flip"] = augment
        self.single_example: SingleExample = single_example
        self.continue_epochs: bool = continue_epochs
        self.limit_examples: int | None = limit_examples
        self.public: FederatedDataModule | PublicShare | None = public
        self.seed: int = seed
        self.partition_seed: int = seed if partition_seed is None else partition_seed
        check_options(self)
        self._data: SharedTensors | None = None
        self._public: tuple[SharedTensors, Tensor] | None = None  # numbered inputs, and which of them are public
        self._splits: list[Split] = []
        self.row_groups: NDArray[np.int64] | None = None
        self._clients: list[ClientInfo] = []
        self._given: int | None = None  # checksum of the inputs, if they were changed after they were read
        self._unseen: frozenset[int] = frozenset()
        self._flipped: frozenset[int] = frozenset()
        self._wrong: SharedTensors | None = None  # the data with the labels of :meth:`flip_labels`

    def load(self) -> Pools:
        """Training images and labels, test images and labels. The test tensors may be empty.

        Images of type uint8 and shape (N, C, H, W) are normalized and augmented; other tensors are passed to the module unchanged.
        Instead of images there may be tensors by their names in the network; with an ``attention_mask``, a batch is cut to its
        longest text. With :data:`lightning_fed.data.batches.EXAMPLE`, rows of the same example stay together; examples are numbered
        from 0, those of the test set after all others. Images that do not fit into memory are
        :class:`lightning_fed.data.LazyInputs`.
        """
        raise NotImplementedError(f"{type(self).__name__} must override load().")

    def prepare(self, inputs: Inputs, splits: Sequence[Split]) -> Inputs:
        """Transform the inputs after they are divided among clients, for example by a scale of the training examples. Default:
        unchanged.

        Args:
            inputs: inputs of all examples, those of the training set first.
            splits: positions of each client's examples.
        """
        return inputs

    def column(self, name: str) -> NDArray[Any]:
        """Further information about each example, by name, such as its user, for natural partitions. Default: no columns.

        Returns:
            Shape (N,), a value for each example of the training set, then for each of the test set.

        Raises:
            FederationError: if there is no such column; names the existing ones.
        """
        raise FederationError(
            f"{type(self).__name__} has no columns, so {name!r} cannot say which client an example belongs to: choose a "
            "partition that deals examples to clients, such as IID, or override column()."
        )

    def validation(self) -> NDArray[np.bool_] | None:
        """Mask of the training examples that form the data's own validation set. Default: none."""
        return None

    def find_groups(self, inputs: Inputs) -> NDArray[np.int64] | None:
        """The number of the example that each row belongs to, shape (N,), from 0, those of the test set after all others. All rows
        of an example are one client's, and in one of its parts. None: every row is an example. Default: :data:`.EXAMPLE` of the
        inputs.
        """
        return inputs[EXAMPLE].numpy() if isinstance(inputs, dict) and EXAMPLE in inputs else None

    def given_places(self, examples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places of examples in the data as they were given: rows of the files, one file after the other. Default: unchanged.

        Args:
            examples: positions among all examples, those of the training set first.
        """
        return examples

    # ------------------------------------------------------------------------------------------------ for a federation

    def setup(self, stage: str | None = None) -> None:
        """Load and partition the data, once. See also :func:`.refuse_overfitting`."""
        refuse_overfitting(self.trainer, stage)
        if self._data is None:
            self._set_up()

    def _set_up(self) -> None:
        train_images, train_labels, test_images, test_labels = checked_pools(self.load(), type(self).__name__)
        labels = torch.cat([train_labels, test_labels])
        check_labels(type(self).__name__, self.num_labels, count(train_images) + count(test_images), labels)
        images = join(train_images, test_images) if count(test_images) else train_images
        groups, num_train = labels.numpy(), len(train_labels)  # one group per example
        self.row_groups = example = self.find_groups(images)
        if example is not None:
            groups, num_train = groups[np.unique(example, return_index=True)[1]], len(np.unique(example[:num_train]))
        aside = self.public.drawn(num_train, self.partition_seed) if isinstance(self.public, PublicShare) else np.arange(0)
        splits = self._divided(groups, num_train, np.setdiff1d(np.arange(len(groups)), aside))
        if self.limit_examples is not None:
            splits = limited(splits, self.limit_examples, self.partition_seed)
        if example is not None:  # an example may have several rows
            splits = [Split(*(np.flatnonzero(np.isin(example, part)) for part in split)) for split in splits]
        self._splits = splits
        given, images = images, self.prepare(images, splits)
        self._given = None if images is given else checksum_of(given)
        refuse_no_numbers(images)
        self._transform().check(images)
        self._data = SharedTensors(images, labels)
        if self.public is not None:
            others = None if isinstance(self.public, PublicShare) else self._load_public(images)
            if others is not None:
                aside = np.arange(count(others))
            elif example is not None:
                aside = np.flatnonzero(np.isin(example, aside))
            self._public = numbered(images if others is None else others, aside), torch.from_numpy(aside)
        self._clients = [self._describe(client, split, labels) for client, split in enumerate(self._splits)]

    @property
    def num_clients(self) -> int:
        """Number of clients. With a natural partition, this loads the data."""
        if not self.partition.is_natural:
            return self.given_num_clients or NUM_CLIENTS
        if not self._splits:
            self._loaded()
        return len(self._splits)

    @property
    def input_shape(self) -> tuple[int, ...] | None:
        """Shape of one input of a network; None for several named inputs, or if the data are not available here."""
        return self._loaded().input_shape if self.at_hand else None

    @property
    def clients(self) -> list[ClientInfo]:
        """Information about each client, in order of their ids."""
        self._loaded()
        return list(self._clients)

    def client(self, client: int) -> ClientDataModule:
        """The data of one client; images are shared, not copied."""
        self._loaded()
        last = len(self._clients) - 1
        require(0 <= client <= last, f"There is no client {client}: ids go from 0 to {last}.")
        data = self._datamodule(self._clients[client], self._splits[client])
        if client in self._flipped:
            if self._wrong is None:
                self._wrong = SharedTensors(data.data.images, self.num_classes - 1 - data.data.labels)
            data.data = self._wrong
        return data

    def pooled(self) -> ClientDataModule:
        """The data of all clients, without duplicates and without those that are :meth:`set_aside`, as a client with id -1. An
        example that is test data of any client is training data of none here.
        """
        labels = self._loaded().labels
        split = union([split for client, split in enumerate(self._splits) if client not in self._unseen])
        return self._datamodule(self._describe(-1, split, labels), split)

    def set_aside(self, unseen: Collection[int]) -> None:
        """Exclude clients that never take part in training from :meth:`pooled`; called by each run.

        Args:
            unseen: their ids; empty: all clients are pooled.
        """
        self._unseen = frozenset(unseen)

    def flip_labels(self, clients: Collection[int]) -> None:
        """Give some clients wrong labels, :math:`C - 1 - y`, and the counts of these, as an attack; called by each run.

        Args:
            clients: their ids; empty: none.

        Raises:
            FederationError: if labels are not the targets.
        """
        require(
            not clients or (self.predicts_labels and self.problem == "multiclass"),
            f"LabelFlip needs data whose labels are classes, which {type(self).__name__}'s are not: choose another attack.",
        )
        if changed := self._flipped ^ frozenset(clients):
            self._loaded()
            for client in changed:
                info = self._clients[client]
                self._clients[client] = replace(info, label_counts=info.label_counts[::-1])
        self._flipped, self._wrong = frozenset(clients), None

    def public_set(self, batch_size: int | None = None, examples: Tensor | None = None) -> ClientDataModule:
        """The public data as the training data of id -1. Batches hold the numbers of the examples, from 0, in place of labels. The
        validation and test data are the pooled ones of the clients.

        Args:
            batch_size: batch size for training. None: the clients'.
            examples: numbers of the wanted examples. None: all.

        Raises:
            FederationError: if there are no public data.
        """
        self._loaded()
        if self._public is None:
            raise FederationError(
                "The method needs public data, and there are none: set data.init_args.public to other data (class_path: CIFAR100), "
                "or to a share of the training set ({share: 0.1})."
            )
        data, rows = self._public
        rows = rows if examples is None else rows[examples.long()]
        held_out, splits, size = self.pooled(), (rows, rows[:0], rows[:0]), batch_size or self.batch_size
        info = replace(held_out.info, num_train=len(rows), label_counts=())
        own = replace(held_out, info=info, data=data, splits=splits, batch_size=size, score=None, problem=None)
        return replace(own, held_out=held_out)

    @property
    def num_labels(self) -> int:
        """Number of labels to partition by. Default: the number of classes."""
        return self.num_classes

    def score(self, answers: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
        """Scores of generated texts, by name.

        Args:
            answers: for each batch, the numbers of its examples, ``(B,)``, and what the network's ``predict`` returned for them,
                ``(B, …)``.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot score generated texts: it must override score().")

    def label_counts(self) -> Tensor:
        """Number of training examples of each client and label, shape (num_clients, num_labels); of wrong labels, if the client has
        them.
        """
        return torch.tensor([client.label_counts for client in self.clients])

    def majority_accuracy(self) -> Tensor | None:
        """Test accuracy of each client if it always predicts its most frequent training label (ties, and no examples: the
        smallest), without wrong labels. None if labels are not the targets.
        """
        if not self.predicts_labels:
            return None
        labels = self._loaded().labels
        counts, wrong = self.label_counts(), list(self._flipped)
        counts[wrong] = counts[wrong].flip(1)
        guesses = counts.argmax(dim=1)
        tests = [labels[torch.from_numpy(split.test)] for split in self._splits]
        return torch.stack([(test == guess).float().mean() for test, guess in zip(tests, guesses, strict=True)])

    def fingerprint(self) -> str:
        """Checksum of inputs, labels, splits and unseen clients: a run only continues with the data it started with. Inputs count
        as they were read, since standardized ones depend on the machine. Of very large ones, a part counts:
        :func:`.checksum_of`, :meth:`.LazyInputs.checksum`.
        """
        own = self._loaded()
        checksum = crc32(own.labels.numpy().tobytes())
        checksum = crc32(str(checksum_of(own.images) if self._given is None else self._given).encode(), checksum)
        for split in self._splits:
            for part in split:
                checksum = crc32(part.tobytes(), crc32(str(len(part)).encode(), checksum))
        if self._public is not None:
            data, rows = self._public
            checksum = crc32(rows.numpy().tobytes(), checksum)
            checksum = checksum if isinstance(self.public, PublicShare) else checksum_of(data.images, checksum)
        if self._unseen:
            checksum = crc32(str(sorted(self._unseen)).encode(), checksum)
        return f"{checksum:08x}"

    # ----------------------------------------------------------------------------------------------- as one datamodule

    def train_dataloader(self) -> DataLoader[Batch]:
        return self.pooled().train_dataloader()

    def val_dataloader(self) -> DataLoader[Batch] | list[Batch]:
        return self.pooled().val_dataloader()

    def test_dataloader(self) -> DataLoader[Batch] | list[Batch]:
        """The test data of :meth:`pooled`, which are the server's."""
        return self.pooled().test_dataloader()

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Any:
        """Normalize and, in training, augment on the device."""
        return self._transform()(batch, self.trainer)

    # ------------------------------------------------------------------------------------------------------- internals

    def _loaded(self) -> SharedTensors:
        if self._data is None:
            self.prepare_data()
            self.setup()
        assert self._data is not None
        return self._data

    def _load_public(self, own: Inputs) -> Inputs:
        """The inputs of the public data, in the form of the clients' inputs."""
        assert isinstance(self.public, FederatedDataModule)
        self.public.prepare_data()
        name = type(self.public).__name__
        require(
            self._given is None,
            f"{name} cannot be public data for these clients, whose inputs were changed after they were read, for example "
            "standardized: take a share of the clients' own data (public: {share: 0.1}).",
        )
        inputs, *_ = checked_pools(self.public.load(), name)
        inputs = as_of_clients(inputs, own, name)
        refuse_no_numbers(inputs, f"the public {name}")
        return inputs

    def _divided(self, groups: NDArray[np.int64], num_train: int, owned: NDArray[np.int64]) -> list[Split]:
        """Divide the examples at the positions ``owned``, sorted, among the clients. ``groups`` has the label of each example,
        those of the training set first.
        """
        roles = None
        if self.split == "official":
            require(num_train < len(groups), f"{type(self).__name__} has no official test set: set split to pooled.")
            roles = np.repeat([TRAIN, TEST], [num_train, len(groups) - num_train])
            if (validation := self.validation()) is not None:
                roles[:num_train][validation] = VAL
            roles = roles[owned]
        shares, holders = Shares(self.val_share, self.test_share or 0.0), self.partition.holders(self.column)
        if holders is None:
            num_clients = self.given_num_clients or NUM_CLIENTS
            splits = deal(groups[owned], roles, shares, self.partition, num_clients, self.partition_seed)
        else:
            require(
                len(holders) == len(groups),
                f"{type(self.partition).__name__} assigns {len(holders)} examples to clients, but there are {len(groups)}: "
                "give one name per example.",
            )
            given = self.partition, self.given_num_clients, self.partition_seed
            self.client_names, splits = divide_by_name(holders[owned], roles, shares, *given)
        return [Split(*(owned[part] for part in split)) for split in splits]

    def _transform(self) -> BatchTransform:
        return BatchTransform(self.mean, self.std, self.augment)

    def _datamodule(self, info: ClientInfo, split: Split) -> ClientDataModule:
        train, val, test = map(torch.from_numpy, split)
        return ClientDataModule(
            info,
            self._loaded(),
            (train, val, test),
            self._transform(),
            self.batch_size,
            self.eval_batch_size,
            order_seed=self.seed,
            score=self.score,
            single_example=self.single_example,
            num_classes=self.num_classes,
            problem=self.problem,
        )

    def _describe(self, client: int, split: Split, labels: Tensor) -> ClientInfo:
        counts = np.bincount(labels.numpy()[split.train], minlength=self.num_labels)
        sizes = len(split.train), len(split.val), len(split.test)
        num_public = 0 if self._public is None else len(self._public[1])
        return ClientInfo(client, *sizes, tuple(counts.tolist()), num_clients=self.num_clients, num_public=num_public)


def check_options(data: FederatedDataModule) -> None:
    """Refuse invalid values, as the types of the command line do, and options that contradict each other."""
    at_least_one = {name: getattr(data, name) for name in ("batch_size", "eval_batch_size", "limit_examples")}
    require_from(1, num_clients=data.given_num_clients, **at_least_one)
    require_from(0, seed=data.seed, partition_seed=data.partition_seed)
    choices = {"split": ("pooled", "official"), "augment": ("none", "crop_flip"), "single_example": get_args(SingleExample)}
    for name, known in choices.items():
        value = getattr(data, name)
        require(value in known, f"Got {name}={value!r}: give one of {', '.join(known)}.")
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
