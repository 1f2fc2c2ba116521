"""Numeric columns, standardized and imputed with statistics of training rows."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from lightning_fed.data.batches import INPUT, Inputs, SharedTensors
from lightning_fed.data.client import ClientDataModule
from lightning_fed.data.federated import FederatedDataModule
from lightning_fed.data.split import Split, union
from lightning_fed.errors import require

Scope = Literal["client", "all", "none"]
"""The training rows whose statistics standardize a column."""

Impute = Literal["mean", "median", "none"]
"""The replacement of a missing number."""

EPSILON = 1e-9
"""Added to a standard deviation, as in FLamby."""


@dataclass(frozen=True)
class Scale:
    """How rows become inputs: missing numbers are replaced, then rows are (x − mean) / std, in double precision: of numbers far
    from 0, single precision rounds a mean by more than they differ.

    Attributes:
        missing: replacement in each column; None: missing numbers are refused.
        mean: subtracted from each column, float64, 0 where none is standardized; None: no column is.
        std: divisor of each column, float64, 1 where none is standardized.
    """

    missing: Tensor | None = None
    mean: Tensor | None = None
    std: Tensor | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        """The inputs of rows."""
        rows = rows if self.missing is None else torch.where(rows.isnan(), self.missing, rows)
        return rows if self.mean is None or self.std is None else ((rows - self.mean) / self.std).to(rows.dtype)


class ScaledColumns(FederatedDataModule):
    """Data whose inputs are rows of numbers, which can be imputed and standardized: (x − mean) / std of each column. Means, medians
    and standard deviations (with n − 1) are those of training rows, never of test rows. A column that is constant in them is only
    centered.

    Args:
        standardize: training rows that give the statistics: each ``client``'s own, or those of all clients if it has none; those of
            ``all``, which a client of a real federation does not see; or ``none``. With ``client`` the pooled data, which the
            server evaluates on and centralized methods train on, are standardized over the rows of all clients, as in FLamby.
        standardized: names of the columns to standardize. None: all.
        impute: replacement of missing numbers: the ``mean`` or the ``median`` of the column over the same training rows; over those
            of all clients if the client has none or nothing is standardized. ``none``: missing numbers are refused.
        **kwargs: see :class:`FederatedDataModule`.
    """

    def __init__(
        self, standardize: Scope = "none", impute: Impute = "none", standardized: list[str] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(augment="none", **kwargs)
        for name, value, known in (("standardize", standardize, get_args(Scope)), ("impute", impute, get_args(Impute))):
            require(value in known, f"Got {name}={value!r}: give one of {', '.join(known)}.")
        self.standardize: Scope = standardize
        self.impute: Impute = impute
        require(
            standardized is None or standardize != "none",
            f"Got standardized={standardized} with standardize=none: set standardize to client or all, or leave it out.",
        )
        self.standardized = standardized
        self._of_all: Inputs | None = None  # inputs of the pooled data, if they differ from the clients'
        self._scale = Scale()  # of the pooled data
        self._own_scales: list[Scale] = []  # of each client, if they differ

    def prepare(self, inputs: Inputs, splits: Sequence[Split]) -> Inputs:
        """The rows, imputed and standardized."""
        if self.standardize == self.impute == "none":
            return inputs
        rows = inputs[INPUT] if isinstance(inputs, dict) else inputs
        assert isinstance(rows, Tensor)
        train = rows[torch.from_numpy(union(list(splits)).train)]
        self._scale = self._scale_of(train, train)
        everybody = self._scale(rows)
        if self.standardize != "client":
            return _with_rows(inputs, everybody)
        held = np.concatenate([part for split in splits for part in split])
        require(
            len(np.unique(held)) == len(held),
            "Clients share examples, which have no single scale then: set standardize to all or none, or choose another partition.",
        )
        own, trained = everybody.clone(), [rows[torch.from_numpy(split.train)] for split in splits]
        self._own_scales = [self._scale_of(own_train if len(own_train) else train, train) for own_train in trained]
        for split, scale in zip(splits, self._own_scales, strict=True):
            places = torch.from_numpy(np.concatenate(split))
            own[places] = scale(rows[places])
        self._of_all = _with_rows(inputs, everybody)
        return _with_rows(inputs, own)

    def set_aside(self, unseen: Collection[int]) -> None:
        """See :class:`FederatedDataModule`.

        Raises:
            FederationError: if these clients would have a part in the scale or the imputed values of those that train.
        """
        of_all = self.standardize == "all" or (self.impute != "none" and self.standardize == "none")
        require(
            not unseen or not of_all,
            f"Got standardize={self.standardize} and impute={self.impute} with unseen clients, whose training examples would count "
            "in the statistics: set standardize to client, or leave the unseen clients' files out.",
        )
        super().set_aside(unseen)

    def pooled(self) -> ClientDataModule:
        data = super().pooled()
        return data if self._of_all is None else replace(data, data=SharedTensors(self._of_all, data.data.labels))

    def fingerprint(self) -> str:
        chosen = f"{self.standardize} {self.standardized} {self.impute}"
        return f"{crc32(chosen.encode(), int(super().fingerprint(), 16)):08x}"

    def scale(self, client: int | None) -> Scale:
        """How the rows of a client become inputs; None: those of the pooled data, as a global model gets them."""
        return self._scale if client is None or not self._own_scales else self._own_scales[client]

    def _scale_of(self, train: Tensor, everybody: Tensor) -> Scale:
        """The statistics of training rows; missing statistics come from the rows of all clients."""
        usual = None
        if self.impute != "none":
            usual = torch.where(self._usual(train).isnan(), self._usual(everybody), self._usual(train))
            lacking = [repr(self.column_title(place)) for place in usual.isnan().nonzero().flatten().tolist()]
            require(not lacking, f"No training row has a number in the column {', '.join(lacking[:1])}: leave the column out.")
            train = torch.where(train.isnan(), usual, train)
        if self.standardize == "none":
            return Scale(usual)
        train = train.double()
        mean = train.mean(dim=0)
        deviation = train.std(dim=0) if len(train) > 1 else torch.zeros_like(mean)
        varies = (deviation > 0) & (train != train[:1]).any(dim=0)  # the mean of equal numbers may be off by a digit
        std = torch.where(varies, deviation + EPSILON, 1.0)
        if self.standardized is not None:
            chosen = self._chosen(self.standardized, train.shape[1])
            mean, std = torch.where(chosen, mean, 0.0), torch.where(chosen, std, 1.0)
        return Scale(usual, mean, std)

    def _chosen(self, names: list[str], columns: int) -> Tensor:
        """Mask of the columns to standardize."""
        titles = [self.column_title(place) for place in range(columns)]
        lacking = [name for name in names if name not in titles]
        require(not lacking, f"Got standardized={names}, but the columns are {', '.join(titles)}: name some of these.")
        return torch.tensor([title in names for title in titles])

    def _usual(self, rows: Tensor) -> Tensor:
        """The mean or median of each column without missing numbers; NaN if all are missing."""
        return mean_of_known(rows) if self.impute == "mean" else rows.nanquantile(0.5, dim=0)

    def column_title(self, place: int) -> str:
        """Name of a column of the inputs. Default: its number."""
        return str(place)


def mean_of_known(rows: Tensor) -> Tensor:
    """The mean of each column without missing numbers; exact if all are equal, or the deviation would be the error of a digit."""
    return rows.double().nanmean(dim=0).to(rows.dtype)


def _with_rows(inputs: Inputs, rows: Tensor) -> Inputs:
    return inputs | {INPUT: rows} if isinstance(inputs, dict) else rows
