"""FedProto (Tan et al., AAAI 2022, https://arxiv.org/abs/2105.00243), Algorithm 1."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torchmetrics import MetricCollection

from lightning_fed.core import (
    Broadcast,
    ClientInfo,
    EntryMean,
    FederationError,
    Server,
    State,
    class_means,
    class_sums,
    one_per_architecture,
    pack_rows,
    unpack_rows,
    widened,
)
from lightning_fed.methods.families.class_rows import ClassRowsModule, ClassRowsServer
from lightning_fed.models import Backbones
from lightning_fed.models.factory import name_of
from lightning_fed.options import NonNegativeFloat, PositiveInt


class FedProto(ClassRowsModule):
    r"""Clients with networks of any architecture exchange class prototypes, and regularize their features towards the global ones.

    A prototype is the mean feature vector :math:`z` of a class. A round of a client:

    1. Load the global prototypes :math:`\bar C^j` of the classes that have one.
    2. Train the whole network on :math:`L_k + \lambda R`, where :math:`R` is the mean over a batch's examples and the D dimensions
       of :math:`(z_i - \bar C^{y_i})^2`. An example whose class has no global prototype adds nothing, so :math:`R` is 0 in the
       first round.
    3. Send the prototypes of the client's own classes: D floats each, and the number of examples. No weights travel.

    The server's :math:`\bar C^j` is the mean over the clients that sent one; if none did, the previous prototype stays. The logged
    loss includes :math:`\lambda R`. The paper's distance is between the client's prototype and the global one. Its code, followed
    here, uses the distance between examples and the global prototype. With distances summed over the dimensions instead of
    averaged, the equivalent :math:`\lambda` would be D times smaller.

    The accuracy of the way to predict that ``predict`` does not name is logged too: ``prototype_accuracy`` or ``head_accuracy``.
    Monitored: accuracy after aggregation.

    Args:
        backbone: the clients' networks, whose features must be equally wide.
        num_classes: number of classes; None: as many as the data have.
        lam: :math:`\lambda`; 0 trains each client alone. The authors: 1 for MNIST and FEMNIST, 0.1 for CIFAR-10.
        predict: how a client predicts: with its ``head``, or by the nearest of the global ``prototypes``, as in the paper; until
            there are any, with the head.
        candidates: which prototypes can be the nearest: of ``all`` classes that have one, or of the client's ``own`` classes only,
            as the authors evaluate.
        prototypes: which features are averaged: of all training examples with the trained network in eval mode (``trained``), or
            of the passes of the ``last_epoch``, with changing weights and dropout, as in the authors' code.
        **kwargs: see :class:`.FederatedModule`. ``weighting`` is that of clients' prototypes of a class: by the number of
            ``examples``, or ``uniform``, as in the authors' code; then no counts travel.

    Raises:
        FederationError: for a task without classes.
    """

    needs_classes = "prototypes are those of classes: use another method."

    def __init__(
        self,
        backbone: Backbones,
        num_classes: PositiveInt | None = None,
        lam: NonNegativeFloat = 1.0,
        predict: Literal["head", "prototypes"] = "head",
        candidates: Literal["all", "own"] = "all",
        prototypes: Literal["trained", "last_epoch"] = "trained",
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, num_classes, **kwargs)
        self.lam = lam
        self.predicts_with = predict
        self.candidates = candidates
        self.prototypes_of = prototypes
        self.passing: list[tuple[Tensor, Tensor]] = []  # features and labels of the last step's batches
        self.passed_by: State = {}  # sums over the running epoch
        self.own: State = {}  # what is sent

    def build(self) -> None:
        """Build the network and buffers for the global prototypes."""
        super().build()
        self.make_room(self.backbone.head.in_features)

    def payload(self) -> State:
        """The prototypes of the client's own classes, once it has trained."""
        return self.own

    def load_payload(self, payload: State) -> None:
        """Load the global prototypes of the classes that have one."""
        self.own = {}
        super().load_payload(payload)

    def post_training_step(self, batch: Any) -> State:
        """Sum of a batch's features per class, and the numbers of examples."""
        x, y = self.unpack(batch)
        return class_sums(self.backbone.encode(x), y, self.num_classes)

    @property
    def has_post_training_step(self) -> bool:
        return self.prototypes_of == "trained"

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        self.passed_by = {}

    def client_step(self, batch: Any) -> Tensor:
        """Take a step and note its features."""
        self.passing = []
        loss = super().client_step(batch)
        for passed in self.passing if self.prototypes_of == "last_epoch" else ():
            for name, tensor in class_sums(*passed, self.num_classes).items():
                self.passed_by[name] = self.passed_by[name] + tensor if name in self.passed_by else tensor
        return loss

    def after_training(self, sums: State) -> None:
        """Compute the prototypes of the classes that the client has examples of."""
        if sums or self.passed_by:
            means, counts = class_means(sums or self.passed_by)
            weights = counts if self.weighting == "examples" else None
            self.own = pack_rows(means.to(self.rows.dtype), counts > 0, weights)

    def client_loss(self, batch: Any) -> Tensor:
        """The loss of the head's logits plus λR."""
        x, y = self.unpack(batch)
        features, logits = self.backbone.encode_and_classify(x)
        self.passing.append((features.detach(), y))
        apart = ((features - self.rows[y]) * self.known[y, None]).square()  # large features of a class without one add nothing
        return self.criterion(logits, y) + self.lam * apart.mean()

    def forward(self, x: Any) -> Tensor:
        """Scores that the client predicts with ``(B, C)``: the head's logits, or negative distances to the prototypes."""
        return self._predictions(x)[0]

    def _predictions(self, x: Any) -> tuple[Tensor, Tensor]:
        """Scores in the way that ``predict`` names, and in the other way."""
        features, logits = self.backbone.encode_and_classify(x)
        both = logits, self._nearness(features) if self.known.any() else logits
        return both if self.predicts_with == "head" else both[::-1]

    def _nearness(self, features: Tensor) -> Tensor:
        """Negative distances to the prototypes ``(B, C)``; minus infinity for the classes that are no candidates."""
        known = self.known
        if self.candidates == "own":
            if self.client is None or len(self.client.label_counts) != self.num_classes:
                raise FederationError(
                    "FedProto with candidates=own needs the client's label counts: train it in a Federation, or with "
                    "datamodule=data.client(k), or set candidates to all."
                )
            known = known & torch.tensor([count > 0 for count in self.client.label_counts], device=known.device)
        exact = "donot_use_mm_for_euclid_dist"
        features = widened(features)
        return -torch.cdist(features, self.rows.to(features.dtype), compute_mode=exact).masked_fill(~known, torch.inf)

    def configure_metrics(self) -> MetricCollection:
        """The usual metrics, and the accuracy of the other way to predict."""
        metrics = super().configure_metrics()
        metrics.add_metrics({self.other: self.task.measures["accuracy"](self.num_classes)})
        return metrics

    @property
    def other(self) -> str:
        """Name of the metric of the other way to predict."""
        return "prototype_accuracy" if self.predicts_with == "head" else "head_accuracy"

    def update_metrics(self, metrics: MetricCollection, batch: Any) -> None:
        """Add a batch to the metrics of both ways to predict."""
        x, y = self.unpack(batch)
        chosen, other = self._predictions(x)
        for name, metric in metrics.items(keep_base=True, copy_state=False):
            metric.update(*self.task.measured(other if name == self.other else chosen, y))
        self.log_loss(metrics, chosen if self.predicts_with == "head" else other, y)

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        """A server that averages prototypes; check before the first round that all clients' features are equally wide."""
        for client, other in one_per_architecture(self, clients):
            if other.rows.shape != self.rows.shape:
                raise FederationError(
                    f"Client {client.id}'s network, {name_of(other.backbone)}, has {other.rows.shape[1]} features, but "
                    f"{name_of(self.backbone)} has {self.rows.shape[1]}: choose networks whose features are equally wide."
                )
        return PrototypeServer(self.rows.cpu(), self.weighting)


