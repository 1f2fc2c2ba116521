"""FML (Shen et al. 2020, https://arxiv.org/abs/2006.16765), federated mutual learning."""

from typing import Any

from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor

from lightning_fed.core import FederationError
from lightning_fed.methods.families.mutual_learning import MutualLearningModule
from lightning_fed.models import BackboneFactory, Backbones
from lightning_fed.nn.losses import divergence
from lightning_fed.options import ClosedUnitInterval, PositiveInt


class FML(MutualLearningModule):
    r"""A personal network of any architecture and a shared one, the meme, learn from the client's data and from each other.

    With p the personal network's probabilities and q the meme's, a client minimises on each batch, at once,

    .. math:: L_{personal} = \alpha\,\mathrm{CE}(p, y) + (1-\alpha)\,\mathrm{KL}(q \,\Vert\, p), \qquad
        L_{meme} = \beta\,\mathrm{CE}(q, y) + (1-\beta)\,\mathrm{KL}(p \,\Vert\, q),

    each for its own network: the other one's probabilities are constants. KL is summed over the classes and averaged over the
    batch. Both gradients come from the same forward pass, then both networks step. The meme travels and is averaged with equal
    weights; the personal network stays, and the client predicts with it. Monitored: accuracy after aggregation (it equals that
    before).

    Args:
        backbone: the clients' personal networks; client ``k`` gets entry ``k mod len(list)``.
        num_classes: number of classes; None: as many as the data have.
        meme: the shared network; None: the first of ``backbone``. pFedLoRA's paper: the smallest, CNN-5.
        alpha: weight :math:`\alpha` of the personal network's own loss; 1 is exactly Standalone. The authors' code: 0.5.
        beta: weight :math:`\beta` of the meme's own loss; 1 is FedAvg of the meme, with equal weights. The authors' code: 0.5.
        meme_optimizer: optimizer of the meme. Default: the same as ``optimizer``.
        **kwargs: see :class:`.FederatedModule`; ``optimizer`` is the personal network's. The authors' code: 5 ``epochs`` with SGD,
            lr 0.01, momentum 0.9, weight decay 5e-4.
    """

    def __init__(
        self,
        backbone: Backbones,
        num_classes: PositiveInt | None = None,
        meme: BackboneFactory | None = None,
        alpha: ClosedUnitInterval = 0.5,
        beta: ClosedUnitInterval = 0.5,
        meme_optimizer: OptimizerCallable | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, num_classes, meme, meme_optimizer, **kwargs)
        for name, weight in (("alpha", alpha), ("beta", beta)):
            if not 0 <= weight <= 1:
                raise FederationError(f"{name} is {weight}: give a weight in [0, 1].")
        self.alpha = alpha
        self.beta = beta

    def client_loss(self, batch: Any) -> Tensor:
        """Sum of both losses of a batch; its gradient is that of each loss for its own network."""
        x, y = self.unpack(batch)
        personal, meme = self.both(lambda network: network(x))
        return self.mutual_loss(personal, y, meme, self.alpha) + self.mutual_loss(meme, y, personal, self.beta)

    def mutual_loss(self, logits: Tensor, targets: Tensor, peer: Tensor, weight: float) -> Tensor:
        """The loss of one network, given the other one's logits. Terms with weight 0 are left out.

        Args:
            logits: of the network, ``(B, C)``.
            targets: class labels, ``(B,)``.
            peer: the other network's logits.
            weight: of the targets; the peer has the rest.
        """
        terms = []
        if weight > 0:
            terms.append(weight * self.criterion(logits, targets))
        if weight < 1:
            terms.append((1 - weight) * divergence(peer.detach(), logits))
        return sum(terms[1:], terms[0])
