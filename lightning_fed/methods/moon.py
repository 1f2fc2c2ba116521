"""MOON (Li, He & Song, CVPR 2021, https://arxiv.org/abs/2103.16257), Algorithm 1."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from lightning_fed.core import KeepsGlobalParameters, Phase, State
from lightning_fed.methods.families.whole_server import WholeServerModule
from lightning_fed.models import Backbones
from lightning_fed.nn.buffer_dict import BufferDict
from lightning_fed.nn.evaluating import evaluating
from lightning_fed.nn.losses import FunctionOf, call_with
from lightning_fed.options import NonNegativeFloat, PositiveFloat, PositiveInt
from lightning_fed.tensors import second_names


class MOON(WholeServerModule, KeepsGlobalParameters):
    r"""FedAvg with a contrastive term that pulls representations to those of the global model and away from the client's last one.

    A client minimises :math:`L_k(w) + \mu\, \ell_\mathrm{con}`, the mean over the batch of

    .. math:: \ell_\mathrm{con} = -\log \frac{e^{\cos(z, z_\mathrm{glob}) / T}}
        {e^{\cos(z, z_\mathrm{glob}) / T} + e^{\cos(z, z_\mathrm{prev}) / T}},

    with the representations :math:`z` of the trained model, :math:`z_\mathrm{glob}` of the model that the server sent, and
    :math:`z_\mathrm{prev}` of the model at the end of the client's last turn; the latter two are in eval mode and get no gradient.
    In a client's first turn the last model is the received one: the term is :math:`\log 2`, its gradient zero,
    and the turn FedAvg's bit for bit.

    Payload and average are FedAvg's; the last model stays with the client. The logged loss includes the term.
    Monitored: accuracy after aggregation, of the server's model.

    Args:
        backbone: the network that every client trains. The paper's have two more linear layers before the head, a projection to
            256 values: they are a part of the network, and :math:`z` is their output.
        num_classes: number of classes; None: as many as the data have.
        mu: :math:`\mu`; 0 is exactly FedAvg. The paper: 5 (CIFAR-10), of {0.001, 0.01, 0.1, 1, 5, 10}.
        temperature: T. The paper: 0.5.
        cut: the place in the network that gives z; ``features`` is the input of its head.
        **kwargs: see :class:`.FederatedModule`. The paper: SGD, lr 0.01, momentum 0.9, weight decay 1e-5, 10 ``epochs``.
    """

    beside_the_model = ("previous.",)

    def __init__(
        self,
        backbone: Backbones,
        num_classes: PositiveInt | None = None,
        mu: NonNegativeFloat = 5.0,
        temperature: PositiveFloat = 0.5,
        cut: str = "features",
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, num_classes, **kwargs)
        self.mu = mu
        self.temperature = temperature
        self.cut = cut
        self._representations: list[Tensor] | None = None  # of the model that is trained, while they are noted

    def build(self) -> None:
        """Build the network and a copy for the last one."""
        super().build()
        left_out, network = self.find_frozen() | second_names(self).keys(), _of_the_network(self.state_dict())
        self.previous = BufferDict({name: tensor for name, tensor in network.items() if name not in left_out})

    def initialized_from(self) -> dict[str, str]:
        """The last model starts as the first received one."""
        return {f"previous.{name.replace('.', '/')}": name for name in self.previous}

    def initial_originals(self) -> State:
        """None: see :meth:`initialized_from`."""
        return {}

    def remembered(self) -> dict[str, Tensor]:
        """All tensors of the network that travel, with the statistics that eval mode needs."""
        return {name: tensor for name, tensor in _of_the_network(self.state_dict()).items() if name in self._shared}

    def after_training(self, sums: State) -> None:
        """Keep the trained model as the last one."""
        self.previous.update(self.remembered())

    def forward(self, x: Any) -> Tensor:
        """Logits; within :meth:`moon_loss` representations are noted."""
        if self._representations is None:
            return super().forward(x)
        representation, logits = self.backbone.encode_and_classify(x, self.cut)
        self._representations.append(representation)
        return logits

    def phases(self) -> list[Phase]:
        """FedAvg's phase, with another loss."""
        return [self.local_phase("local", list(self.parameters()), self.moon_loss if self.mu else self.client_loss)]

    def moon_loss(self, batch: Any) -> Tensor:
        r"""The loss of a batch plus the contrastive term, which is :math:`\log(1 + e^{(\cos(z, z_\mathrm{prev}) - \cos(z,
        z_\mathrm{glob})) / T})`: finite for any T, and of gradient zero if both are equal.
        """
        self._representations = []
        try:
            loss = self.client_loss(batch)
            [own, *_] = self._representations
        finally:
            self._representations = None
        x, _ = self.unpack(batch)
        received, previous = (normalize(self.frozen(values, x), dim=1) for values in (self.global_parameters, self.previous))
        nearer = (normalize(own, dim=1) * (previous - received)).sum(dim=1)
        return loss + self.mu * softplus(nearer / self.temperature).mean()

    @torch.no_grad()
    def frozen(self, values: BufferDict, x: Any) -> Tensor:
        """Representations ``(B, D)`` of the network with other values, in eval mode."""
        with evaluating(self.backbone):
            state = {name.replace("backbone.", "module.", 1): tensor for name, tensor in values.items()}
            encoder = FunctionOf(self.backbone, partial(self.backbone.encode, cut=self.cut))
            representation: Tensor = call_with(encoder, state, x)
        return representation


def _of_the_network(state: State) -> State:
    """A state without the parameters of the loss, which do not affect representations."""
    return {name: tensor for name, tensor in state.items() if name.startswith("backbone.")}
