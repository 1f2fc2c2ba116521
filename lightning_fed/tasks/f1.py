"""F1 as the benchmarks count it."""

import torch
from torch import Tensor
from torchmetrics.classification import MulticlassConfusionMatrix


class F1(MulticlassConfusionMatrix):
    """Harmonic mean of precision and recall: of class 1 where there are two classes, as GLUE scores MRPC and QQP; with more classes
    the mean over those that occur, in the labels or in the predictions. A class that is never right has 0.

    Args:
        num_classes: number of classes.
    """

    higher_is_better = True
    plot_upper_bound = 1.0

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes, validate_args=False)

    def compute(self) -> Tensor:
        """A scalar."""
        counts = super().compute().double()
        right, total = counts.diag(), counts.sum(dim=0) + counts.sum(dim=1)
        scores = torch.where(total > 0, 2 * right / total, 0.0)
        return (scores[1] if len(scores) == 2 else scores[total > 0].mean()).float()
