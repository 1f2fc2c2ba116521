"""Client-level and example-level differential privacy: contributions are clipped, noise is added, and the cost is accounted for."""

from lightning_fed.privacy.client_dp import AdaptiveClip, ClientDP
from lightning_fed.privacy.example_dp import ExampleDP

__all__ = ["AdaptiveClip", "ClientDP", "ExampleDP"]
