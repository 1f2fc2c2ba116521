"""A check for methods that exchange or mix predictions of whole examples: they need classifiers."""

from torch import nn

from lightning_fed.core import FederationError
from lightning_fed.models import Backbone
from lightning_fed.models.factory import name_of


def needs_classifier(network: nn.Module, why: str) -> None:
    """Refuse networks that answer with texts or spans.

    Args:
        network: a result of :func:`lightning_fed.models.backbone_of`.
        why: the method and what it needs a classifier for, as the subject of the error's sentence.
    """
    if not isinstance(network, Backbone):
        raise FederationError(
            f"backbone: {why}, but a {name_of(network)} answers with texts: give a classifier, or use FedAvg, which takes any."
        )
