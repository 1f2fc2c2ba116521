"""Personalized, model-heterogeneous and low-rank federated learning on PyTorch Lightning."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Federation": "lightning_fed.federation.federation",
    "FederatedModule": "lightning_fed.core.module",
    "Phase": "lightning_fed.core.phase",
    "PhasedModule": "lightning_fed.core.phased_module",
    "Server": "lightning_fed.core.server",
    "FederationError": "lightning_fed.errors",
    "load_run": "lightning_fed.cli.load_run",
}

__all__ = ["FederatedModule", "Federation", "FederationError", "Phase", "PhasedModule", "Server", "load_run"]


def __getattr__(name: str) -> Any:
    """Import public names on first use: ``lightning-fed --help`` must not wait for torch."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
