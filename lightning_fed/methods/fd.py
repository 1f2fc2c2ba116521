"""FD, federated distillation (Jeong et al. 2018, https://arxiv.org/abs/1811.11479), without its data augmentation (FAug)."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, one_hot

from lightning_fed.core import (
    Broadcast,
    ClientInfo,
    ClientUpdate,
    FederationError,
    PersonalServer,
    Server,
    State,
    pack_rows,
    unpack_rows,
)
from lightning_fed.methods.families.class_rows import ClassRowsModule, ClassRowsServer
from lightning_fed.methods.families.classifiers import needs_classifier
from lightning_fed.models import Backbones
from lightning_fed.options import NonNegativeFloat, PositiveInt

ROUND = "round"


class FD(ClassRowsModule):
    r"""Clients with different networks exchange their mean outputs for each label, and distil the means of the others.

    During training a client sums its network's outputs :math:`p = \mathrm{softmax} f(x)` by label, over all epochs of the round,
    and sends the mean :math:`\bar F_k[l]` for each label l that it saw. From the participants' means the server computes a teacher
    for each client, without the client's own,

    .. math:: G_k[l] = \frac{\sum_{j} \bar F_j[l] - \bar F_k[l]}{M_l - 1},

    over the :math:`M_l` clients j that sent label l; for a client that sent none, the plain mean. In the next round the client
    minimises :math:`\mathrm{CE}(f(x), y) - \gamma \sum_c G_k[y]_c \log p_c`. If no other client sent the label, and in the
    first round, the second term is left out. Networks stay with the clients, and each is initialized independently. Monitored:
    accuracy after aggregation; it equals that before.

    The outputs are probabilities. Re-implementations average logits and use them as the target, a loss without a lower bound.

    Args:
        backbone: the clients' networks; client ``k`` gets entry ``k mod len(list)``.
        num_classes: number of classes C; None: as many as the data have.
        gamma: weight :math:`\gamma` of the teacher's term; 0 is exactly Standalone. Searched elsewhere: {0.01, 0.1, 1}.
        average: whether the teacher's term is the mean over the ``batch``, or over its ``taught`` examples, whose label has a
            teacher; the latter without ``accumulate``.
        **kwargs: see :class:`.FederatedModule`. ``weighting`` is that of each client's mean: ``uniform``, as in the paper, or by
            the number of ``examples`` of the label.
    """

    weighting = "uniform"
    needs_cross_entropy = "its teachers are probabilities of classes: use CrossEntropyLoss, or Standalone."

    def __init__(
        self,
        backbone: Backbones,
        num_classes: PositiveInt | None = None,
        gamma: NonNegativeFloat = 1.0,
        average: Literal["batch", "taught"] = "batch",
        **kwargs: Any,
    ) -> None:
        self.accumulates = average == "batch"  # each batch has its own number of taught examples
        super().__init__(backbone, num_classes, **kwargs)
        self.gamma = gamma
        self.average = average
        self.outputs, self.counts = torch.zeros(0, 0, dtype=torch.float64), torch.zeros(0).long()

    def build(self) -> None:
        """Build the client's network and buffers for its teachers :math:`G_k`, ``(C, C)``, and for the sums and counts."""
        super().build()
        needs_classifier(self.backbone, "FD exchanges the mean outputs for each class")
        self.make_room(self.num_classes)
        self.outputs, self.counts = torch.zeros_like(self.rows, dtype=torch.float64), torch.zeros(self.num_classes).long()

    def payload(self) -> State:
        """The mean outputs since the broadcast."""
        means = (self.outputs / self.counts.clamp(min=1)[:, None]).to(self.rows.dtype)
        return pack_rows(means, self.counts > 0, self.counts)

    def load_payload(self, payload: State) -> None:
        """Load the teachers, if there are any, and reset the sums."""
        self.outputs, self.counts = torch.zeros_like(self.outputs), torch.zeros_like(self.counts)
        super().load_payload(payload)

    def client_loss(self, batch: Any) -> Tensor:
        """The loss of a batch with the teacher's term; adds the outputs to the sums."""
        x, y = self.unpack(batch)
        logits = self(x)
        self.add_outputs(logits.detach(), y)
        return self.criterion(logits, y) + self.gamma * self.teacher_loss(logits, y)

    def add_outputs(self, logits: Tensor, y: Tensor) -> None:
        """Add outputs to the sums by label. The sums are replaced, not changed in place: the copy that counts FLOPs shares them."""
        labels = one_hot(y, self.num_classes)
        self.outputs = self.outputs.to(y.device) + labels.T.double() @ logits.double().softmax(dim=1)
        self.counts = self.counts.to(y.device) + labels.sum(dim=0)

    def teacher_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        r"""The teacher's term, :math:`-\sum_c G_k[y]_c \log p_c`, averaged as set by ``average``."""
        rows = self.rows[y]
        each = -(rows * log_softmax(logits, dim=1)).sum(dim=1)
        return each.mean() if self.average == "batch" else each.sum() / (rows.sum(dim=1) > 0).sum().clamp(min=1)

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        """A server that keeps the mean outputs of each client and excludes them from its own teachers."""
        if wrong := [client for client in clients if len(client.label_counts) != self.num_classes]:
            raise FederationError(
                f"FD needs data whose labels are the {self.num_classes} classes that are predicted, but client {wrong[0].id} "
                f"counts {len(wrong[0].label_counts)} labels: give such data, or use Standalone."
            )
        return DistillationServer(self.rows, self.weighting)


