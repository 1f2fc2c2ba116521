"""FedProto (Tan et al., AAAI 2022, https://arxiv.org/abs/2105.00243), Algorithm 1."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from jsonargparse.typing import NonNegativeFloat
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torchmetrics import MetricCollection

from lightning_fed.core import (
    Broadcast,
    ClientInfo,
    ClientUpdate,
    FederatedModule,
    FederationError,
    Server,
    State,
    WeightedMean,
    default_optimizer,
    one_per_architecture,
)
from lightning_fed.models import Backbones
from lightning_fed.models.factory import name_of
from lightning_fed.options import NonNegativeInt, PositiveInt

PROTOTYPE = "prototypes/"
"""What the name of a class's prototype on the wire begins with; the class's number follows."""

COUNT = "counts/"
"""The same of how many examples it is the mean of."""


class FedProto(FederatedModule):
    r"""Clients of any architecture agree on where each class lies in the space of features, and on nothing else.

    A prototype is the mean feature vector :math:`z` of a class. A round of a client:

    1. Load the global prototypes :math:`\bar C^j` of the classes that have one.
    2. Train the whole network on :math:`L_k + \lambda R`, where :math:`R` is the mean over a batch's examples and the D dimensions
       of :math:`(z_i - \bar C^{y_i})^2`; an example whose class has no global prototype adds nothing. The first round is plain.
    3. Send the prototypes of the client's own classes: D floats each, and the number of examples. No weight travels.

    The server's :math:`\bar C^j` is the mean over those who sent one; where nobody did, the former one stays. The logged loss
    includes :math:`\lambda R`. The paper's distance is between the client's prototype and the global one; its code's, which is used
    here, is between examples and the global prototype. Squared distances, rather than means over dimensions, would be another
    :math:`\lambda`: D times as small.

    Beside the accuracy of what ``predict`` names, that of the other is measured: ``prototype_accuracy`` or ``head_accuracy``.
    Monitored: accuracy after aggregation.

    Args:
        backbone: the clients' networks, whose features must be equally wide.
        num_classes: number of classes; None: as many as the data have.
        lam: :math:`\lambda`; 0 trains each client alone. The authors: 1 for MNIST and FEMNIST, 0.1 for CIFAR-10.
        predict: a client's class is the one its ``head`` says, or that of the nearest of the global ``prototypes``, as the paper
            has it; until there are any, the head's.
        candidates: which prototypes can be the nearest: of ``all`` classes that have one, or of the client's ``own`` classes alone,
            as the authors measure.
        prototypes: what is averaged: the features of all training examples as the trained network sees them in eval mode
            (``trained``), or as they passed by during the ``last_epoch``, while weights changed and dropout was on, as the authors
            do.
        weighting: how clients' prototypes of a class are weighted: by the number of ``examples``, or ``uniform``, as the authors
            do, where no counts travel.
        optimizer: of everything. Default: SGD, lr 0.01.
        epochs: local epochs per round.
        **kwargs: see :class:`.FederatedModule`.

    Raises:
        FederationError: for a task that is not about classes.
    """

    heterogeneous = True
    dynamic_payload = True

    def __init__(
        self,
        backbone: Backbones,
        num_classes: PositiveInt | None = None,
        lam: NonNegativeFloat = 1.0,
        predict: Literal["head", "prototypes"] = "head",
        candidates: Literal["all", "own"] = "all",
        prototypes: Literal["trained", "last_epoch"] = "trained",
        weighting: Literal["examples", "uniform"] = "examples",
        optimizer: OptimizerCallable = default_optimizer,
        epochs: NonNegativeInt = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, num_classes, optimizer, epochs, **kwargs)
        self.check_task()
        self.lam = lam
        self.predicts_with = predict
        self.candidates = candidates
        self.prototypes_of = prototypes
        self.weighting = weighting
        self.knows_any = False  # of the prototypes
        self.passing: tuple[Tensor, Tensor] | None = None  # the last batch's features and labels
        self.passed_by: State = {}  # sums over the running epoch
        self.own: State = {}  # what is sent

    def check_task(self) -> None:
        """Prototypes are those of classes."""
        self.task.need_classes(type(self).__name__, "prototypes are those of classes: use another method.")

    # ------------------------------------------------------------------------------------------------------- the prototypes

    def build(self) -> None:
        """The network, and room for the global prototypes ``(C, D)``."""
        super().build()
        shape = self.num_classes, self.backbone.head.in_features
        self.prototypes: Tensor
        self.known: Tensor
        self.register_buffer("prototypes", torch.zeros(shape), persistent=False)
        self.register_buffer("known", torch.zeros(self.num_classes, dtype=torch.bool), persistent=False)

    def shared_names(self) -> set[str]:
        """No part of the network travels."""
        return set()

    def payload(self) -> State:
        """The prototypes of the client's own classes, once it has trained."""
        return self.own

    def load_payload(self, payload: State) -> None:
        """Take the global prototypes of those classes that have one."""
        self.prototypes.zero_()
        self.known.zero_()
        for name, tensor in payload.items():
            label = class_of(name, self.num_classes)
            if label is None or tensor.shape != self.prototypes.shape[1:]:
                raise FederationError(
                    f"FedProto was sent {name!r} of shape {tuple(tensor.shape)}, expected prototypes of the {self.num_classes} "
                    f"classes of shape {tuple(self.prototypes.shape[1:])}: the clients' networks must have equally wide features."
                )
            self.prototypes[label] = tensor
            self.known[label] = True
        self.knows_any = bool(payload)
        self.own = {}

    def post_training_step(self, batch: Any) -> State:
        """The sum of a batch's features per class, and the examples."""
        x, y = self.unpack(batch)
        return self._sums(self.backbone.encode(x), y)

    @property
    def has_post_training_step(self) -> bool:
        """Where the trained network's features are averaged."""
        return self.prototypes_of == "trained"

    def on_train_epoch_start(self) -> None:
        """Forget what passed by in the epoch before."""
        super().on_train_epoch_start()
        self.passed_by = {}

    def client_step(self, batch: Any) -> Tensor:
        """A step, whose features are noted."""
        loss = super().client_step(batch)
        if self.prototypes_of == "last_epoch" and self.passing is not None:
            for name, tensor in self._sums(*self.passing).items():
                self.passed_by[name] = self.passed_by[name] + tensor if name in self.passed_by else tensor
        self.passing = None
        return loss

    def after_training(self, reviewed: State) -> None:
        """Make the client's prototypes: of the classes that it has examples of."""
        sums = reviewed or self.passed_by
        self.own = {}
        for label in range(self.num_classes) if sums else ():
            if (count := int(sums["examples"][label])) > 0:
                self.own[f"{PROTOTYPE}{label}"] = (sums["features"][label] / count).to(self.prototypes.dtype)
                if self.weighting == "examples":
                    self.own[f"{COUNT}{label}"] = torch.tensor(count, dtype=torch.int32)

    def _sums(self, features: Tensor, y: Tensor) -> State:
        """Features by class, ``(C, D)``, and how many of each there are. A product, since ``index_add`` adds in any order on a
        GPU.
        """
        belongs = y == torch.arange(self.num_classes, device=y.device)[:, None]
        features = wide(features)
        return {"features": belongs.to(features.dtype) @ features, "examples": belongs.sum(1)}

    # ---------------------------------------------------------------------------------------------------------- the learning

    def client_loss(self, batch: Any) -> Tensor:
        """The loss of the head's logits plus λR."""
        x, y = self.unpack(batch)
        features, logits = self.backbone.encode_and_classify(x)
        self.passing = features.detach(), y
        loss = self.criterion(logits, y)
        if self.lam == 0 or not self.knows_any:
            return loss
        apart = (features - self.prototypes[y]).square() * self.known[y, None]
        return loss + self.lam * apart.mean()

    # ------------------------------------------------------------------------------------------------------------ predicting

    def forward(self, x: Any) -> Tensor:
        """What a client predicts with ``(B, C)``: the head's logits, or how near the prototypes are."""
        return self._predictions(x)[0]

    def _predictions(self, x: Any) -> tuple[Tensor, Tensor]:
        """What ``predict`` names, and the other."""
        features, logits = self.backbone.encode_and_classify(x)
        both = logits, self._nearness(features) if self.knows_any else logits
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
        return -torch.cdist(wide(features), wide(self.prototypes), compute_mode=exact).masked_fill(~known, torch.inf)

    def configure_metrics(self) -> MetricCollection:
        """The usual ones, and the accuracy of the other way to predict."""
        metrics = super().configure_metrics()
        metrics.add_metrics({self.other: self.task.measures["accuracy"](self.num_classes)})
        return metrics

    @property
    def other(self) -> str:
        """The metric of the way to predict that was not chosen."""
        return "prototype_accuracy" if self.predicts_with == "head" else "head_accuracy"

    def update_metrics(self, metrics: MetricCollection, batch: Any) -> None:
        """Take a batch into the metrics of both ways to predict."""
        x, y = self.unpack(batch)
        chosen, other = self._predictions(x)
        for name, metric in metrics.items(keep_base=True, copy_state=False):
            metric.update(*self.task.measured(other if name == self.other else chosen, y))

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        """Averages prototypes, which are as wide as everybody's features: they are looked at before the first round."""
        for client, other in one_per_architecture(self, clients):
            if other.prototypes.shape != self.prototypes.shape:
                raise FederationError(
                    f"Client {client.id}'s network, {name_of(other.backbone)}, has {other.prototypes.shape[1]} features, but "
                    f"{name_of(self.backbone)} has {self.prototypes.shape[1]}: choose networks whose features are equally wide."
                )
        return PrototypeServer(self.prototypes.cpu(), self.weighting)


