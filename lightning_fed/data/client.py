"""One client's data, a datamodule like any other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_fed.data.batches import Batch, BatchTransform, SharedTensors, SingleExample
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.tasks.task import TaskName


@dataclass(eq=False, repr=False)
class ClientDataModule(L.LightningDataModule):
    """The train, validation and test data of one client: ``L.Trainer().fit(module, data.client(0))`` works.

    Args:
        info: id and sizes.
        data: the tensors all clients share.
        splits: indices of the train, validation and test examples.
        transform: what each batch goes through.
        batch_size: of training.
        eval_batch_size: of validation and test.
        order_seed: seed of the order of training batches; may be set between fits.
        score: see :meth:`lightning_fed.data.FederatedDataModule.score`; None where no texts are answered.
        single_example: see :class:`lightning_fed.data.FederatedDataModule`.
        num_classes: see :class:`lightning_fed.data.FederatedDataModule`; None: it is not known.
        problem: see :class:`lightning_fed.data.FederatedDataModule`; None: it is not known.
        poisson: whether a training batch has each example with probability ``batch_size`` / n, independently of the others, which
            privacy of examples needs; may be set between fits.
        start: how many batches of training were played before, where they go on; may be set between fits. None: each epoch has a
            new order. See ``continue_epochs`` of :class:`lightning_fed.data.FederatedDataModule`.
    """

    info: ClientInfo
    data: SharedTensors
    splits: tuple[Tensor, Tensor, Tensor]
    transform: BatchTransform
    batch_size: int
    eval_batch_size: int
    order_seed: int
    score: Callable[[Sequence[tuple[Tensor, Tensor]]], dict[str, float]] | None = None
    single_example: SingleExample = "join"
    num_classes: int | None = None
    problem: TaskName | None = None
    start: int | None = None
    poisson: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    @property
    def input_shape(self) -> tuple[int, ...] | None:
        """See :attr:`lightning_fed.data.FederatedDataModule.input_shape`."""
        return self.data.input_shape

    def train_dataloader(self) -> DataLoader[Batch]:
        """Shuffled batches; a fit's epoch ``e`` has the order of (``order_seed``, ``e``)."""
        if self.poisson:
            return self.data.sampled(self.splits[0], self.batch_size, self.order_seed)
        return self.data.shuffled(self.splits[0], self.batch_size, self.order_seed, self.single_example, self.start)

    def val_dataloader(self) -> DataLoader[Batch] | list[Batch]:
        """Batches in order; an empty list where nothing is held out."""
        return self.data.in_order(self.splits[1], self.eval_batch_size)

    def test_dataloader(self) -> DataLoader[Batch] | list[Batch]:
        return self.data.in_order(self.splits[2], self.eval_batch_size)

    def predict_dataloader(self) -> DataLoader[Batch] | list[Batch]:
        """The training examples in order, not augmented, in batches as in training: what statistics are gathered on."""
        return self.data.in_order(self.splits[0], self.batch_size, no_single=True)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Any:
        """Normalise and, in training, augment on the device."""
        return self.transform(batch, self.trainer)


class PublicDataModule(ClientDataModule):
    """Examples of nobody's to train on, with their numbers in place of labels, and everybody's to validate and test on.

    Args:
        held_out: everybody's data.
        data: the public inputs, numbered.
        rows: which of them there are.
        batch_size: of training.
    """

    def __init__(self, held_out: ClientDataModule, data: SharedTensors, rows: Tensor, batch_size: int) -> None:
        super().__init__(
            replace(held_out.info, num_train=len(rows), label_counts=()),
            data,
            (rows, rows[:0], rows[:0]),
            held_out.transform,
            batch_size,
            held_out.eval_batch_size,
            held_out.order_seed,
            single_example=held_out.single_example,
            num_classes=held_out.num_classes,
        )
        self.held_out = held_out

    def val_dataloader(self) -> DataLoader[Batch] | list[Batch]:
        return self.held_out.val_dataloader()

    def test_dataloader(self) -> DataLoader[Batch] | list[Batch]:
        return self.held_out.test_dataloader()
