"""What leaves a run: models for use elsewhere, and what one has to know to use them."""

from lightning_fed.storage.export.folder import write

__all__ = ["write"]
