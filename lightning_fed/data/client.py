"""The data of one client, as an ordinary datamodule."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_fed.data.batches import Batch, BatchTransform, SharedTensors, SingleExample
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.errors import FederationError
from lightning_fed.tasks.task import TaskName


@dataclass(eq=False, repr=False)
class ClientDataModule(L.LightningDataModule):
    """The train, validation and test data of one client: ``L.Trainer().fit(module, data.client(0))`` works.

    Args:
        info: id and sizes.
        data: the tensors that all clients share.
        splits: indices of the train, validation and test examples.
        transform: transform of each batch.
        batch_size: batch size for training.
        eval_batch_size: batch size for validation and test.
        order_seed: seed of the order of training batches; may be set between fits.
        score: see :meth:`lightning_fed.data.FederatedDataModule.score`. None: no texts are generated.
        single_example: see :class:`lightning_fed.data.FederatedDataModule`.
        num_classes: see :class:`lightning_fed.data.FederatedDataModule`. None: unknown.
        problem: see :class:`lightning_fed.data.FederatedDataModule`. None: unknown.
        poisson: whether training batches are Poisson samples, see :class:`.PoissonBatches`; may be set between fits.
        start: number of training batches used before, for batches that continue; may be set between fits. None: each epoch has a
            new order. See ``continue_epochs`` of :class:`lightning_fed.data.FederatedDataModule`.
        held_out: whose validation and test data are used instead; None: those of ``data``.
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
    held_out: "ClientDataModule | None" = None

    def __post_init__(self) -> None:
        super().__init__()

    @property
    def input_shape(self) -> tuple[int, ...] | None:
        """See :attr:`lightning_fed.data.FederatedDataModule.input_shape`."""
        return self.data.input_shape

    def setup(self, stage: str) -> None:
        """See :func:`refuse_overfitting`."""
        refuse_overfitting(self.trainer, stage)

    def train_dataloader(self) -> DataLoader[Batch]:
        """Shuffled batches; epoch ``e`` of a fit has the order of (``order_seed``, ``e``)."""
        if self.poisson:
            return self.data.sampled(self.splits[0], self.batch_size, self.order_seed)
        return self.data.shuffled(self.splits[0], self.batch_size, self.order_seed, self.single_example, self.start)

    def val_dataloader(self) -> DataLoader[Batch] | list[Batch]:
        """Batches in order; an empty list without validation examples."""
        own = self.held_out or self
        return own.data.in_order(own.splits[1], self.eval_batch_size)

    def test_dataloader(self) -> DataLoader[Batch] | list[Batch]:
        own = self.held_out or self
        return own.data.in_order(own.splits[2], self.eval_batch_size)

    def predict_dataloader(self) -> DataLoader[Batch] | list[Batch]:
        """The training examples in order and without augmentation, in training batches, to compute statistics."""
        return self.data.in_order(self.splits[0], self.batch_size, no_single=True)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Any:
        """Normalize and, in training, augment on the device."""
        return self.transform(batch, self.trainer)


def refuse_overfitting(trainer: L.Trainer | None, stage: str | None) -> None:
    """Raises :class:`FederationError` if the Trainer has ``overfit_batches``: it would take examples for batches. Raised while
    loaders are made, an error would leave Lightning's changes in PyTorch's class.
    """
    if stage == "fit" and (overfit := getattr(trainer, "overfit_batches", 0)):
        raise FederationError(
            f"The Trainer has overfit_batches={overfit}, which would replace the order of a client's batches: give it "
            "limit_train_batches."
        )
