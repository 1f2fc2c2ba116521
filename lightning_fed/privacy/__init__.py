"""Differential privacy of clients and of examples: what they contribute is bounded, hidden in noise and accounted for."""

from lightning_fed.privacy.client_dp import AdaptiveClip, ClientDP
from lightning_fed.privacy.example_dp import ExampleDP

__all__ = ["AdaptiveClip", "ClientDP", "ExampleDP"]
