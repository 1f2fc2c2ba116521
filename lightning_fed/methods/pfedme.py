"""pFedMe (Dinh, Tran & Nguyen, NeurIPS 2020, https://arxiv.org/abs/2006.08848), Algorithm 1."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fed.core import Phase, ServerSGD, State
from lightning_fed.errors import refuse_given
from lightning_fed.methods.families.personal_model import PersonalModule
from lightning_fed.models import Backbones
from lightning_fed.options import NonNegativeFloat, PositiveFloat, PositiveInt


class PFedMe(PersonalModule):
    r"""The global model minimises the clients' Moreau envelopes, and each client keeps a personal model near it.

    The objective is :math:`\min_w \frac{1}{N} \sum_k F_k(w)`, :math:`F_k(w) = \min_\theta f_k(\theta) + \frac{\lambda}{2} \lVert
    \theta - w \rVert^2`. A step of a client on one batch:

    1. From :math:`\theta = w`, K steps of rate :math:`\eta_p` along :math:`\nabla f_k(\theta) + \lambda (\theta - w)` give
       :math:`\tilde\theta`.
    2. The optimizer steps :math:`w` along :math:`\lambda (w - \tilde\theta)`, which is :math:`\nabla F_k(w)` for large K.

    The server moves by :math:`\beta` to the mean of its participants' :math:`w_k`, with equal weights. The last
    :math:`\tilde\theta` of a turn is the client's personal model: it stays and predicts, but no step starts from it. Batch-norm
    statistics are those of :math:`\theta`, and travel with :math:`w`. The logged loss is that of :math:`w`.

    Monitored: accuracy after aggregation of the personal models, or of :math:`w`, which is ``global``, for clients that never took
    part.

    Args:
        backbone: the network of every client.
        num_classes: number of classes; None: as many as the data have.
        lam: :math:`\lambda`. The authors: 15 (MNIST; 20 for synthetic data, 30 in their search).
        personal_lr: :math:`\eta_p`. The authors: 0.09 for a network of two layers, 0.05 in their search.
        inner_steps: K. The authors: 5.
        beta: :math:`\beta`; 1 is the mean. The authors: 1, or 2.
        **kwargs: see :class:`.FederatedModule`. ``optimizer`` is of :math:`w`; the authors: SGD, lr 0.005, 20 ``steps``.
    """

    weighting = "uniform"
    shares_whole_model = True  # the server's is one; personal models stay
    scales_gradients = False
    accumulates = False

    def __init__(
        self,
        backbone: Backbones,
        num_classes: PositiveInt | None = None,
        lam: NonNegativeFloat = 15.0,
        personal_lr: NonNegativeFloat = 0.05,
        inner_steps: PositiveInt = 5,
        beta: PositiveFloat = 1.0,
        **kwargs: Any,
    ) -> None:
        refuse_given(type(self).__name__, kwargs, "server_optimizer", "its server has one of its own")
        super().__init__(backbone, num_classes, server_optimizer=ServerSGD(beta), **kwargs)
        self.lam = lam
        self.personal_lr = personal_lr
        self.inner_steps = inner_steps

    def initial_originals(self) -> State:
        """None: a client that never took part predicts with the received model."""
        return {}

    def phases(self) -> list[Phase]:
        """One phase, on the envelope. The personal network has no gradients for the optimizer."""
        both = [*self.learning_parameters(self.backbone), *self.learning_parameters(self.personal)]
        return [self.local_phase("local", both, self.envelope_loss)]

    def envelope_loss(self, batch: Any) -> Tensor:
        r"""The loss of a batch at :math:`w`, with the gradient :math:`\lambda (w - \tilde\theta)`; leaves
        :math:`\tilde\theta` in the personal network.
        """
        shared, own = self.learning_parameters(self.backbone), self.learning_parameters(self.personal)
        self._copy([*own, *self.personal.buffers()], [*shared, *self.backbone.buffers()])
        losses = []
        for _ in range(self.inner_steps):
            losses.append(self.client_loss(batch))
            grads = torch.autograd.grad(losses[-1], own, materialize_grads=True)
            with torch.no_grad():
                for theta, w, grad in zip(own, shared, grads, strict=True):
                    theta.sub_(grad + self.lam * (theta - w), alpha=self.personal_lr)
        self._copy(list(self.backbone.buffers()), list(self.personal.buffers()))
        way = self.lam * torch.stack([((w - theta).detach() * w).sum() for w, theta in zip(shared, own, strict=True)]).sum()
        return losses[0].detach() + (way - way.detach())

    @staticmethod
    @torch.no_grad()
    def _copy(to: Sequence[Tensor], of: Sequence[Tensor]) -> None:
        for tensor, other in zip(to, of, strict=True):
            tensor.copy_(other)
