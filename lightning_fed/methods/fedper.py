"""FedPer (Arivazhagan et al. 2019, https://arxiv.org/abs/1912.00818)."""

from typing import Any

from lightning_fed.core import FederatedModule
from lightning_fed.models import Backbones
from lightning_fed.options import PositiveInt


class FedPer(FederatedModule):
    """Clients share base layers by federated averaging and keep personalization layers, by default the classifier.

    Base and private layers are trained together for ``epochs`` epochs. The base travels and is averaged, weighted by training
    examples; the private layers stay. FedRep trains the two one after the other; LG-FedAvg shares the other half. Monitored:
    accuracy after aggregation, of the new base with the client's own layers.

    Args:
        backbone: the network of every client.
        num_classes: number of classes; None: as many as the data have.
        private_layers: :math:`K_P`, number of layers that stay with the client, counted from the head; a residual block counts as
            one. The paper: 1 to 4; 1 is the head alone, as in most comparisons.
        **kwargs: see :class:`.FederatedModule`.
    """

    def __init__(
        self, backbone: Backbones, num_classes: PositiveInt | None = None, *, private_layers: PositiveInt = 1, **kwargs: Any
    ) -> None:
        super().__init__(backbone, num_classes, **kwargs)
        self.private_layers = private_layers

    def shared_names(self) -> set[str]:
        """Names in all but the last layers."""
        return super().shared_names() - {f"backbone.{name}" for name in self.backbone.last_layers(self.private_layers)}
