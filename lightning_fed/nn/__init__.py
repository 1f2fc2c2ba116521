"""Layers that methods share."""

from lightning_fed.nn.factorise import FactorisedConv2d, FactorisedLinear, Spectrum, factorise, frobenius_decay
from lightning_fed.nn.low_rank import LowRankDelta, decompose
from lightning_fed.nn.masked_loss import mask_absent
from lightning_fed.nn.scaler import scale_before_norms
from lightning_fed.nn.static_batch_norm import StatisticsPass, running_statistics

__all__ = [
    "FactorisedConv2d",
    "FactorisedLinear",
    "LowRankDelta",
    "Spectrum",
    "StatisticsPass",
    "decompose",
    "factorise",
    "frobenius_decay",
    "mask_absent",
    "running_statistics",
    "scale_before_norms",
]