def wide(tensor: Tensor) -> Tensor:
    """In float32 at least: sums and distances of halves lose digits."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def class_of(name: str, num_classes: int, kind: str = PROTOTYPE) -> int | None:
    """The class that a name on the wire is about; None if it is not of that kind, or of no class."""
    number = name.removeprefix(kind)
    if number == name or len(number) > 9 or not number.isdecimal() or f"{kind}{int(number)}" != name or int(number) >= num_classes:
        return None
    return int(number)


class PrototypeServer(Server):
    r"""Class by class the mean over those who sent a prototype: :math:`\bar C^j = \sum_{k \in S_j} n_k^j C_k^j / \sum_{k \in S_j}
    n_k^j`, or with equal weights.

    Args:
        empty: zeros ``(C, D)``, which nobody has sent yet.
        weighting: by the number of examples that each is the mean of, or uniform.
    """

    def __init__(self, empty: Tensor, weighting: Literal["examples", "uniform"]) -> None:
        super().__init__({}, weighting)
        self.empty = torch.zeros_like(empty)

    def expected_payload(self, update: ClientUpdate, sent: Broadcast) -> State:
        """Prototypes of any of the classes, each with its count where that is the weight.

        Raises:
            FederationError: where there is none.
        """
        num_classes, like = len(self.empty), self.empty[0]
        labels = {class_of(name, num_classes, kind) for name in update.state for kind in (PROTOTYPE, COUNT)} - {None}
        if not labels:
            raise FederationError(f"The update of client {update.client} has no prototype, expected one of each class that it has.")
        expected = {f"{PROTOTYPE}{label}": like for label in labels}
        if self.weighting == "examples":
            expected |= {f"{COUNT}{label}": torch.tensor(0, dtype=torch.int32) for label in labels}
        return expected

    def aggregate(self, updates: Iterable[ClientUpdate]) -> dict[str, float]:
        """Merge a round's prototypes; see :meth:`Server.aggregate`."""
        means: dict[str, WeightedMean] = {}
        for update in updates:
            for name, prototype in update.state.items():
                if name.startswith(PROTOTYPE):
                    weight = self._weight(update, name.removeprefix(PROTOTYPE))
                    means.setdefault(name, WeightedMean()).add({name: prototype}, weight)
        merged = {name: mean.result()[name] for name, mean in means.items()}
        self.state = dict(sorted((self.state | merged).items()))
        return {}

    def _weight(self, update: ClientUpdate, label: str) -> int:
        if self.weighting == "uniform":
            return 1
        count = int(update.state[f"{COUNT}{label}"])
        if count < 1:
            raise FederationError(
                f"The update of client {update.client} has {COUNT + label!r} = {count}, expected at least 1: a prototype is the "
                "mean of examples."
            )
        return count

    def state_dict(self) -> State:
        """All prototypes as one tensor ``(C, D)``, and which of them there are: the same shapes in every round."""
        prototypes, known = self.empty.clone(), torch.zeros(len(self.empty), dtype=torch.bool)
        for name, prototype in self.state.items():
            label = int(name.removeprefix(PROTOTYPE))
            prototypes[label], known[label] = prototype, True
        return {"prototypes": prototypes, "known": known}

    def load_state_dict(self, state: State) -> None:
        """Continue from :meth:`state_dict`."""
        labels = state["known"].nonzero().flatten().tolist()
        self.state = dict(sorted((f"{PROTOTYPE}{label}", state["prototypes"][label]) for label in labels))
