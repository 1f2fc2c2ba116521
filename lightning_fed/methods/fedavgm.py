"""FedAvgM (Hsu, Qi & Brown 2019, https://arxiv.org/abs/1909.06335)."""

from typing import Any

from lightning_fed.core import ServerSGD
from lightning_fed.errors import refuse_given
from lightning_fed.methods.fedavg import FedAvg
from lightning_fed.models import Backbones
from lightning_fed.options import ClosedUnitInterval, PositiveFloat, PositiveInt


class FedAvgM(FedAvg):
    r"""FedAvg with momentum on the server: :math:`v \leftarrow \beta v + (\bar w - w)`, :math:`w \leftarrow w + \eta v`.

    Clients train and send as in FedAvg. Buffers are averaged. Monitored: accuracy after aggregation.

    Args:
        backbone: the network that every client trains.
        num_classes: number of classes; None: as many as the data have.
        server_lr: :math:`\eta`; see :class:`.ServerSGD`.
        momentum: :math:`\beta`; 0 with ``server_lr`` 1 is exactly FedAvg. The paper searches {0, 0.7, 0.9, 0.97, 0.99, 0.997}.
        nesterov: whether the momentum is Nesterov's, as in the paper's experiments.
        **kwargs: see :class:`.FederatedModule`.
    """

    def __init__(
        self,
        backbone: Backbones,
        num_classes: PositiveInt | None = None,
        server_lr: PositiveFloat = 1.0,
        momentum: ClosedUnitInterval = 0.9,
        nesterov: bool = False,
        **kwargs: Any,
    ) -> None:
        refuse_given(type(self).__name__, kwargs, "server_optimizer", "its server has one of its own")
        super().__init__(backbone, num_classes, server_optimizer=ServerSGD(server_lr, momentum, nesterov), **kwargs)
