"""Layers that methods share."""

from lightning_fed.nn.low_rank import LowRankDelta, decompose

__all__ = ["LowRankDelta", "decompose"]
