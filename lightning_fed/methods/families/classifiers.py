"""Methods that exchange or mix what is said of whole examples need networks that say one thing of each."""

from torch import nn

from lightning_fed.core import FederationError
from lightning_fed.models import Backbone
from lightning_fed.models.factory import name_of


def needs_classifier(network: nn.Module, why: str) -> None:
    """Refuse networks that answer with texts or spans.

    Args:
        network: as :func:`lightning_fed.models.backbone_of` gives it.
        why: which method needs another one and for what, the subject of the error's sentence.
    """
    if not isinstance(network, Backbone):
        raise FederationError(
            f"backbone: {why}, but a {name_of(network)} answers with texts: give a classifier, or use FedAvg, which takes any."
        )
