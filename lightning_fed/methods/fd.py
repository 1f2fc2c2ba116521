"""FD, federated distillation (Jeong et al. 2018, https://arxiv.org/abs/1811.11479), without its data augmentation (FAug)."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from jsonargparse.typing import NonNegativeFloat
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torch.nn.functional import log_softmax, one_hot

from lightning_fed.core import (
    Broadcast,
    ClientInfo,
    ClientUpdate,
    FederatedModule,
    FederationError,
    Server,
    State,
    check_fits,
    default_optimizer,
    move,
    pack_bits,
    unpack_bits,
)
from lightning_fed.models import Backbones
from lightning_fed.options import NonNegativeInt, PositiveInt

ROWS, LABELS, COUNTS = "outputs/rows", "outputs/labels", "outputs/counts"
"""What travels: mean outputs, a row for each label that there is one for; which labels these are, a bit for each; and, up only, of
how many outputs each row is the mean.
"""

ROUND = "round"


class FD(FederatedModule):
    r"""Clients with different networks tell each other, for each label, what their networks answer on average.

    While a client trains it adds up its network's outputs :math:`p = \mathrm{softmax} f(x)` by label, over all epochs of the round,
    and sends the mean :math:`\bar F_k[l]` for each label l that it saw. From the participants' means the server makes a teacher for
    each client, without the client's own,

    .. math:: G_k[l] = \frac{\sum_{j} \bar F_j[l] - \bar F_k[l]}{M_l - 1},

    over the :math:`M_l` clients j that sent label l; for a client that sent none, the plain mean. In the next round the client
    minimises :math:`\mathrm{CE}(f(x), y) - \gamma \sum_c G_k[y]_c \log p_c`. Where nobody else sent the label, and in the first
    round, the second term is left out. Networks stay with the clients, each drawn independently. Monitored: accuracy after
    aggregation; it equals that before.

    The outputs are probabilities. Re-implementations average logits and take them as the target, a loss without a lower bound.

    Args:
        backbone: the clients' networks; client ``k`` gets entry ``k mod len(list)``.
        num_classes: number of classes C; None: as many as the data have.
        gamma: weight :math:`\gamma` of the teacher's term; 0 is exactly Standalone. Searched elsewhere: {0.01, 0.1, 1}.
        average: what the teacher's term is the mean over: the ``batch``, or its ``taught`` examples, whose label has a teacher.
        weighting: whether each client's mean counts the same (``uniform``, the paper's), or as much as it saw ``examples`` of the
            label.
        optimizer: how a client steps. Default: SGD, lr 0.01.
        epochs: local epochs per round.
        **kwargs: see :class:`.FederatedModule`.
    """

    heterogeneous = True
    dynamic_payload = True

    teachers: Tensor
    """:math:`G_k`, ``(C, C)``, a row per label; zero where there is no teacher."""

    def __init__(
        self,
        backbone: Backbones,
        num_classes: PositiveInt | None = None,
        gamma: NonNegativeFloat = 1.0,
        average: Literal["batch", "taught"] = "batch",
        weighting: Literal["uniform", "examples"] = "uniform",
        optimizer: OptimizerCallable = default_optimizer,
        epochs: NonNegativeInt = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, num_classes, optimizer, epochs, **kwargs)
        self.gamma = gamma
        self.average = average
        self.weighting = weighting
        self.is_taught = False
        self.outputs, self.counts = torch.zeros(0, 0, dtype=torch.float64), torch.zeros(0).long()
        self.check_task()

    def check_task(self) -> None:
        """The teachers are probabilities of classes."""
        self.task.need_cross_entropy("FD", "its teachers are probabilities of classes: use CrossEntropyLoss, or Standalone.")

    # ------------------------------------------------------------------------------------------------------------ the state

    def build(self) -> None:
        """The client's network, and room for its teachers and for what is counted."""
        super().build()
        self.outputs = torch.zeros(self.num_classes, self.num_classes, dtype=torch.float64)
        self.counts = torch.zeros(self.num_classes).long()
        self.register_buffer("teachers", torch.zeros(self.num_classes, self.num_classes), persistent=False)

    def shared_names(self) -> set[str]:
        """No part of a network travels."""
        return set()

    def payload(self) -> State:
        """The mean outputs since the broadcast."""
        seen = self.counts > 0
        means = self.outputs[seen] / self.counts[seen, None]
        return {ROWS: means.to(self.teachers.dtype), LABELS: pack_bits(seen), COUNTS: self.counts[seen].int()}

    def load_payload(self, payload: State) -> None:
        """Take the teachers, if there are any, and begin to count anew."""
        self.outputs, self.counts = torch.zeros_like(self.outputs), torch.zeros_like(self.counts)
        self.is_taught = bool(payload)
        self.teachers.zero_()
        if payload:
            labels = labels_of(payload, self.num_classes)
            expected = {ROWS: self.teachers[: int(labels.sum())], LABELS: pack_bits(labels)}
            check_fits(payload, expected, "The payload for FD")
            self.teachers[labels.to(self.device)] = payload[ROWS].to(self.teachers)

    # --------------------------------------------------------------------------------------------------------- the training

    def client_loss(self, batch: Any) -> Tensor:
        """The loss of a batch, with the teacher's term; the outputs are added up."""
        x, y = self.unpack(batch)
        logits = self(x)
        self.note(logits.detach(), y)
        loss = self.criterion(logits, y)
        return loss + self.gamma * self.lesson(logits, y) if self.gamma and self.is_taught else loss

    def note(self, logits: Tensor, y: Tensor) -> None:
        """Add outputs up by label. What is there is replaced and not changed: FLOPs are counted on a copy that has it, too."""
        labels = one_hot(y, self.num_classes)
        self.outputs = self.outputs.to(y.device) + labels.T.double() @ logits.double().softmax(dim=1)
        self.counts = self.counts.to(y.device) + labels.sum(dim=0)

    def lesson(self, logits: Tensor, y: Tensor) -> Tensor:
        r"""The teacher's term, :math:`-\sum_c G_k[y]_c \log p_c`, a mean as ``average`` says."""
        rows = self.teachers[y]
        each = -(rows * log_softmax(logits, dim=1)).sum(dim=1)
        return each.mean() if self.average == "batch" else each.sum() / (rows.sum(dim=1) > 0).sum().clamp(min=1)

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        """Keeps the mean outputs of each client, and leaves them out of its own teachers."""
        if wrong := [client for client in clients if len(client.label_counts) != self.num_classes]:
            raise FederationError(
                f"FD needs data whose labels are the {self.num_classes} classes that are predicted, but client {wrong[0].id} "
                f"counts {len(wrong[0].label_counts)} labels: give such data, or use Standalone."
            )
        return DistillationServer(self.teachers, self.weighting)


