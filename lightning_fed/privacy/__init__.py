"""Differential privacy of clients: contributions are clipped and hidden in noise, and an accountant tracks the privacy cost."""

from lightning_fed.privacy.client_dp import AdaptiveClip, ClientDP

__all__ = ["AdaptiveClip", "ClientDP"]
