"""FedAvg with local fine-tuning ("FedAvg+", "FT-FedAvg")."""

from typing import Any

from lightning_fed.core import FineTuning
from lightning_fed.methods.fedavg import FedAvg
from lightning_fed.models import Backbones
from lightning_fed.options import PositiveInt


class FedAvgFT(FedAvg):
    """FedAvg whose clients fine-tune the global model on their own training data before it is evaluated or exported.

    The fine-tuned model is discarded, and training continues as FedAvg's, bit for bit.
    It is FedAvg with ``fine_tuning``, an option of every method but PF2LoRA and Per-FedAvg. Monitored: accuracy after aggregation,
    of the fine-tuned model on each client's test data. ``global/…`` is the global model without fine-tuning, ``before/…`` the
    model that each participant trained in the round. ``fine_tune/flops`` is the cost of fine-tuning, separate from training.

    Args:
        backbone: the network that every client trains.
        num_classes: number of classes; None: as many as the data have.
        fine_tuning: settings; None: one epoch. With ``epochs: 0`` it is exactly FedAvg, with ``part: head`` it tunes the head only.
        **kwargs: see :class:`.FederatedModule`.
    """

    def __init__(
        self, backbone: Backbones, num_classes: PositiveInt | None = None, *, fine_tuning: FineTuning | None = None, **kwargs: Any
    ) -> None:
        super().__init__(backbone, num_classes, fine_tuning=fine_tuning or FineTuning(), **kwargs)
