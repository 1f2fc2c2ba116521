"""Export of a run's models for use elsewhere, with a description."""

from lightning_fed.storage.export.folder import write

__all__ = ["write"]
