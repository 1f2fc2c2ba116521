"""Fed-ET (Cho et al., IJCAI 2022, https://arxiv.org/abs/2204.12703)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from lightning_fed.core import (
    SERVER,
    ClientInfo,
    ClientUpdate,
    FederationError,
    Phase,
    RunOnServer,
    Server,
    State,
    WeightedMean,
    noted,
    widened,
)
from lightning_fed.core.client_state import BLOCK
from lightning_fed.methods.families.distillation import TARGETS, EnsembleModule, EnsembleServer, names_of
from lightning_fed.models import Backbones
from lightning_fed.models.backbone import BackboneFactory
from lightning_fed.options import NonNegativeFloat, NonNegativeInt, PositiveInt

LABELS, OTHERS, DISAGREED = f"{TARGETS}labels", f"{TARGETS}others", f"{TARGETS}disagreed"
"""What the large model learns from: a label of each public example ``(M,)``; the logits of those who said something else
``(M, C)``; and whether there are any ``(M,)``.
"""

Confidence = Literal["logits", "probabilities"]


def default_large_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """SGD with learning rate 5e-3 and momentum 0.9."""
    return torch.optim.SGD(parameters, lr=5e-3, momentum=0.9)


class FedET(EnsembleModule):
    r"""Heterogeneous small models on the clients train a large server model by weighted consensus distillation with diversity.

    A client trains its architecture's model as in FedAvg. For each public example x the clients' models give logits :math:`s_k`,
    and a confidence :math:`v_k`, the variance of these logits over the classes. The server's large model minimises

    .. math:: \mathrm{CE}(\bar z(x), y_s(x)) + \lambda\, \mathrm{KL}\bigl(\mathrm{softmax}(s_{div}(x)) \,\Vert\,
        \mathrm{softmax}(\bar z(x))\bigr), \qquad y_s = \arg\max \sum_k \frac{v_k}{\sum_j v_j} s_k,

    where :math:`s_{div}` is the same weighted mean over the models whose largest logit is not at :math:`y_s`. If there are none,
    the second term is left out. All networks have a last layer of one shape, the head. The large model starts a round with the mean
    of the received heads, and at the end each architecture's mean gets the large model's head.

    Monitored: accuracy of the large model on the test data of all clients, ``global``. That of each architecture is
    ``global_<architecture>/…``, that of each client on its own data ``after/…``. The server's costs are ``server/…``.

    Args:
        backbone: the clients' networks: client ``k`` has entry ``k mod len(list)``, and the server a model of each.
        num_classes: number of classes; None: as many as the data have.
        server_backbone: the large network. None: that of client 0.
        diversity: :math:`\lambda`. The paper: 0.05.
        confidence: the variance over the classes of ``logits``, as in the paper, which grows with their scale; or of
            ``probabilities``. (That of log-probabilities is that of the logits: they differ by a constant.)
        average: whether the second term is the mean over the ``batch``, or over its ``disagreed`` examples.
        distill_steps: steps of the large model in each round. The paper: 128.
        distill_batch_size: number of public examples in a step.
        distill_optimizer: optimizer of the large model, fresh in each round. Default: SGD, lr 5e-3, momentum 0.9.
        **kwargs: see :class:`.EnsembleModule`. ``weighting`` applies to heads as to updates.

    Raises:
        FederationError: for a task without classes, for heads of different shape, or without public data.
    """

    monitor_model = "global"

    labels: Tensor | None
    others: Tensor | None
    disagreed: Tensor | None

    def __init__(
        self,
        backbone: Backbones,
        num_classes: PositiveInt | None = None,
        server_backbone: BackboneFactory | None = None,
        diversity: NonNegativeFloat = 0.05,
        confidence: Confidence = "logits",
        average: Literal["batch", "disagreed"] = "batch",
        distill_steps: NonNegativeInt = 128,
        distill_batch_size: PositiveInt = 64,
        distill_optimizer: OptimizerCallable = default_large_optimizer,
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, num_classes, distill_steps, distill_batch_size, distill_optimizer, **kwargs)
        self.server_factories: list[Any] = [] if server_backbone is None else [server_backbone]
        self.networks.add(self.server_factories)
        self.diversity = diversity
        self.confidence: Confidence = confidence
        self.average = average

    @property
    def _factory(self) -> Any:
        return (self.server_factories or self.networks.factories)[0] if self.place == SERVER else super()._factory

    def build(self) -> None:
        super().build()
        for name in ("labels", "others", "disagreed"):
            self.register_buffer(name, None, persistent=False)

    def load_payload(self, payload: State) -> None:
        """Store the outputs of the clients' models for each public example."""
        self.labels, self.others, self.disagreed = (payload.get(name) for name in (LABELS, OTHERS, DISAGREED))

    def server_phases(self) -> list[Phase]:
        parameters = list(self.parameters())
        return [Phase("distill", parameters, self.student_loss, self.distill_optimizer, steps=self.distill_steps)]

    def student_loss(self, batch: Any) -> Tensor:
        """Loss of a batch of indexed examples."""
        x, numbers = self.unpack(batch)
        assert self.labels is not None
        logits = self(x)
        loss = cross_entropy(logits, self.labels[numbers])
        if self.others is None:
            return loss
        assert self.disagreed is not None
        there = self.disagreed[numbers]
        others = widened(self.others[numbers]).log_softmax(1)
        each = kl_div(logits.log_softmax(1), others, reduction="none", log_target=True).sum(1)
        count = torch.tensor(len(there)) if self.average == "batch" else there.sum().clamp(min=1)
        return loss + self.diversity * (each * there).sum() / count

    def head_names(self) -> tuple[str, ...]:
        """Names of the last layer's tensors in the payload: its weight, and its bias if it has one."""
        own = self.backbone.head_names()
        return tuple(f"backbone.{name}" for name, _ in self.backbone.named_parameters() if name in own)

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        """A server with the large model and a mean for each architecture. This module's own tensors are those of the first; the
        others are drawn from the running random stream.
        """
        groups = self.groups(clients)
        modules = {place: self.drawn(place, clients) for place in (*sorted({0, *groups.values()}), SERVER)}
        states = {place: module.shared_state() for place, module in modules.items()}
        heads = {place: module.head_names() for place, module in modules.items()}
        shapes = {place: [tuple(states[place][name].shape) for name in names] for place, names in heads.items()}
        for place, shape in shapes.items():
            if shape != shapes[SERVER]:
                raise FederationError(
                    f"FedET gives all networks one last layer, but that of backbone {place} has shapes {shape} and the server's "
                    f"{shapes[SERVER]}: choose networks that have as many features."
                )
        names = {SERVER: "global"} | names_of(self.networks.factories, states.keys() - {SERVER})
        return LargeServer(self, states, groups, names, SERVER, heads=heads)


