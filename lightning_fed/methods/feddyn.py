"""FedDyn (Acar et al., ICLR 2021, https://arxiv.org/abs/2111.04263), Algorithm 1."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fed.core import ClientInfo, KeepsGlobalParameters, Phase, Server, ServerUpdate, State
from lightning_fed.methods.families.whole_server import WholeServerModule
from lightning_fed.models import Backbones
from lightning_fed.nn.buffer_dict import BufferDict
from lightning_fed.nn.proximal import half_squared_distance
from lightning_fed.options import PositiveFloat, PositiveInt


class FedDyn(WholeServerModule, KeepsGlobalParameters):
    r"""Each client's objective is regularized dynamically in every round, so that the optima of clients and server align.

    The server has the model :math:`w` and :math:`h`, a client :math:`g_k`, its gradient at its last model; both start at zero. A
    round:

    1. A client minimises :math:`L_k(\theta) - \langle g_k, \theta \rangle + \frac{\alpha}{2} \lVert \theta - w \rVert^2` from
       :math:`w` and sends its :math:`\theta_k`.
    2. :math:`g_k \leftarrow g_k - \alpha (\theta_k - w)`, which stays.
    3. The server: :math:`h \leftarrow h - \frac{\alpha}{N} \sum_{k \in S} (\theta_k - w)` over the participants S of the N clients
       that may take part, so that it is always the mean of all :math:`g_k`; then :math:`w \leftarrow \bar\theta - h / \alpha` with
       the participants' mean :math:`\bar\theta`.

    The payload is FedAvg's. Buffers (batch norm) are averaged and have no :math:`g`. The logged loss does not include the two
    terms, which are ``train/local_penalty``. With ``compression`` of updates, :math:`h` is no longer the mean of the
    :math:`g_k`, which clients compute before compression. Monitored: accuracy after aggregation, of :math:`w` itself. Unlike the
    paper, the authors' code reports means of the :math:`\theta_k`, and divides :math:`\alpha` by the client's share of examples.

    Args:
        backbone: the network that every client trains.
        num_classes: number of classes; None: as many as the data have.
        alpha: :math:`\alpha`. The authors' code has 0.1, 0.01 and 0.001 by data set.
        **kwargs: see :class:`.FederatedModule`. The authors: SGD, ``gradient_clip`` 10, a rate that falls from round to round.
    """

    weighting = "uniform"
    beside_the_model = ("own_gradient.",)

    def __init__(
        self, backbone: Backbones, num_classes: PositiveInt | None = None, alpha: PositiveFloat = 0.1, **kwargs: Any
    ) -> None:
        super().__init__(backbone, num_classes, **kwargs)
        self.alpha = alpha

    def build(self) -> None:
        super().build()
        self.own_gradient = BufferDict({name: torch.zeros_like(p) for name, p in self.named_parameters() if p.requires_grad})

    def phases(self) -> list[Phase]:
        """FedAvg's phase, with a penalty."""
        return [self.local_phase("local", list(self.parameters()), self.client_loss, penalty=self.dynamic_penalty)]

    def dynamic_penalty(self) -> Tensor:
        """The two terms that are added to the loss."""
        own = self.learning()
        linear = torch.stack([(self.own_gradient[name] * p).sum() for name, p in own.items()]).sum()
        return self.alpha * half_squared_distance(own.values(), self.global_parameters.values()) - linear

    @torch.no_grad()
    def after_training(self, sums: State) -> None:
        """Compute the new :math:`g_k`; without a step it does not change."""
        if any(phase.epochs or phase.steps for phase in self.phases()):
            for name, parameter in self.learning().items():
                self.own_gradient[name].sub_(parameter - self.global_parameters[name], alpha=self.alpha)

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        """A server that averages models with equal weights and takes the step by :math:`h`."""
        update = DynamicUpdate(self.remembered(), sum(client.takes_part for client in clients), self.alpha)
        return Server(self.update_state(), "uniform", holds_model=True, update=update)  # h is a mean of gradients


class DynamicUpdate(ServerUpdate):
    r"""Keeps :math:`h` and takes the step beyond the mean.

    Args:
        parameters: the initial ones, by name.
        num_clients: N, the number of clients that may take part.
        alpha: :math:`\alpha`.
    """

    def __init__(self, parameters: State, num_clients: int, alpha: float) -> None:
        self.h = {name: torch.zeros_like(parameter, device="cpu") for name, parameter in parameters.items()}
        self.num_clients = num_clients
        self.alpha = alpha

    def __call__(self, state: State, combined: State, clients: int) -> State:
        """Update :math:`h` and step; buffers take the mean."""
        share = self.alpha * clients / self.num_clients
        self.h = {name: h - share * (combined[name] - state[name]) for name, h in self.h.items()}
        return combined | {name: combined[name] - h / self.alpha for name, h in self.h.items()}

    def state_dict(self) -> State:
        """:math:`h`."""
        return self.h

    def load_state_dict(self, state: State) -> None:
        """Continue from there."""
        self.h = {name: state[name] for name in self.h}
