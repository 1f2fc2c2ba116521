"""Methods whose clients or server train on public data, which belongs to no client."""

import math
from typing import Any

from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor

from lightning_fed.core.module import FederatedModule
from lightning_fed.core.phase import Phase

OUTPUTS = "outputs"
"""Name of a model's outputs for public examples, ``(M, C)``."""


class PublicDistillation(FederatedModule):
    """A method that needs public data, see :meth:`.FederatedDataModule.public_set`: models predict the public examples and learn
    from each other's predictions.

    Args:
        **kwargs: see :class:`.FederatedModule`.
    """

    public_batch_size: int | None = None
    """Batch size for public data. None: that of training."""

    server_validation: tuple[int, int | None] | None = None
    """For servers that train: after how many steps to validate, and after how many steps without improvement to stop (None: train
    to the end). The best model is kept. None: the last model is kept.
    """

    public_table_limit: float = math.inf
    """Size in bytes up to which a model's predictions of the public data are float32; larger ones are bfloat16."""

    predict_public: Tensor | None = None
    """Indices of the public examples that a client predicts after training; :meth:`after_training` gets the predictions under
    :data:`OUTPUTS`. None: it predicts none.
    """

    public_examples: Tensor | None = None
    """Indices of the public examples on which :meth:`server_phases` and :meth:`public_phases` train. None: all."""

    def loss_terms(self, batch: Any) -> float:
        """See :meth:`.Task.terms`; of public data, one per example: their batches hold indices in place of targets."""
        data = getattr(self._trainer, "datamodule", None)
        return super().loss_terms(batch) if getattr(data, "held_out", None) is None else extract_batch_size(batch)

    def server_phases(self) -> list[Phase]:
        """The phases in which the server trains a model on public data; see :meth:`.Server.train_on_public`.

        Training starts from the model that the server names. A batch holds the indices of the examples in place of targets; what
        to learn comes by :meth:`payload`. See :attr:`public_batch_size` and :attr:`server_validation`. Default: no training.
        """
        return []

    def public_phases(self) -> list[Phase]:
        """The phases in which a client trains on public data: before its own data, if the broadcast says so, or after the server
        has merged, see :meth:`.Server.public_training`. Called after the broadcast is loaded. Default: no training.
        """
        return []
