"""DS-FL, distillation-based semi-supervised federated learning (Itahara et al. 2021, https://arxiv.org/abs/2008.06180)."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torch.nn.functional import cross_entropy

from lightning_fed.core import (
    OUTPUTS,
    SERVER,
    Broadcast,
    ClientInfo,
    ClientUpdate,
    Phase,
    PublicDistillation,
    RunOnServer,
    Server,
    State,
    check_fits,
    check_payload,
    mean_of_updates,
)
from lightning_fed.methods.families.classifiers import needs_classifier
from lightning_fed.models import Backbones
from lightning_fed.models.backbone import BackboneFactory
from lightning_fed.options import NonNegativeInt, PositiveFloat, PositiveInt

PROBABILITIES = "open/probabilities"
"""What goes up: a client's probabilities for the round's open examples, ``(n, C)``."""

EXAMPLES, LABELS, LABELLED = "open/examples", "labels/probabilities", "labels/examples"
"""What comes down: numbers of the open examples that a client is to predict; labels ``(n, C)``, and of what examples."""

MODEL, ROUND = "model/", "round"


class DSFL(PublicDistillation):
    r"""Clients with different networks exchange predictions on unlabelled public examples, and distil their sharpened mean.

    The server draws ``open_size`` of the public examples, :math:`o_r`, for each round. A participant trains on its own data and
    sends its probabilities :math:`p_k(d)` of each of them. The server averages and sharpens (entropy reduction, ERA),

    .. math:: \bar p(d) = \frac{1}{K} \sum_k p_k(d), \qquad \hat p(d) = \mathrm{softmax}(\bar p(d) / T),

    and each participant, and the server with its own model, minimises
    :math:`-\sum_c \hat p_c(d) \log \mathrm{softmax}(f(d))_c` over :math:`o_r`. With simple averaging (SA) the label is
    :math:`\bar p(d)` itself. T divides probabilities, not logits: the smaller it is, the more the largest stands out; if none
    does, ERA makes labels *more* uniform.

    Networks stay with the clients, and each is initialized independently. Monitored: accuracy of the server's model on the test
    data of all clients, ``global``; that of the clients' models, after distillation, is ``after/…``. ``server/entropy_before`` and
    ``server/entropy_after`` are the mean entropies (in nats) of :math:`\bar p` and of the labels.

    Args:
        backbone: the clients' networks; client ``k`` gets entry ``k mod len(list)``.
        num_classes: number of classes C; None: as many as the data have.
        server_backbone: the server's network. None: that of client 0.
        aggregation: ``ERA`` or ``SA``.
        temperature: T of ERA. The paper: 0.1.
        open_size: number of public examples in a round; if there are fewer, all of them.
        order: ``train_then_distill``, the paper's: participants distil after the server has merged, in the same round.
            ``distill_then_train``: at the start of its next turn a client distils the last labels, so that a round takes
            one message each way.
        distill_epochs: epochs of distillation in a round, of clients and server.
        distill_batch_size: number of public examples in a distillation step.
        distill_optimizer: optimizer of distillation, fresh in each round. None: ``optimizer``.
        **kwargs: see :class:`.FederatedModule`.

    Raises:
        FederationError: for a task without classes, or without public data.
    """

    monitor_model = "global"
    heterogeneous = True
    weighting = "uniform"
    dynamic_payload = True
    needs_classes = "it exchanges probabilities of classes: use Standalone."

    def __init__(
        self,
        backbone: Backbones,
        num_classes: PositiveInt | None = None,
        server_backbone: BackboneFactory | None = None,
        aggregation: Literal["ERA", "SA"] = "ERA",
        temperature: PositiveFloat = 0.1,
        open_size: PositiveInt = 1000,
        order: Literal["train_then_distill", "distill_then_train"] = "train_then_distill",
        distill_epochs: NonNegativeInt = 5,
        distill_batch_size: PositiveInt = 100,
        distill_optimizer: OptimizerCallable | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, num_classes, **kwargs)
        self.server_factories: list[Any] = [] if server_backbone is None else [server_backbone]
        self.networks.add(self.server_factories)
        self.aggregation = aggregation
        self.temperature = temperature
        self.open_size = open_size
        self.order = order
        self.distill_epochs = distill_epochs
        self.public_batch_size = distill_batch_size
        self.distill_optimizer = distill_optimizer or self.optimizer
        self.public_predictions: State = {}
        self.labels: Tensor | None

    @property
    def is_servers(self) -> bool:
        """Whether this is the server's own model."""
        return self.client is not None and self.client.id == SERVER

    def architecture(self, client: ClientInfo | None) -> Hashable:
        return SERVER if client is not None and client.id == SERVER else super().architecture(client)

    @property
    def _factory(self) -> Any:
        return (self.server_factories or self.networks.factories)[0] if self.is_servers else super()._factory

    def build(self) -> None:
        super().build()
        needs_classifier(self.backbone, "DSFL exchanges what probability each class has")
        self.register_buffer("labels", None, persistent=False)

    def shared_names(self) -> set[str]:
        """Empty on a client: no part of its network travels. On the server, its whole model."""
        return self.state_dict().keys() - self.frozen_names if self.is_servers else set()

    def payload(self) -> State:
        """The client's probabilities for the open examples, once it has predicted them."""
        return self.public_predictions

    def load_payload(self, payload: State) -> None:
        """Load the labels to distil, and the indices of the examples to predict."""
        self.public_predictions, self.predict_public = {}, payload.get(EXAMPLES)
        self.labels, self.public_examples = payload.get(LABELS), payload.get(LABELLED)
        if self.labels is not None:
            assert self.public_examples is not None
            like = torch.empty(len(self.public_examples), self.num_classes, device="meta")
            check_fits({LABELS: self.labels}, {LABELS: like}, "The payload for DSFL")
            self.labels = self.labels.to(self.device)

    def public_phases(self) -> list[Phase]:
        """Distillation, if there are labels."""
        if self.labels is None:
            return []
        optimizer = self.distill_optimizer
        return [Phase("distill", list(self.parameters()), self.distill_loss, optimizer, epochs=self.distill_epochs)]

    def server_phases(self) -> list[Phase]:
        """The same for the server's model."""
        return self.public_phases()

    def distill_loss(self, batch: Any) -> Tensor:
        """Cross-entropy with the labels of indexed examples."""
        x, numbers = self.unpack(batch)
        assert self.labels is not None
        assert self.public_examples is not None
        rows = torch.searchsorted(self.public_examples.to(numbers), numbers)
        return cross_entropy(self(x), self.labels[rows])

    def after_training(self, sums: State) -> None:
        if OUTPUTS in sums:
            self.public_predictions = {PROBABILITIES: sums[OUTPUTS].softmax(dim=1).to(self.dtype)}

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        """A server with its own model, drawn from the running random stream, and the labels for the clients."""
        own = self.for_client(replace(clients[0], id=SERVER), torch.initial_seed())
        return OpenServer(own.shared_state(), self, clients[0].num_public)


