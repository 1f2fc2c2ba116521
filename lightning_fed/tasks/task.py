"""What is learned: one class of several, several labels at once, or numbers. Each has its usual loss and its metrics."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar, Literal

import torchmetrics as tm
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from torchmetrics import Metric
from torchmetrics import classification as of_classes

from lightning_fed.errors import FederationError
from lightning_fed.tasks.f1 import F1
from lightning_fed.tasks.matthews import Matthews

Measures = Mapping[str, Callable[[int], Metric]]
"""Metrics by name, given the number of outputs."""

TaskName = Literal["multiclass", "multilabel", "regression"]


class LearningTask(ABC):
    """A kind of target. Its networks have as many outputs as there are classes, labels or numbers.

    Attributes:
        measures: what can be measured; the first is the headline unless another is chosen.
        always: what is measured in any case.
    """

    measures: ClassVar[Measures]
    always: ClassVar[tuple[str, ...]]

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The usual loss, the mean over a batch."""

    def prepared(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and targets as a loss takes them: of one shape and type where it compares them number by number."""
        return outputs, targets

    def measured(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and targets as metrics take them."""
        return self.prepared(outputs, targets)


class Multiclass(LearningTask):
    """One class of several: logits ``(B, C, …)``, targets ``(B, …)``. ``f1`` is that of class 1 where there are two classes, as
    GLUE scores MRPC and QQP, and else the mean over the classes.
    """

    measures: ClassVar[Measures] = {
        "accuracy": partial(of_classes.MulticlassAccuracy, average="micro", validate_args=False),
        "f1": F1,
        "matthews": Matthews,
    }
    always = ("accuracy",)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy."""
        return cross_entropy(outputs, targets)


class Multilabel(LearningTask):
    """Any number of labels at once: logits ``(B, L)``, targets ``(B, L)`` of 0 and 1. Metrics get probabilities; a label counts as
    predicted from 0.5 on. ``f1`` is the mean over the labels, ``accuracy`` the share of labels that are right, ``exact_match`` that
    of examples of which all are.
    """

    measures: ClassVar[Measures] = {
        "f1": partial(of_classes.MultilabelF1Score, average="macro"),
        "accuracy": partial(of_classes.MultilabelAccuracy, average="micro"),
        "exact_match": of_classes.MultilabelExactMatch,
        "average_precision": of_classes.MultilabelAveragePrecision,
    }
    always = ("f1", "accuracy")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy of each label, the mean over all."""
        return binary_cross_entropy_with_logits(outputs, targets)

    def prepared(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Targets as floats."""
        return compared(outputs, targets)

    def measured(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities, and targets as integers."""
        return outputs.sigmoid(), targets.reshape(outputs.shape).long()


class Regression(LearningTask):
    """Numbers: outputs ``(B, D)``, targets ``(B, D)``, or ``(B,)`` where there is one."""

    measures: ClassVar[Measures] = {
        "rmse": lambda outputs: tm.MeanSquaredError(squared=False, num_outputs=1),
        "mae": lambda outputs: tm.MeanAbsoluteError(),
        "r2": lambda outputs: tm.R2Score(),
        "pearson": lambda outputs: MeanPearson(num_outputs=outputs),
        "spearman": lambda outputs: mean_spearman(outputs),
    }
    always = ("rmse", "mae")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The squared error, the mean over all numbers."""
        return mse_loss(outputs, targets)

    def prepared(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Of one shape; without a second dimension where there is one number."""
        return compared(outputs.squeeze(1) if outputs.dim() == 2 and outputs.shape[1] == 1 else outputs, targets)


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


class MeanPearson(tm.PearsonCorrCoef):
    """Pearson's correlation, of several numbers the mean."""

    def compute(self) -> Tensor:
        """A scalar."""
        return super().compute().mean()


class MeanSpearman(tm.SpearmanCorrCoef):
    """Spearman's correlation, of several numbers the mean."""

    def compute(self) -> Tensor:
        """A scalar."""
        return super().compute().mean()


def mean_spearman(outputs: int) -> Metric:
    """Without the warning that ranks take all predictions at once, which are those of a test set."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Metric `SpearmanCorrcoef` will save all targets")
        return MeanSpearman(num_outputs=outputs)


TASKS: dict[str, LearningTask] = {"multiclass": Multiclass(), "multilabel": Multilabel(), "regression": Regression()}
"""The tasks by the names that torchmetrics has for two of them."""
