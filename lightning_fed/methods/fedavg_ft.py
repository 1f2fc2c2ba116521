"""FedAvg with local fine-tuning ("FedAvg+", "FT-FedAvg")."""

from typing import Any

from lightning_fed.core import FineTuning
from lightning_fed.methods.fedavg import FedAvg
from lightning_fed.models import Backbones
from lightning_fed.options import PositiveInt


class FedAvgFT(FedAvg):
    """FedAvg whose global model each client fine-tunes on its own training data before it is measured or exported; what comes of it
    is thrown away, and training goes on as FedAvg's, bit for bit.

    It is FedAvg with ``fine_tuning``, an option of every method but PF2LoRA and Per-FedAvg. Monitored: accuracy after aggregation,
    of the fine-tuned model on each client's test data. Beside it ``global/…`` is the global model as it is, and ``before/…`` the
    model of each participant as it was trained in the round. What fine-tuning costs is ``fine_tune/flops``, apart from training.

    Args:
        backbone: the network that every client trains.
        num_classes: number of classes; None: as many as the data have.
        fine_tuning: how; None: one epoch. With ``epochs: 0`` it is exactly FedAvg, with ``part: head`` the head alone is tuned.
        **kwargs: see :class:`.FederatedModule`.
    """

    def __init__(
        self, backbone: Backbones, num_classes: PositiveInt | None = None, *, fine_tuning: FineTuning | None = None, **kwargs: Any
    ) -> None:
        super().__init__(backbone, num_classes, fine_tuning=fine_tuning or FineTuning(), **kwargs)
