"""Where turns run."""

from lightning_fed.engines.in_process import Engine, InProcess

__all__ = ["Engine", "InProcess"]
