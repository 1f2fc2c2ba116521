"""LG-FedAvg (Liang et al. 2020, https://arxiv.org/abs/2001.01523)."""

from collections.abc import Sequence
from typing import Any

from lightning_fed.core import ClientInfo, FederatedModule, FederationError, Server, check_fits, one_per_architecture
from lightning_fed.models import Backbones
from lightning_fed.models.factory import name_of
from lightning_fed.options import PositiveInt


class LGFedAvg(FederatedModule):
    """Clients keep their own feature extractor, of any architecture, and share the classifier on top.

    Everything is trained together, for ``epochs`` epochs; the last layers travel and are averaged with equal weights, as in the
    authors' code. That code names the shared layers by their position and so, for its CIFAR network, shares the convolutions
    instead; here they are the last ones, as the paper says. The authors start from a model that FedAvg trained; this starts from
    scratch, as the comparisons of later papers do. Monitored: accuracy after aggregation.

    Args:
        backbone: the clients' networks, which must be equal in the layers that they share.
        num_classes: number of classes; None: as many as the data have.
        shared_layers: how many layers travel, counted from the head, a residual block being one.
        **kwargs: see :class:`.FederatedModule`.
    """

    heterogeneous = True
    weighting = "uniform"

    def __init__(
        self, backbone: Backbones, num_classes: PositiveInt | None = None, *, shared_layers: PositiveInt = 1, **kwargs: Any
    ) -> None:
        super().__init__(backbone, num_classes, **kwargs)
        self.shared_layers = shared_layers

    def shared_names(self) -> set[str]:
        """The last layers."""
        return super().shared_names() & {f"backbone.{name}" for name in self.backbone.last_layers(self.shared_layers)}

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        """The average of the layers, which are the same in all networks or none: they are looked at before the first round."""
        shared = self.shared_state()
        for client, other in one_per_architecture(self, clients):
            what = f"What client {client.id}'s network, {name_of(other.backbone)}, shares"
            try:
                check_fits(other.shared_state(), shared, what)
            except FederationError as error:
                raise FederationError(f"{error} Choose networks whose last {self.shared_layers} layers are equal.") from error
        return super().configure_server(clients)