def labels_of(state: State, num_classes: int) -> Tensor:
    """Which labels have a row, ``(C,)`` booleans; none if that is not said as it should be."""
    packed = state.get(LABELS, torch.empty(0))
    if packed.dtype != torch.uint8 or packed.shape != (-(-num_classes // 8),):
        return torch.zeros(num_classes, dtype=torch.bool)
    return unpack_bits(packed, num_classes)


class DistillationServer(Server):
    """Keeps what each client sent last, and teaches each what the others sent in the last round.

    Args:
        like: a table of C × C outputs, in the dtype that travels.
        weighting: whether means count the same, or by the outputs that they are of.
    """

    def __init__(self, like: Tensor, weighting: Literal["uniform", "examples"]) -> None:
        super().__init__({}, weighting)
        self.num_classes, self.dtype = len(like), like.dtype
        self.merged = 0  # the last round in which anything arrived
        self._total: tuple[Tensor, Tensor] | None = None  # of that round

    def broadcast(self, client: ClientInfo) -> Broadcast:
        """The others' mean outputs for the client's labels, as far as there are any."""
        outputs, weights = self.total()
        if (own := self.sent(client.id)) is not None:
            outputs, weights = outputs - own[0], weights - own[1]
        labels = (weights > 0) & (torch.tensor(client.label_counts) > 0)
        if not labels.any():
            return Broadcast({})
        rows = outputs[labels] / weights[labels, None]
        return Broadcast({ROWS: rows.to(self.dtype), LABELS: pack_bits(labels)})

    def evaluation_broadcast(self, client: ClientInfo) -> Broadcast:
        """Nothing: the client's network needs no teacher to be measured."""
        return Broadcast({})

    def expected_payload(self, update: ClientUpdate, sent: Broadcast) -> State:
        """A row and a count for each label that the update says it has."""
        labels = labels_of(update.state, self.num_classes)
        count = int(labels.sum())
        rows = torch.empty(count, self.num_classes, dtype=self.dtype)
        return {ROWS: rows, LABELS: pack_bits(labels), COUNTS: torch.empty(count, dtype=torch.int32)}

    def aggregate(self, updates: Iterable[ClientUpdate]) -> dict[str, float]:
        """Keep what arrives."""
        for update in updates:
            self.round_state.put(update.client, update.state | {ROUND: torch.tensor(self.round)}, self.round)
        if any(True for _ in self.round_state):
            self.merged, self._total = self.round, None
        move(self.round_state, self.client_state, self.round)
        return {}

    def sent(self, client: int) -> tuple[Tensor, Tensor] | None:
        """A client's outputs of the last round, weighted, ``(C, C)``, and the weights ``(C,)``; None if there are none."""
        if client not in self.client_state or (state := self.client_state.get(client))[ROUND] != self.merged:
            return None
        labels, weights = labels_of(state, self.num_classes), torch.zeros(self.num_classes, dtype=torch.float64)
        weights[labels] = state[COUNTS].double() if self.weighting == "examples" else 1.0
        outputs = torch.zeros(self.num_classes, self.num_classes, dtype=torch.float64)
        outputs[labels] = state[ROWS].double() * weights[labels, None]
        return outputs, weights

    def total(self) -> tuple[Tensor, Tensor]:
        """The same of all clients together, in their order."""
        if self._total is None:
            outputs, weights = torch.zeros(self.num_classes, self.num_classes, dtype=torch.float64), torch.zeros(self.num_classes)
            weights = weights.double()
            for client in self.client_state:
                if (sent := self.sent(client)) is not None:
                    outputs, weights = outputs + sent[0], weights + sent[1]
            self._total = outputs, weights
        return self._total

    def state_dict(self) -> State:
        """Of which round the outputs are that count."""
        return {ROUND: torch.tensor(self.merged)}

    def load_state_dict(self, state: State) -> None:
        """Continue from there."""
        self.merged, self._total = int(state[ROUND]), None
