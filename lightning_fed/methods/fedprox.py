"""FedProx (Li et al., MLSys 2020, https://arxiv.org/abs/1812.06127), Algorithm 2."""

from typing import Any

from torch import Tensor

from lightning_fed.core import KeepsGlobalParameters, Phase
from lightning_fed.models import Backbones
from lightning_fed.nn.proximal import half_squared_distance
from lightning_fed.options import NonNegativeFloat, PositiveInt


class FedProx(KeepsGlobalParameters):
    r"""FedAvg with a proximal term that keeps local models near the server's :math:`w^t`: a client minimises
    :math:`L_k(w) + \frac{\mu}{2} \lVert w - w^t \rVert^2` (eq. 2), over the trainable parameters, not the buffers.

    Payload and average are FedAvg's, weighted by training examples; the paper samples clients in proportion to
    their examples and averages with equal weights. The paper's clients may do unequal work; here all train ``epochs`` epochs. The
    logged loss does not include the proximal term, ``train/local_penalty``. Monitored: accuracy after aggregation.

    Args:
        backbone: the network that every client trains.
        num_classes: number of classes; None: as many as the data have.
        mu: weight :math:`\mu` of the proximal term; 0 is exactly FedAvg. The paper searches {0.001, 0.01, 0.1, 1}.
        **kwargs: see :class:`.FederatedModule`. The paper: 20 ``epochs`` at most.
    """

    def __init__(
        self, backbone: Backbones, num_classes: PositiveInt | None = None, mu: NonNegativeFloat = 0.1, **kwargs: Any
    ) -> None:
        super().__init__(backbone, num_classes, **kwargs)
        self.mu = mu

    def phases(self) -> list[Phase]:
        """FedAvg's phase, with a penalty."""
        penalty = self.proximal_term if self.mu else None
        return [self.local_phase("local", list(self.parameters()), self.client_loss, penalty=penalty)]

    def proximal_term(self) -> Tensor:
        """The term that is added to the loss."""
        return self.mu * half_squared_distance(self.learning().values(), self.global_parameters.values())