class DistillationServer(ClassRowsServer, PersonalServer):
    """Keeps each client's last mean outputs, and computes its teachers from those that the others sent in the last round.

    Args:
        like: a table of C × C outputs, in the dtype that travels.
        weighting: whether means count equally, or by their numbers of examples.
    """

    def __init__(self, like: Tensor, weighting: Literal["uniform", "examples"]) -> None:
        super().__init__({ROUND: torch.tensor(0)}, weighting)  # the last round in which an update arrived
        self.like = like.cpu()
        self._total: tuple[Tensor, Tensor] | None = None  # of that round

    def broadcast(self, client: ClientInfo) -> Broadcast:
        """The others' mean outputs for the client's labels, if there are any."""
        (total, weights), own = self.total(), self.outputs_of(client.id)
        outputs, weights = total - own[0], weights - own[1]
        labels = (weights > 0) & (torch.tensor(client.label_counts) > 0)
        means = (outputs / weights[:, None]).to(self.like.dtype)
        return Broadcast(pack_rows(means, labels) if labels.any() else {})

    def evaluation_broadcast(self, client: ClientInfo) -> Broadcast:
        """Empty: the client's network needs no teacher for an evaluation."""
        return Broadcast({})

    def common_broadcast(self) -> Broadcast:
        """Empty: each client has another teacher."""
        return Broadcast({})

    def state_of(self, update: ClientUpdate) -> State:
        """The mean outputs and their round."""
        return update.state | {ROUND: torch.tensor(self.round)}

    def update_clients(self, clients: Sequence[int]) -> dict[str, float]:
        self.state, self._total = {ROUND: torch.tensor(self.round)}, None
        return super().update_clients(clients)

    def outputs_of(self, client: int) -> tuple[Tensor, Tensor]:
        """A client's outputs of the last round, weighted, ``(C, C)``, and the weights ``(C,)``; zeros if there are none."""
        table = torch.zeros_like(self.like, dtype=torch.float64)
        if client not in self.client_state or (state := self.client_state.get(client))[ROUND] != self.state[ROUND]:
            return table, table[:, 0]
        table, counts = unpack_rows(state, table)
        weights = (counts if self.weighting == "examples" else counts > 0).double()
        return table * weights[:, None], weights

    def total(self) -> tuple[Tensor, Tensor]:
        """The sums over all clients."""
        if self._total is None:
            outputs = torch.zeros_like(self.like, dtype=torch.float64)
            weights = outputs[:, 0]
            for client in self.client_state:
                own = self.outputs_of(client)
                outputs, weights = outputs + own[0], weights + own[1]
            self._total = outputs, weights
        return self._total

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._total = None
