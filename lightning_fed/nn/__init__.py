"""Layers, losses and decompositions that methods share."""

from lightning_fed.nn.buffer_dict import BufferDict
from lightning_fed.nn.cox import CoxLoss
from lightning_fed.nn.factorize import Energy, FactorizedConv2d, FactorizedLinear, Spectrum, factorize, frobenius_decay
from lightning_fed.nn.joint_optimizer import JointOptimizer, jointly
from lightning_fed.nn.losses import divergence, mask_absent
from lightning_fed.nn.low_rank import LowRankDelta, decompose
from lightning_fed.nn.norms import StatisticsPass, running_statistics, scale_activations
from lightning_fed.nn.proximal import half_squared_distance, proximal_step

__all__ = [
    "BufferDict",
    "CoxLoss",
    "Energy",
    "FactorizedConv2d",
    "FactorizedLinear",
    "JointOptimizer",
    "LowRankDelta",
    "Spectrum",
    "StatisticsPass",
    "decompose",
    "divergence",
    "factorize",
    "frobenius_decay",
    "half_squared_distance",
    "jointly",
    "mask_absent",
    "proximal_step",
    "running_statistics",
    "scale_activations",
]