def combine_by_class(updates: Iterable[tuple[State, float]], state: State) -> State:
    r""":math:`\bar C^j = \sum_{k \in S_j} n_k^j C_k^j / \sum_{k \in S_j} n_k^j` over the clients that sent one of class j,
    with equal weights if no counts travel. If none did, the previous prototype stays.
    """
    mean, known = EntryMean({"prototypes": state["prototypes"]}), state["known"]
    for update, _ in updates:
        rows, counts = unpack_rows(update, state["prototypes"])
        mean.add({"prototypes": rows}, rows={"prototypes": counts})
        known = known | (counts > 0)
    return mean.result() | {"known": known}


class PrototypeServer(ClassRowsServer):
    """Keeps the prototypes ``(C, D)``, and which classes have one.

    Args:
        like: a table of prototypes, in the dtype that travels.
        weighting: ``examples`` if counts travel, else ``uniform``.
    """

    def __init__(self, like: Tensor, weighting: Literal["examples", "uniform"]) -> None:
        state = {"prototypes": torch.zeros_like(like), "known": torch.zeros(len(like), dtype=torch.bool)}
        super().__init__(state, weighting, combine=combine_by_class)
        self.like, self.counted = like, weighting == "examples"

    def broadcast(self, client: ClientInfo) -> Broadcast:
        return self.common_broadcast()

    def common_broadcast(self) -> Broadcast:
        """The prototypes that there are."""
        known = self.state["known"]
        return Broadcast(pack_rows(self.state["prototypes"], known) if known.any() else {})
