"""Tasks: multiclass, binary, multilabel, regression and survival. Each has a default loss and metrics."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch
import torchmetrics as tm
from torch import Tensor, nn
from torch.nn import CrossEntropyLoss, NLLLoss
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss, nll_loss
from torchmetrics import Metric, MetricCollection
from torchmetrics import classification as of_classes

from lightning_fed.errors import FederationError
from lightning_fed.nn.cox import CoxLoss
from lightning_fed.tasks.metrics import AUROC, F1, R2, ConcordanceIndex, Matthews, MeanPearson, MeanSpearman
from lightning_fed.tensors import widened

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
    """A network that defines the metrics of its predictions of classes or texts itself."""

    measures: tuple[str, ...]
    """Names of the metrics that can be monitored, the usual one first."""

    lower_is_better: tuple[str, ...]
    """Those of them of which less is better, where the data score them."""

    def metrics(self, monitor: str) -> dict[str, Metric]:
        """Metrics that are computed batch by batch, if ``monitor`` is the monitored metric."""


class Task(nn.Module, ABC):
    """Defines what a module learns to predict: the loss of outputs and targets, the metrics, and the monitored one. Networks have
    as many outputs as there are classes, labels or numbers.

    Args:
        loss: of outputs and targets. A copy of it moves with the module; its buffers (class weights) are in no state dict. None:
            the task's default.
        metrics: further metrics of outputs and targets, by name.
        monitor: the name of the monitored metric; None: the first.

    Attributes:
        measures: available metrics, by name.
        always: metrics that are always computed; the first is monitored unless another is chosen.
    """

    name: ClassVar[TaskName]
    measures: ClassVar[Measures]
    always: ClassVar[tuple[str, ...]]

    adds_up: ClassVar[bool] = True
    """Whether the loss of a batch is a mean over its examples, so that those of several batches make that of all of them."""

    def __init__(self, loss: Loss | None = None, metrics: Metrics | None = None, monitor: str | None = None) -> None:
        super().__init__()
        if not hasattr(metrics or {}, "items"):
            raise FederationError(f"metrics is a {type(metrics).__name__}: give metrics by name, {{'f1': MulticlassF1Score(10)}}.")
        if loss is not None and not callable(loss):
            raise FederationError(f"loss is {loss!r}: give a function of outputs and targets, such as torch.nn.CrossEntropyLoss().")
        if isinstance(loss, nn.Module | partial) and (reduction := setting_of(loss, "reduction", "mean")) in ("sum", "none"):
            raise FederationError(
                f"loss is a {type(loss).__name__} with reduction={reduction!r}, but a loss must be a mean: leave it out."
            )
        if wrong := [name for name, value in (metrics or {}).items() if not isinstance(value, Metric)]:
            raise FederationError(f"metrics has {wrong[0]!r}, which is no torchmetrics.Metric: give objects of its subclasses.")
        if "loss" in (metrics or {}):
            raise FederationError("metrics has 'loss', which is the name of the loss that is logged: give it another name.")
        self.loss = own_copy(loss)
        self.more_metrics = dict(metrics or {})
        self.monitor = monitor

    def copied(self, name: str | None = None) -> "Task":
        """A copy for another module or, by its name, another task with the same loss, metrics and monitor."""
        return TASKS[name or self.name](self.loss, self.more_metrics, self.monitor)

    def unpack(self, batch: Any, network: Any) -> tuple[Any, Tensor]:
        """The inputs and the targets of a batch.

        Args:
            batch: a pair of these; or a dict of the network's inputs by name and ``labels``, as collators of the transformers
                library return it.
            network: the network. Its ``targets_of``, if any, takes the targets out of a dict; its ``select_learned`` leaves
                out tokens that are not learned.

        Raises:
            FederationError: for a dict without the targets.
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
        """A batch for a network that computes outputs only for learned tokens."""
        return network.select_learned(inputs, targets) if hasattr(network, "select_learned") else (inputs, targets)

    @abstractmethod
    def usual_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The default loss, the mean over a batch."""

    def prepared(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and targets in the form of the loss: of one shape and type if it compares them element-wise."""
        return outputs, targets

    def measured(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs, in at least float32, and targets in the form of the metrics."""
        return self.prepared(widened(outputs), targets)

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss: the given one, or the default."""
        prepared = self.prepared(outputs, targets)
        return self.usual_loss(*prepared) if self.loss is None else self.loss(*prepared)

    def check_values(self, targets: Tensor) -> None:
        """Refuse targets that are not of this task: losses may take them, but metrics would take them for others. Default: nothing
        is refused.

        Raises:
            FederationError: says what was got and what is expected.
        """

    def check_targets(self, outputs: Tensor, targets: Tensor, num_classes: int) -> None:
        """Refuse targets that no prediction can match. Default: nothing is refused."""

    def learned(self, targets: Tensor) -> int:
        """Number of targets that the loss does not ignore."""
        return len(targets)

    def terms(self, targets: Tensor) -> float:
        """Number of terms that the loss is the mean of, if it is a mean; of a weighted mean, the sum of the weights."""
        return self.learned(targets)

    def need_cross_entropy(self, method: str, why: str) -> None:
        """Refuse a loss other than the cross-entropy of classes, for methods that are defined in terms of a softmax.

        Args:
            method: its name.
            why: what it needs the softmax for, and the alternative, to complete the error.

        Raises:
            FederationError: for another loss, or another task.
        """
        if self.name != "multiclass" or not (self.loss is None or isinstance(self.loss, CrossEntropyLoss)):
            what = f"the loss {type(self.loss).__name__}" if self.name == "multiclass" else f"task {self.name!r}"
            raise FederationError(f"{method} got {what}, but {why}")

    def need_classes(self, method: str, why: str) -> None:
        """Raises :class:`FederationError` for other tasks than multiclass; ``why`` completes the error."""
        if self.name != "multiclass":
            raise FederationError(f"{method} got task {self.name!r}, but {why}")

    def configure_metrics(self, outputs: int, network: MeasuredNetwork | None = None) -> MetricCollection:
        """Metrics of validation and test data."""
        if network is not None:
            metrics = network.metrics(self.monitor or network.measures[0])
        else:
            names = dict.fromkeys((*self.always, *(name for name in self.measures if name == self.monitor)))
            metrics = {name: self.measures[name](outputs) for name in names}
        return MetricCollection({**metrics, **self.more_metrics}, compute_groups=False)

    def higher_is_better(self, monitor: str, metrics: MetricCollection, network: MeasuredNetwork | None = None) -> bool:
        """Whether higher values of a metric are better. The metric knows, or the network if the data compute it."""
        if network is not None and (self.monitor or network.measures[0]) in network.lower_is_better:
            return False
        known = dict(metrics.items(keep_base=True, copy_state=False))
        return getattr(known.get(monitor), "higher_is_better", None) is not False

    def choose_monitor(self, metrics: MetricCollection, network: MeasuredNetwork | None = None) -> str:
        """Name of the monitored metric: the requested one, else the network's first, which the data may compute, else the task's;
        if that is not available, any that is.

        Raises:
            FederationError: if the requested metric is not available.
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
    """One class of several: logits ``(B, C, …)``, targets ``(B, …)``. With two classes ``f1`` is that of class 1, as
    GLUE scores MRPC and QQP, otherwise the mean over the classes.
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

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss; of tokens or pixels 0, not the NaN of a mean over nothing, if all of them are ignored."""
        loss = super().criterion(outputs, targets)
        if targets.dim() == 1 and len(targets):  # a label per example: the check would take as long as the loss
            return loss
        return torch.where(self._counted(targets).any(), loss, torch.zeros_like(loss))

    def measured(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and targets without those that the loss ignores."""
        outputs, counted = widened(outputs), self._counted(targets)
        return (outputs, targets) if counted.all() else (outputs.movedim(1, -1)[counted], targets[counted])

    def check_values(self, targets: Tensor) -> None:
        """Refuse soft and one-hot targets, each of whose numbers would be measured as a class."""
        if targets.is_floating_point():
            raise FederationError(
                f"The targets are {targets.dtype} of shape {tuple(targets.shape)}, but classes are expected as whole numbers from "
                "0: give argmax(1) of one-hot targets; for numbers set the data's problem to 'regression'."
            )

    def check_targets(self, outputs: Tensor, targets: Tensor, num_classes: int) -> None:
        """Refuse targets that are no classes if the loss may ignore them unnoticed: metrics would count them as wrong. PyTorch's
        losses refuse what they do not ignore.

        Raises:
            FederationError: names one.
        """
        if self.loss is None or setting_of(self.loss, "ignore_index", None) is not None:
            return
        classes = max(num_classes, *outputs.shape[1:2])
        wrong = ((targets < 0) | (targets >= classes)) & self._counted(targets)
        if wrong.any():
            found = int(targets[wrong][0])
            raise FederationError(
                f"A target is {found}, but classes go from 0 to {classes - 1}, so that it would count as wrong: if the loss "
                f"ignores it, give the loss an attribute ignore_index (loss.ignore_index = {found})."
            )

    def learned(self, targets: Tensor) -> int:
        """Number of targets that the loss does not ignore, including tokens of texts."""
        return int(self._counted(targets).sum())

    def terms(self, targets: Tensor) -> float:
        """Number of these targets; with class weights, which the losses of PyTorch divide by, the sum of the targets' weights."""
        loss = self.loss.func if isinstance(self.loss, partial) else self.loss
        divides = isinstance(loss, CrossEntropyLoss | NLLLoss) or loss in (cross_entropy, nll_loss)
        weight = setting_of(self.loss, "weight", None) if divides else None
        return self.learned(targets) if weight is None else float(weight[targets[self._counted(targets)]].sum())

    def _counted(self, targets: Tensor) -> Tensor:
        return targets != setting_of(self.loss, "ignore_index", CrossEntropyLoss().ignore_index)


class Labels(Task):
    """Labels of yes or no, each with a logit; what is measured are their probabilities."""

    def usual_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy of each label, the mean over all."""
        return binary_cross_entropy_with_logits(outputs, targets)

    def prepared(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return compared(outputs, targets)

    def check_values(self, targets: Tensor) -> None:
        """Refuse other targets than 0 and 1."""
        if (found := neither(targets)) is not None:
            raise FederationError(f"A target is {found:g}, expected 0 or 1 (no or yes), as the task is {self.name!r}.")

    def measured(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities, and targets as integers. Ranks need double precision: from a logit of 17 on, single has probability 1."""
        wide = outputs.double() if outputs.device.type != "mps" else widened(outputs)  # which has no double
        outputs, targets = compared(wide, targets)
        return outputs.sigmoid(), targets.long()


class Binary(Labels):
    """Yes or no: one logit ``(B, 1)``, targets ``(B,)`` or ``(B, 1)`` of 0 and 1. Metrics get probabilities; yes is predicted above
    0.5. ``auroc`` is NaN if all examples are of one class.
    """

    name = "binary"
    measures: ClassVar[Measures] = {
        "accuracy": lambda outputs: of_classes.BinaryAccuracy(),
        "f1": lambda outputs: of_classes.BinaryF1Score(),
        "auroc": lambda outputs: AUROC(),
    }
    always = ("accuracy",)


class Multilabel(Labels):
    """Any number of labels at once: logits ``(B, L)``, targets ``(B, L)`` of 0 and 1. Metrics get probabilities; a label counts as
    predicted above 0.5. ``f1`` is the mean over the labels, ``accuracy`` the share of correct labels, ``exact_match`` the share
    of examples with only correct labels.
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


class Regression(Task):
    """Numbers: outputs ``(B, D)``, targets ``(B, D)``, or ``(B,)`` for a single number."""

    name = "regression"
    measures: ClassVar[Measures] = {
        "rmse": lambda outputs: tm.MeanSquaredError(squared=False, num_outputs=1),
        "mae": lambda outputs: tm.MeanAbsoluteError(),
        "r2": lambda outputs: R2(),
        "pearson": lambda outputs: MeanPearson(),
        "spearman": MeanSpearman,
    }
    always = ("rmse", "mae")

    def usual_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The squared error, the mean over all numbers."""
        return mse_loss(outputs, targets)

    def prepared(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and targets of one shape; without the second dimension for a single number."""
        return compared(outputs.squeeze(1) if outputs.dim() == 2 and outputs.shape[1] == 1 else outputs, targets)


class Survival(Task):
    """Time to an event, such as a death: one risk ``(B, 1)`` per example, larger for an earlier event; targets ``(B, 2)``: whether
    there was an event (1) or the example was observed until then without one (0), and the time. ``c_index`` is NaN without a
    comparable pair of examples.
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

    def check_values(self, targets: Tensor) -> None:
        """Refuse other events than 0 and 1."""
        if targets.dim() == 2 and (found := neither(targets[:, 0])) is not None:
            raise FederationError(
                f"The event of an example is {found:g}, expected 1, or 0 if there was none until the time: the targets are event "
                "and time, in this order."
            )

    def prepared(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Risks ``(B,)``, and the targets unchanged."""
        if outputs.shape[1:] not in ((), (1,)) or targets.shape != (len(outputs), 2):
            raise FederationError(
                f"The network gave outputs of shape {tuple(outputs.shape)} for targets of shape {tuple(targets.shape)}: a risk per "
                "example is expected (num_classes 1), and of the targets event (0 or 1) and time."
            )
        return outputs.flatten(), targets


def neither(numbers: Tensor) -> float | None:
    """The first number that is neither 0 nor 1; None if all are."""
    wrong = (numbers != 0) & (numbers != 1)
    return float(numbers[wrong][0]) if wrong.any() else None


def compared(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and targets in the shape and type of the outputs; if these are of half precision and the targets are not, in that of
    the targets, which are not rounded.

    Raises:
        FederationError: if their numbers differ: PyTorch would broadcast them.
    """
    if outputs.numel() != targets.numel():
        raise FederationError(
            f"The network gave outputs of shape {tuple(outputs.shape)} for targets of shape {tuple(targets.shape)}: set "
            "num_classes to the number of values that are predicted for an example."
        )
    if outputs.dtype.itemsize < 4:
        outputs = outputs.to(torch.promote_types(outputs.dtype, targets.dtype))
    return outputs, targets.reshape(outputs.shape).to(outputs.dtype)


TASKS: dict[str, type[Task]] = {task.name: task for task in (Multiclass, Binary, Multilabel, Regression, Survival)}
"""The tasks by their names, which torchmetrics has for three of them."""


def setting_of(loss: Loss | None, name: str, usual: Any) -> Any:
    """A setting of a loss, such as ``ignore_index``: its attribute, or a keyword of a ``functools.partial``; else the usual."""
    return getattr(loss, name, loss.keywords.get(name, usual) if isinstance(loss, partial) else usual)


def own_copy(loss: Loss | None) -> Loss | None:
    """A copy of a loss for a module: its buffers move with the module and are in no state dict."""
    if not isinstance(loss, nn.Module):
        return loss
    loss = copy.deepcopy(loss)
    for module in loss.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, buffer, persistent=False)
    return loss
