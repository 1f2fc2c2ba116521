"""FedBABU (Oh, Kim & Yun, ICLR 2022, https://arxiv.org/abs/2106.06042), Algorithm 1."""

import copy
from typing import Any, Self

from torch import nn

from lightning_fed.core import ClientInfo, FederatedModule, FineTuning, Phase, State
from lightning_fed.models import Backbones
from lightning_fed.options import PositiveInt

INITIAL = "initial_head."
"""What the names of the head as it was drawn begin with."""


class FedBABU(FederatedModule):
    r"""Clients train and share the body with a fixed random head, and fine-tune the whole network to predict.

    All clients have one random head :math:`h_0`. A client trains the body, :math:`\min_\phi L_k(h_0 \circ \phi)`; the head has no
    gradient and no optimizer entry, so that neither momentum nor weight decay moves it. The body travels, with its batch norm, and
    is averaged with equal weights, as in the authors' code.

    Before an evaluation a client fine-tunes body and head on its own data, from the server's body and from
    :math:`h_0`; the result is discarded. Monitored: accuracy after aggregation of these models. ``global/…`` is the body
    with :math:`h_0`, and ``before/…`` the same of a participant that has just trained.

    Args:
        backbone: the network of every client.
        num_classes: number of classes; None: as many as the data have.
        fine_tuning: settings; None: 5 epochs of everything, as in the paper. ``part: head`` tunes the head only; with ``epochs: 0``
            clients are evaluated with :math:`h_0`, with ``when: last`` they are fine-tuned only after the last round.
        **kwargs: see :class:`.FederatedModule`. The authors: SGD, lr 0.1, momentum 0.9, 1, 4 or 10 ``epochs``.
    """

    weighting = "uniform"

    def __init__(
        self, backbone: Backbones, num_classes: PositiveInt | None = None, *, fine_tuning: FineTuning | None = None, **kwargs: Any
    ) -> None:
        super().__init__(backbone, num_classes, fine_tuning=fine_tuning or FineTuning(epochs=5), **kwargs)

    def build(self) -> None:
        """Build the network and a frozen copy of its head, which all clients share in memory."""
        super().build()
        self.initial_head: nn.Linear = copy.deepcopy(self.backbone.head).requires_grad_(False)

    def recomputed_buffers(self) -> set[str]:
        """The head that a client predicts with, which neither travels nor stays: every load resets it to the initial one."""
        return {f"backbone.{name}" for name in self.backbone.head_names()}

    def find_frozen(self) -> frozenset[str]:
        """See :meth:`.FederatedModule.find_frozen`; includes the buffers of the initial head."""
        return super().find_frozen() | {name for name in self.state_dict() if name.startswith(INITIAL)}

    @property
    def has_statistics(self) -> bool:
        """False: there are no statistics to gather."""
        return False

    def load_shared_state(self, state: State) -> None:
        """Load the server's body, and reset the head to the initial one."""
        super().load_shared_state(state)
        self._reset_head()

    def for_client(self, client: ClientInfo, seed: int = 0) -> Self:
        """See :meth:`.FederatedModule.for_client`; with the head that all clients have."""
        module = super().for_client(client, seed)
        module._reset_head()
        return module

    def _reset_head(self) -> None:
        self.backbone.head.load_state_dict(self.initial_head.state_dict())

    def phases(self) -> list[Phase]:
        """FedAvg's phase, for the body only."""
        head = self.backbone.head_names()
        body = [p for name, p in self.backbone.named_parameters() if name not in head]
        return [self.local_phase("body", body, self.client_loss)]

    def export_state(self, private: bool = True) -> State:
        """The network that a client predicts with."""
        return {name: tensor for name, tensor in self.state_dict().items() if not name.startswith(INITIAL)}
