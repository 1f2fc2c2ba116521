"""Layers that methods share."""

from lightning_fed.nn.factorise import FactorisedConv2d, FactorisedLinear, factorise, frobenius_decay, spectral_factors
from lightning_fed.nn.low_rank import LowRankDelta, decompose

__all__ = [
    "FactorisedConv2d",
    "FactorisedLinear",
    "LowRankDelta",
    "decompose",
    "factorise",
    "frobenius_decay",
    "spectral_factors",
]