def era(mean: Tensor, temperature: float) -> Tensor:
    r"""Entropy reduction aggregation: :math:`\mathrm{softmax}(\bar p / T)`.

    Args:
        mean: mean probabilities :math:`\bar p`, ``(n, C)``.
        temperature: T.

    >>> import torch
    >>> era(torch.tensor([[0.5, 0.3, 0.2]]), 0.1)
    tensor([[0.8438, 0.1142, 0.0420]])
    """
    return (mean / temperature).softmax(dim=1)


def entropy(probabilities: Tensor) -> float:
    """Mean entropy of the rows, in nats."""
    return float(torch.special.entr(probabilities.double()).sum(dim=1).mean())


class OpenServer(Server):
    """Draws a round's open examples, averages the clients' probabilities into labels, sends the labels and distils them itself.

    Args:
        state: its own model.
        method: defines how labels are computed and distilled.
        num_public: number of public examples.
    """

    def __init__(self, state: State, method: DSFL, num_public: int) -> None:
        super().__init__(state, "uniform")
        self.method = method
        self.num_public = num_public
        self.labelled = 0  # the round of the labels
        self.examples = torch.arange(min(method.open_size, num_public), dtype=torch.int32)
        table = torch.zeros(len(self.examples), method.num_classes).to(method.dtype)
        self.labels: State = {LABELS: table, LABELLED: self.examples}

    def on_round_start(self, round: int, cohort: Sequence[ClientInfo]) -> None:
        super().on_round_start(round, cohort)
        self.examples = torch.randperm(self.num_public)[: len(self.examples)].sort().values.int()

    def broadcast(self, client: ClientInfo) -> Broadcast:
        """Indices of the open examples and, for clients that distil first, the last labels."""
        labels = self.labels if self.method.order == "distill_then_train" and self.labelled and self.method.distill_epochs else {}
        return Broadcast({EXAMPLES: self.examples} | labels)

    def evaluation_broadcast(self, client: ClientInfo) -> Broadcast:
        """Empty: a client evaluates its own network."""
        return Broadcast({})

    def global_models(self) -> dict[str, Broadcast]:
        return {"global": Broadcast(self.state, SERVER)}

    def expected_payload(self, update: ClientUpdate, sent: Broadcast) -> State:
        return {PROBABILITIES: self.labels[LABELS]}

    def aggregate(self, updates: Iterable[ClientUpdate]) -> dict[str, float]:
        if not (result := mean_of_updates(((update.state, self.weight(update)) for update in updates), {})):
            return {}
        mean, sharpens = result[PROBABILITIES], self.method.aggregation == "ERA"
        labels = era(mean.double(), self.method.temperature).to(mean.dtype) if sharpens else mean
        self.labels = {LABELS: labels, LABELLED: self.examples}
        self.labelled = self.round
        return {"server/entropy_before": entropy(mean), "server/entropy_after": entropy(self.labels[LABELS])}

    @property
    def has_labels(self) -> bool:
        """Whether there are labels of this round to distil."""
        return self.labelled == self.round and self.method.distill_epochs > 0

    def train_on_public(self, run_on_server: RunOnServer) -> dict[str, float]:
        if not self.has_labels:
            return {}
        row = {}
        for update in run_on_server("train_on_public", [Broadcast(self.state | self.labels, SERVER)]):
            check_payload(update, self.state)
            self.state = update.state
            row = {f"server/{cost}": update.metrics[cost] for cost in ("steps", "flops")}
            row["server/distill_loss"] = update.metrics["train/distill_loss"]
        return row

    def public_training(self, client: ClientInfo) -> Broadcast | None:
        """The labels, for clients that distil in the same round."""
        return Broadcast(self.labels) if self.method.order == "train_then_distill" and self.has_labels else None

    def state_dict(self) -> State:
        """Its own model, and the labels that clients may still distil."""
        return {MODEL + name: tensor for name, tensor in self.state.items()} | self.labels | {ROUND: torch.tensor(self.labelled)}

    def load_state_dict(self, state: State) -> None:
        self.state = {name: state[MODEL + name] for name in self.state}
        self.labels = {name: state[name] for name in self.labels}
        self.labelled = int(state[ROUND])
