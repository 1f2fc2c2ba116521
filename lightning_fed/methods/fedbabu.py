"""FedBABU (Oh, Kim & Yun, ICLR 2022, https://arxiv.org/abs/2106.06042), Algorithm 1."""

import copy
from typing import Any

from torch import nn

from lightning_fed.core import FederatedModule, FineTuning, Phase, State
from lightning_fed.models import Backbones
from lightning_fed.options import PositiveInt

INITIAL = "initial_head."
"""What the names of the head as it was drawn begin with."""


class FedBABU(FederatedModule):
    r"""A body that is learned under a head which stays as it was drawn, and whole networks that are fine-tuned from it.

    All clients have one random head :math:`h_0`. A client trains the body, :math:`\min_\phi L_k(h_0 \circ \phi)`; the head has no
    gradient and no optimizer entry, so that neither momentum nor weight decay moves it. The body travels, with its batch norm, and
    is averaged with equal weights, as in the authors' code.

    Before it is measured a client fine-tunes body and head on its own data, from the body that the server has and from
    :math:`h_0`; what comes of it is thrown away. Monitored: accuracy after aggregation of these models. ``global/…`` is the body
    under :math:`h_0`, and ``before/…`` the same of a participant that has just trained.

    Args:
        backbone: the network of every client.
        num_classes: number of classes; None: as many as the data have.
        fine_tuning: how; None: 5 epochs of everything, as in the paper. ``part: head`` tunes the head alone; with ``epochs: 0``
            clients are measured with :math:`h_0`, with ``when: last`` they are fine-tuned after the last round alone.
        **kwargs: see :class:`.FederatedModule`. The authors: SGD, lr 0.1, momentum 0.9, 1, 4 or 10 ``epochs``.
    """

    weighting = "uniform"

    def __init__(
        self, backbone: Backbones, num_classes: PositiveInt | None = None, *, fine_tuning: FineTuning | None = None, **kwargs: Any
    ) -> None:
        super().__init__(backbone, num_classes, fine_tuning=fine_tuning or FineTuning(epochs=5), **kwargs)

    def build(self) -> None:
        """The network, and its head once more: what is frozen is the same for everybody, and in memory once."""
        super().build()
        self.initial_head: nn.Linear = copy.deepcopy(self.backbone.head).requires_grad_(False)

    def recomputed_buffers(self) -> set[str]:
        """The head that a client predicts with neither travels nor stays: it is the initial one whenever something is loaded."""
        return {f"backbone.{name}" for name in self.backbone.head_names()}

    @property
    def has_statistics(self) -> bool:
        """Nothing of it is gathered."""
        return False

    def load_shared_state(self, state: State) -> None:
        """The server's body, under the initial head."""
        super().load_shared_state(state)
        self.backbone.head.load_state_dict(self.initial_head.state_dict())

    def phases(self) -> list[Phase]:
        """FedAvg's, of the body."""
        head = self.backbone.head_names()
        body = [p for name, p in self.backbone.named_parameters() if name not in head]
        return [self.local_phase("body", body, self.client_loss)]

    def export_state(self, private: bool = True) -> State:
        """The network that a client predicts with."""
        return {name: tensor for name, tensor in self.state_dict().items() if not name.startswith(INITIAL)}
