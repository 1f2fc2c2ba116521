"""Small datasets that come with scikit-learn, for tasks other than one class of several."""

from typing import cast

import torch
from torch import Tensor

from lightning_fed.data.batches import INPUT, TARGETS
from lightning_fed.data.federated import FederatedDataModule, Pools, pools_of
from lightning_fed.data.vision.images import Digits

ODD, LARGE, PRIME, LOOP = {1, 3, 5, 7, 9}, {5, 6, 7, 8, 9}, {2, 3, 5, 7}, {0, 6, 8, 9}
"""Digits with each attribute: odd, five or more, prime, written with a closed loop."""


class Diabetes(FederatedDataModule):
    """Regression: 442 patients with 10 measurements each, and the progression of their diabetes after a year (Efron et al., 2004).

    All numbers are standardized over the patients: predicting the mean gives a root mean squared error of 1. The labels by which
    data are partitioned are quarters of the patients, by increasing progression.

    Args:
        **kwargs: see :class:`FederatedDataModule`.
    """

    num_classes = 1
    num_labels = 4
    predicts_labels = False
    problem = "regression"

    def load(self) -> Pools:
        """Measurements, targets and quarters; an empty test set."""
        from sklearn.datasets import load_diabetes

        table = load_diabetes(scaled=False)
        measured, progress = (torch.from_numpy(column).float() for column in (table.data, table.target))
        quarter = torch.bucketize(progress, progress.quantile(torch.tensor([0.25, 0.5, 0.75])))
        rows = {INPUT: standardised(measured), TARGETS: standardised(progress)}
        return pools_of(rows, quarter)


class DigitAttributes(Digits):
    """Multilabel: for each of scikit-learn's digits, whether it is odd, five or more, prime, and written with a closed loop.

    The labels by which data are partitioned are the digits.

    Args:
        **kwargs: see :class:`Digits`.
    """

    num_classes = 4
    num_labels = 10
    predicts_labels = False
    problem = "multilabel"

    def load(self) -> Pools:
        """The digits with their attributes."""
        images, digits, *_ = super().load()
        attributes = torch.tensor([[digit in those for those in (ODD, LARGE, PRIME, LOOP)] for digit in range(10)]).float()
        rows = {INPUT: cast(Tensor, images), TARGETS: attributes[digits]}
        return pools_of(rows, digits)


def standardised(numbers: Tensor) -> Tensor:
    """Columns with mean 0 and variance 1."""
    return (numbers - numbers.mean(dim=0)) / numbers.std(dim=0)
