"""Metrics that torchmetrics defines differently from the benchmarks, or for which it gives one value per output."""

import warnings
from collections.abc import Callable
from typing import Self

import torch
import torchmetrics as tm
from torch import Tensor
from torchmetrics.classification import BinaryAUROC, MulticlassConfusionMatrix
from torchmetrics.utilities.data import dim_zero_cat


class WideMetrics(tm.MetricCollection):
    """Metrics that stay as they are if their module is converted to half precision, as by a Trainer's ``bf16-true``: a sum of 1,000
    in bfloat16 does not grow by 1.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def without_narrowing(tensor: Tensor) -> Tensor:
            converted = fn(tensor)
            return converted.to(torch.promote_types(converted.dtype, tensor.dtype))

        return super()._apply(without_narrowing, recurse)


class F1(MulticlassConfusionMatrix):
    """Harmonic mean of precision and recall: with two classes that of class 1, as GLUE scores MRPC and QQP; with more classes
    the mean over those that occur in the labels or in the predictions. A class that is never predicted correctly has 0.

    Args:
        num_classes: number of classes.
    """

    higher_is_better = True
    plot_upper_bound = 1.0

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes, validate_args=False)

    def compute(self) -> Tensor:
        counts = super().compute().double()
        right, total = counts.diag(), counts.sum(dim=0) + counts.sum(dim=1)
        scores = torch.where(total > 0, 2 * right / total, 0.0)
        return (scores[1] if len(scores) == 2 else scores[total > 0].mean()).float()


class Matthews(MulticlassConfusionMatrix):
    r"""Matthews' correlation of predictions and labels, from -1 to 1; 0 where it is undefined.

    It is undefined if all predictions or all labels are of one class. GLUE scores CoLA with scikit-learn's function, which then
    gives 0. torchmetrics gives a limit, 1 if all predictions are right and otherwise a value in between, so that a constant
    prediction would seem useful.
    """

    plot_upper_bound = 1.0

    def compute(self) -> Tensor:
        counts = super().compute().double()
        labels, predictions, total = counts.sum(dim=1), counts.sum(dim=0), counts.sum()
        covariance = counts.trace() * total - labels @ predictions
        scale = ((total**2 - labels @ labels) * (total**2 - predictions @ predictions)).sqrt()
        return torch.where(scale > 0, covariance / scale, 0.0).float()


class MeanSpearman(tm.SpearmanCorrCoef):
    """Spearman's correlation; the mean over several outputs. NaN where it is undefined, because all predictions or all targets are
    equal, for which torchmetrics gives 0.
    """

    def __init__(self, num_outputs: int) -> None:
        with warnings.catch_warnings():  # that ranks need all predictions in memory: those of a test set fit
            warnings.filterwarnings("ignore", "Metric `SpearmanCorrcoef` will save all targets")
            super().__init__(num_outputs=num_outputs)

    def compute(self) -> Tensor:
        both = dim_zero_cat(self.preds), dim_zero_cat(self.target)
        constant = torch.stack([(values == values[0]).all(dim=0) for values in both]).any(dim=0)
        return torch.where(constant, torch.nan, super().compute()).mean()


class OfAllPredictions(tm.Metric):
    """A metric that needs the predictions and targets of all batches at once."""

    higher_is_better = True
    full_state_update = False
    outputs: list[Tensor]
    targets: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("outputs", default=[], dist_reduce_fx="cat")
        self.add_state("targets", default=[], dist_reduce_fx="cat")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add a batch."""
        self.outputs.append(outputs.detach())
        self.targets.append(targets.detach())


class MeanPearson(OfAllPredictions):
    """Pearson's correlation; the mean over several outputs. NaN where it is undefined, because all predictions or all targets are
    equal: torchmetrics' running variance of equal numbers is rounding noise, and so is its correlation then.
    """

    plot_upper_bound = 1.0

    def compute(self) -> Tensor:
        outputs, targets = (dim_zero_cat(values).cpu().double() for values in (self.outputs, self.targets))
        constant = (outputs == outputs[0]).all(dim=0) | (targets == targets[0]).all(dim=0)
        outputs, targets = outputs - outputs.mean(dim=0), targets - targets.mean(dim=0)
        correlation = (outputs * targets).sum(dim=0) / (outputs.norm(dim=0) * targets.norm(dim=0))
        return torch.where(constant, torch.nan, correlation).mean().float()


class R2(OfAllPredictions):
    """scikit-learn's explained share of the targets' variance, the mean over several outputs; NaN of a single example.

    torchmetrics subtracts sums of squares in float32: with targets around 1000 and a deviation of 1 not even the first digit is
    right, and with small targets the result is 1.
    """

    plot_upper_bound = 1.0

    def compute(self) -> Tensor:
        from sklearn.metrics import r2_score  # takes a second

        outputs, targets = (dim_zero_cat(values).cpu().double().numpy() for values in (self.outputs, self.targets))
        return torch.tensor(r2_score(targets, outputs) if len(targets) > 1 else torch.nan)


class AUROC(BinaryAUROC):
    """The area under the ROC curve; NaN if all examples are of one class, for which torchmetrics gives 0."""

    def compute(self) -> Tensor:  # type: ignore[override]
        targets = dim_zero_cat(self.target)
        return super().compute() if targets.min() < targets.max() else torch.tensor(torch.nan, device=targets.device)


PAIRS_AT_ONCE = 2**22
"""How many pairs of examples are compared at a time."""


class ConcordanceIndex(OfAllPredictions):
    """Harrell's C: among all comparable pairs of examples, the share in which the example with the earlier event has the
    higher risk; equal risks count one half. NaN without such a pair.

    A pair is comparable if one example had an event and the other was observed longer, or equally long without an event. Two events
    at the same time do not count. Risks are ``(B,)``, targets ``(B, 2)``: whether there was an event, and its time, or the end of
    the observation.
    """

    def compute(self) -> Tensor:
        risks, (event, time) = dim_zero_cat(self.outputs), dim_zero_cat(self.targets).unbind(dim=1)
        right, pairs = (torch.zeros((), dtype=torch.float64, device=risks.device) for _ in range(2))
        for rows in torch.split(event.nonzero().flatten(), max(1, PAIRS_AT_ONCE // max(1, len(risks)))):
            begin, risk = time[rows, None], risks[rows, None]
            known = (time > begin) | ((time == begin) & (event == 0))
            right += (known & (risk > risks)).sum() + 0.5 * (known & (risk == risks)).sum()
            pairs += known.sum()
        return (right / pairs).float()
