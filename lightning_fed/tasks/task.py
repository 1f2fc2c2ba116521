"""What is learned: one class of several, yes or no, several labels, numbers, or risks. Each has its usual loss and its metrics."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torchmetrics as tm
from torch import Tensor, nn
from torch.nn import CrossEntropyLoss
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from torchmetrics import Metric, MetricCollection
from torchmetrics import classification as of_classes

from lightning_fed.errors import FederationError
from lightning_fed.nn.cox import CoxLoss
from lightning_fed.tasks.metrics import AUROC, F1, ConcordanceIndex, Matthews, MeanPearson, MeanSpearman

Measures = Mapping[str, Callable[[int], Metric]]
"""Metrics by name, given the number of outputs."""

TaskName = Literal["multiclass", "binary", "multilabel", "regression", "survival"]

if TYPE_CHECKING:
    Loss = Callable[[Tensor, Tensor], Tensor]
    Metrics = dict[str, Metric]
else:
    # The command line would list all subclasses of a narrower type, and know no function.
    Loss = Callable[..., Any]
    Metrics = dict[str, Callable[..., Any]]


class MeasuredNetwork(Protocol):
    """A network that says itself how its predictions of classes, or of texts, are measured."""

    measures: tuple[str, ...]
    """Names of the metrics that can be monitored, the usual one first."""

    lower_is_better: tuple[str, ...]
    """Those of them of which less is better, where the data score them."""

    def metrics(self, monitor: str) -> dict[str, Metric]:
        """What is measured batch by batch, where ``monitor`` is the metric that is used."""


class Task(nn.Module, ABC):
    """What a module learns to predict: the loss of outputs and targets, metrics, and which of them is monitored. Networks have as
    many outputs as there are classes, labels or numbers.

    Args:
        loss: of outputs and targets. A copy of it moves with the module; its buffers (class weights) are in no state dict. None:
            the task's usual one.
        metrics: more metrics of outputs and targets, by name.
        monitor: the name of the metric that is monitored; None: the first.

    Attributes:
        measures: what can be measured, by name.
        always: what is measured in any case; the first is monitored unless another is chosen.
    """

    name: ClassVar[TaskName]
    measures: ClassVar[Measures]
    always: ClassVar[tuple[str, ...]]

    adds_up: ClassVar[bool] = True
    """Whether the loss of a batch is a mean over its examples, so that those of several batches make that of all of them."""

    def __init__(self, loss: Loss | None = None, metrics: Metrics | None = None, monitor: str | None = None) -> None:
        super().__init__()
        if wrong := [name for name, value in (metrics or {}).items() if not isinstance(value, Metric)]:
            raise FederationError(f"metrics has {wrong[0]!r}, which is no torchmetrics.Metric: give objects of its subclasses.")
        self.loss = own_copy(loss)
        self.more_metrics = dict(metrics or {})
        self.monitor = monitor

    def copied(self, name: str | None = None) -> "Task":
        """The same for another module, or, by its name, another task with the same loss, metrics and monitor."""
        return TASKS[name or self.name](self.loss, self.more_metrics, self.monitor)

    def unpack(self, batch: Any, network: Any) -> tuple[Any, Tensor]:
        """What a network takes of a batch, and what it is to predict.

        Args:
            batch: a pair of these; or a dict of what a network takes by name and ``labels``, as collators of the transformers
                library make it.
            network: that predicts. Its ``targets_of`` takes the targets out of a dict, if it has one; its ``select_learned`` leaves
                out what is not learned.

        Raises:
            FederationError: for a dict without what is to be predicted.
        """
        if not isinstance(batch, Mapping):
            inputs, targets = batch
            return self._selected(inputs, targets, network)
        inputs = dict(batch)
        try:
            targets = network.targets_of(inputs) if hasattr(network, "targets_of") else inputs.pop("labels")
        except KeyError as error:
            raise FederationError(
                f"A batch has {', '.join(batch)}, but no {error.args[0]}: give what is to be predicted under that name."
            ) from error
        return self._selected(next(iter(inputs.values())) if inputs.keys() == {"pixel_values"} else inputs, targets, network)

    @staticmethod
    def _selected(inputs: Any, targets: Tensor, network: Any) -> tuple[Any, Tensor]:
        """What a network that answers what is learned alone makes of a batch."""
        return network.select_learned(inputs, targets) if hasattr(network, "select_learned") else (inputs, targets)

    @abstractmethod
    def usual_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss unless another is given, the mean over a batch."""

    def prepared(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and targets as a loss takes them: of one shape and type where it compares them number by number."""
        return outputs, targets

    def measured(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and targets as metrics take them."""
        return self.prepared(outputs, targets)

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss: the one that was given, or the usual one."""
        prepared = self.prepared(outputs, targets)
        return self.usual_loss(*prepared) if self.loss is None else self.loss(*prepared)

    def terms(self, targets: Tensor) -> int:
        """How many terms the loss is the mean over, where it is one. Weights of classes are not counted."""
        return len(targets)

    def need_cross_entropy(self, method: str, why: str) -> None:
        """Refuse a loss that is no cross-entropy of classes, for methods that are defined by what they do to a softmax.

        Args:
            method: which that is.
            why: what it does, and how to do without, to complete the error.

        Raises:
            FederationError: for another loss, or another task.
        """
        if self.name != "multiclass" or not (self.loss is None or isinstance(self.loss, CrossEntropyLoss)):
            what = f"the loss {type(self.loss).__name__}" if self.name == "multiclass" else f"task {self.name!r}"
            raise FederationError(f"{method} got {what}, but {why}")

    def need_classes(self, method: str, why: str) -> None:
        """Raises :class:`FederationError` if something else than one class of several is predicted; ``why`` completes it."""
        if self.name != "multiclass":
            raise FederationError(f"{method} got task {self.name!r}, but {why}")

    def configure_metrics(self, outputs: int, network: MeasuredNetwork | None = None) -> MetricCollection:
        """What validation and test data are measured with."""
        if network is not None:
            metrics = network.metrics(self.monitor or network.measures[0])
        else:
            names = dict.fromkeys((*self.always, *(name for name in self.measures if name == self.monitor)))
            metrics = {name: self.measures[name](outputs) for name in names}
        return MetricCollection({**metrics, **self.more_metrics}, compute_groups=False)

    def higher_is_better(self, monitor: str, metrics: MetricCollection, network: MeasuredNetwork | None = None) -> bool:
        """Whether a metric is to be large; an error, say, is not. Metrics know, or the network where the data measure it."""
        if network is not None and (self.monitor or network.measures[0]) in network.lower_is_better:
            return False
        known = dict(metrics.items(keep_base=True, copy_state=False))
        return getattr(known.get(monitor), "higher_is_better", None) is not False

    def choose_monitor(self, metrics: MetricCollection, network: MeasuredNetwork | None = None) -> str:
        """The name of the metric that is monitored: the one that was asked for, else the network's first, which the data may
        measure; else the task's; where that is not measured, any that is.

        Raises:
            FederationError: if the one that was asked for is not measured.
        """
        measured = [str(name) for name in metrics.keys(keep_base=True)]
        known = dict.fromkeys((*(self.measures if network is None else network.measures), *self.more_metrics))
        if self.monitor is not None and self.monitor not in (measured if network is None else known):
            raise FederationError(
                f"metric is {self.monitor!r}, but what can be measured is {', '.join(known)}: choose one of these, or give "
                "yours in metrics."
            )
        if network is not None:
            return self.monitor or network.measures[0]
        return next(name for name in (self.monitor, self.always[0], *measured) if name in measured)


class Multiclass(Task):
    """One class of several: logits ``(B, C, …)``, targets ``(B, …)``. ``f1`` is that of class 1 where there are two classes, as
    GLUE scores MRPC and QQP, and else the mean over the classes.
    """

    name = "multiclass"
    measures: ClassVar[Measures] = {
        "accuracy": partial(of_classes.MulticlassAccuracy, average="micro", validate_args=False),
        "f1": F1,
        "matthews": Matthews,
    }
    always = ("accuracy",)

    def usual_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets)

    def terms(self, targets: Tensor) -> int:
        """All targets that the loss does not ignore, tokens of texts among them."""
        ignored = getattr(self.loss, "ignore_index", CrossEntropyLoss().ignore_index)
        return int((targets != ignored).sum())


class Binary(Task):
    """Yes or no: one logit ``(B, 1)``, targets ``(B,)`` or ``(B, 1)`` of 0 and 1. Metrics get probabilities; yes is predicted above
    0.5. ``auroc`` is no number where all examples are of one class.
    """

    name = "binary"
    measures: ClassVar[Measures] = {
        "accuracy": lambda outputs: of_classes.BinaryAccuracy(),
        "f1": lambda outputs: of_classes.BinaryF1Score(),
        "auroc": lambda outputs: AUROC(),
    }
    always = ("accuracy",)

    def usual_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy, the mean over a batch."""
        return binary_cross_entropy_with_logits(outputs, targets)

    def prepared(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return compared(outputs, targets)

    def measured(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities, and targets as integers."""
        outputs, targets = compared(outputs, targets)
        return outputs.sigmoid(), targets.long()


class Multilabel(Task):
    """Any number of labels at once: logits ``(B, L)``, targets ``(B, L)`` of 0 and 1. Metrics get probabilities; a label counts as
    predicted from 0.5 on. ``f1`` is the mean over the labels, ``accuracy`` the share of labels that are right, ``exact_match`` that
    of examples of which all are.
    """

    name = "multilabel"
    measures: ClassVar[Measures] = {
        "f1": partial(of_classes.MultilabelF1Score, average="macro"),
        "accuracy": partial(of_classes.MultilabelAccuracy, average="micro"),
        "exact_match": of_classes.MultilabelExactMatch,
        "average_precision": of_classes.MultilabelAveragePrecision,
    }
    always = ("f1", "accuracy")

    def configure_metrics(self, outputs: int, network: MeasuredNetwork | None = None) -> MetricCollection:
        if outputs == 1:
            raise FederationError("task is 'multilabel', but there is one label: give task 'binary', of one label yes or no.")
        return super().configure_metrics(outputs, network)

    def usual_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy of each label, the mean over all."""
        return binary_cross_entropy_with_logits(outputs, targets)

    def prepared(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return compared(outputs, targets)

    def measured(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities, and targets as integers."""
        return outputs.sigmoid(), targets.reshape(outputs.shape).long()


class Regression(Task):
    """Numbers: outputs ``(B, D)``, targets ``(B, D)``, or ``(B,)`` where there is one."""

    name = "regression"
    measures: ClassVar[Measures] = {
        "rmse": lambda outputs: tm.MeanSquaredError(squared=False, num_outputs=1),
        "mae": lambda outputs: tm.MeanAbsoluteError(),
        "r2": lambda outputs: tm.R2Score(),
        "pearson": lambda outputs: MeanPearson(num_outputs=outputs),
        "spearman": MeanSpearman,
    }
    always = ("rmse", "mae")

    def usual_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The squared error, the mean over all numbers."""
        return mse_loss(outputs, targets)

    def prepared(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Of one shape; without a second dimension where there is one number."""
        return compared(outputs.squeeze(1) if outputs.dim() == 2 and outputs.shape[1] == 1 else outputs, targets)


class Survival(Task):
    """Time to an event, such as a death: one risk ``(B, 1)`` per example, the larger, the earlier; targets ``(B, 2)``: whether
    there was an event (1), or the example was only seen so long without one (0), and the time. ``c_index`` is no number without a
    pair of examples of which it is known who was first.
    """

    name = "survival"
    adds_up = False
    measures: ClassVar[Measures] = {"c_index": lambda outputs: ConcordanceIndex()}
    always = ("c_index",)
    partial_likelihood = CoxLoss()

    def usual_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cox's partial likelihood of the batch; ties are Breslow's. See :class:`lightning_fed.nn.CoxLoss`."""
        loss: Tensor = self.partial_likelihood(outputs, targets)
        return loss

    def prepared(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Risks ``(B,)``, and targets as they are."""
        if outputs.shape[1:] not in ((), (1,)) or targets.shape != (len(outputs), 2):
            raise FederationError(
                f"The network gave outputs of shape {tuple(outputs.shape)} for targets of shape {tuple(targets.shape)}: a risk per "
                "example is expected (num_classes 1), and of the targets event (0 or 1) and time."
            )
        return outputs.flatten(), targets


def compared(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Targets in the shape and type of the outputs.

    Raises:
        FederationError: if there are not as many: PyTorch would repeat them.
    """
    if outputs.numel() != targets.numel():
        raise FederationError(
            f"The network gave outputs of shape {tuple(outputs.shape)} for targets of shape {tuple(targets.shape)}: set "
            "num_classes to the number of values that are predicted for an example."
        )
    return outputs, targets.reshape(outputs.shape).to(outputs.dtype)


TASKS: dict[str, type[Task]] = {task.name: task for task in (Multiclass, Binary, Multilabel, Regression, Survival)}
"""The tasks by their names, which torchmetrics has for three of them."""


def own_copy(loss: Loss | None) -> Loss | None:
    """A loss that a module can hold: a copy whose buffers go where the module goes, and are in no state dict."""
    if not isinstance(loss, nn.Module):
        return loss
    loss = copy.deepcopy(loss)
    for module in loss.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, buffer, persistent=False)
    return loss
