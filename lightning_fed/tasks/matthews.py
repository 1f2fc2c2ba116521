"""Metrics whose values torchmetrics defines otherwise than the benchmarks do."""

import torch
from torch import Tensor
from torchmetrics.classification import MulticlassConfusionMatrix


class Matthews(MulticlassConfusionMatrix):
    r"""Matthews' correlation of predictions and labels, from -1 to 1; 0 where it is not defined.

    It is not where all predictions or all labels are of one class. GLUE scores CoLA with scikit-learn's function, which then gives
    0; torchmetrics gives a limit, 1 if all predictions are right and else something between: a constant prediction would seem to
    be worth something.
    """

    plot_upper_bound = 1.0

    def compute(self) -> Tensor:
        """A scalar."""
        counts = super().compute().double()
        labels, predictions, total = counts.sum(dim=1), counts.sum(dim=0), counts.sum()
        covariance = counts.trace() * total - labels @ predictions
        scale = ((total**2 - labels @ labels) * (total**2 - predictions @ predictions)).sqrt()
        return torch.where(scale > 0, covariance / scale, 0.0).float()
