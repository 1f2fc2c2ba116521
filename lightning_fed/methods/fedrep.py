"""FedRep (Collins et al., ICML 2021, https://arxiv.org/abs/2102.07078), Algorithm 1."""

from typing import Any

from lightning_fed.core import Phase
from lightning_fed.methods.fedper import FedPer
from lightning_fed.models import Backbones
from lightning_fed.options import NonNegativeInt, PositiveInt


class FedRep(FedPer):
    """Clients share a representation and keep private heads, and train first the head, then the representation.

    In each phase the other part is frozen: no gradient and no optimizer entry, so that neither momentum nor weight decay moves it.
    Batch-norm statistics belong to the representation and follow the data in both phases, as in the authors' code. The server's
    average counts participants equally (the 1/(rN) of Algorithm 1). Monitored: accuracy after aggregation.

    Args:
        backbone: the network of every client.
        num_classes: number of classes; None: as many as the data have.
        head_epochs: epochs of the head. The authors' code: 10.
        **kwargs: see :class:`.FedPer`, whose ``private_layers`` are trained first. ``epochs`` are those of the representation; the
            authors' code: 1 (two classes per client), else 5, and SGD with lr 0.01 and momentum 0.5.
    """

    weighting = "uniform"

    def __init__(
        self, backbone: Backbones, num_classes: PositiveInt | None = None, *, head_epochs: NonNegativeInt = 10, **kwargs: Any
    ) -> None:
        super().__init__(backbone, num_classes, **kwargs)
        self.head_epochs = head_epochs

    def phases(self) -> list[Phase]:
        """Train the private layers, then everything else."""
        private = self.backbone.last_layers(self.private_layers)
        head = [p for name, p in self.backbone.named_parameters() if name in private]
        body = [p for name, p in self.backbone.named_parameters() if name not in private]
        return [
            self.local_phase("head", head, self.client_loss, epochs=self.head_epochs, steps=None),
            self.local_phase("representation", body, self.client_loss),
        ]
