"""Privacy of clients: what they contribute is bounded and hidden in noise, and what that costs is accounted for."""

from lightning_fed.privacy.client_dp import AdaptiveClip, ClientDP

__all__ = ["AdaptiveClip", "ClientDP"]
