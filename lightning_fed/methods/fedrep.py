"""FedRep (Collins et al., ICML 2021, https://arxiv.org/abs/2102.07078), Algorithm 1."""

from typing import Any

from lightning.pytorch.cli import OptimizerCallable

from lightning_fed.core import Phase, default_optimizer
from lightning_fed.methods.fedper import FedPer
from lightning_fed.models import Backbones
from lightning_fed.options import NonNegativeInt, PositiveInt


class FedRep(FedPer):
    """A shared representation and private heads, trained one after the other: first the head, then the representation.

    In each phase the other part is frozen: no gradient and no optimizer entry, so that neither momentum nor weight decay moves it.
    Batch-norm statistics belong to the representation and follow the data in both phases, as in the authors' code. The server's
    average counts participants equally (the 1/(rN) of Algorithm 1). Monitored: accuracy after aggregation.

    Args:
        backbone: the network of every client.
        num_classes: number of classes; None: as many as the data have.
        optimizer: of both phases. Default: SGD, lr 0.01, the authors' learning rate (with momentum 0.5).
        head_epochs: epochs of the head. The authors' code: 10.
        epochs: epochs of the representation. The authors' code: 1 (two classes per client), else 5.
        **kwargs: see :class:`.FederatedModule`. ``private_layers``, which are trained first, as in :class:`.FedPer`.
    """

    weighting = "uniform"

    def __init__(
        self,
        backbone: Backbones,
        num_classes: PositiveInt | None = None,
        optimizer: OptimizerCallable = default_optimizer,
        head_epochs: NonNegativeInt = 10,
        epochs: NonNegativeInt = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, num_classes, optimizer, epochs, **kwargs)
        self.head_epochs = head_epochs

    def phases(self) -> list[Phase]:
        """The head, or what stays with the client, then everything else."""
        private = self.backbone.last_layers(self.private_layers)
        head = [p for name, p in self.backbone.named_parameters() if name in private]
        body = [p for name, p in self.backbone.named_parameters() if name not in private]
        return [
            Phase("head", head, self.client_loss, self.optimizer, self.head_epochs),
            Phase("representation", body, self.client_loss, self.optimizer, self.epochs),
        ]