@dataclass(frozen=True)
class Consensus:
    """Consensus of the clients' models for n examples.

    Args:
        labels: :math:`y_s`, ``(n,)``.
        others: :math:`s_{div}`, ``(n, C)``; zeros if no model disagrees.
        disagreed: whether any model disagrees, ``(n,)``.
    """

    labels: Tensor
    others: Tensor
    disagreed: Tensor


def confidence_weights(logits: Tensor, confidence: Confidence) -> Tensor:
    r"""The weights :math:`v_k / \sum_j v_j` of K clients for each of n examples, ``(K, n)``; equal if all variances are 0.

    Args:
        logits: ``(K, n, C)``.
        confidence: see :class:`FedET`.
    """
    variance = (logits if confidence == "logits" else logits.softmax(dim=2)).var(dim=2, correction=0)
    variance = variance.clamp(min=torch.finfo(variance.dtype).tiny)
    return variance / variance.sum(dim=0)


def consensus(logits: Tensor, confidence: Confidence = "logits") -> Consensus:
    """The label of the confidence-weighted mean, and the weighted mean of the models that predict another label.

    Args:
        logits: of K clients, ``(K, n, C)``.
        confidence: see :class:`FedET`.
    """
    weights = confidence_weights(logits, confidence)
    labels = torch.einsum("kn,knc->nc", weights, logits).argmax(dim=1)
    against = logits.argmax(dim=2) != labels
    weights = weights * against
    total = weights.sum(dim=0)
    others = torch.einsum("kn,knc->nc", weights / total.where(total > 0, 1), logits)
    return Consensus(labels, others, against.any(dim=0))


class LargeServer(EnsembleServer):
    """Averages within each architecture and distils all received models into a large one, which exchanges heads with them.

    Args:
        *args: see :class:`.EnsembleServer`; :data:`.SERVER` is the large model's index, and the weighting applies to heads, too.
        heads: names of each architecture's last layer, in one order.
    """

    method: FedET

    def __init__(self, *args: Any, heads: Mapping[int, Sequence[str]]) -> None:
        super().__init__(*args)
        self.heads = heads

    def aggregate(self, updates: Iterable[ClientUpdate]) -> dict[str, float]:
        """Merge a round's updates, each with those of its architecture, and give the large model the mean of their heads."""
        mean = WeightedMean()

        def add_head(update: ClientUpdate) -> None:
            own = self.heads[self.groups[update.client]]
            mean.add({str(place): update.state[name] for place, name in enumerate(own)}, self.weight(update))

        super().aggregate(noted(updates, add_head))
        if head := mean.result():
            own = {name: head[str(place)] for place, name in enumerate(self.heads[SERVER])}
            self._hold(self.states | {SERVER: self.states[SERVER] | own})
        return {}

    def train_on_public(self, run_on_server: RunOnServer) -> dict[str, float]:
        """Distil all received models into the large one, with one in memory at a time; then pass its head on."""
        teachers = sorted(self.round_state)
        if not teachers:
            return {}
        row = self._distill(teachers, run_on_server) if self.method.distill_steps else {}
        self.round_state.clear()
        head = [self.states[SERVER][name] for name in self.heads[SERVER]]
        for place in self.states.keys() - {SERVER}:
            copies = (tensor.clone() for tensor in head)  # a file of a checkpoint holds no tensor twice
            self._hold(self.states | {place: self.states[place] | dict(zip(self.heads[place], copies, strict=True))})
        return row

    def _distill(self, teachers: Sequence[int], run_on_server: RunOnServer) -> dict[str, float]:
        flops = self.collect_predictions(teachers, run_on_server)
        rows, classes = self.shape
        outputs, at_once = self.predictions(teachers), max(1, BLOCK // (classes * len(teachers)))
        labels, disagreed = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.bool)
        others = torch.empty(self.shape, dtype=self.dtype) if self.method.diversity > 0 else None
        for start in range(0, rows, at_once):
            stop = min(start + at_once, rows)
            logits = outputs.columns(start * classes, stop * classes).view(len(teachers), stop - start, classes)
            found = consensus(logits, self.method.confidence)
            labels[start:stop], disagreed[start:stop] = found.labels, found.disagreed
            if others is not None:
                others[start:stop] = found.others
        targets = {LABELS: labels} if others is None else {LABELS: labels, OTHERS: others, DISAGREED: disagreed}
        row = {"server/teachers": float(len(teachers)), "server/disagreement": float(disagreed.double().mean())}
        row |= self.distill([SERVER], targets, run_on_server)
        row["server/flops"] += flops
        return row
