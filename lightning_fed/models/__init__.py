"""Networks that methods can train."""

from lightning_fed.models.backbone import Backbone, BackboneFactory, Backbones
from lightning_fed.models.cnn import CNN, CNN1, CNN2, CNN3, CNN4, CNN5

__all__ = ["CNN", "CNN1", "CNN2", "CNN3", "CNN4", "CNN5", "Backbone", "BackboneFactory", "Backbones"]
