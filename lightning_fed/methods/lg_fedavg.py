"""LG-FedAvg (Liang et al. 2020, https://arxiv.org/abs/2001.01523)."""

from collections.abc import Sequence
from typing import Any

from lightning_fed.core import ClientInfo, FederatedModule, FederationError, Server, check_fits, one_per_architecture
from lightning_fed.models import Backbones
from lightning_fed.models.factory import name_of
from lightning_fed.options import PositiveInt


class LGFedAvg(FederatedModule):
    """Clients keep local representations, of any architecture, and share the global classifier on top.

    Everything is trained together for ``epochs`` epochs. The last layers travel and are averaged with equal weights, as in the
    authors' code. That code names the shared layers by their position, and so shares the convolutions of its CIFAR network;
    here the shared layers are the last ones, as in the paper. The authors start from a model trained with FedAvg; this starts from
    scratch, as in the comparisons of later papers. Monitored: accuracy after aggregation.

    Args:
        backbone: the clients' networks, which must be equal in the shared layers.
        num_classes: number of classes; None: as many as the data have.
        shared_layers: number of layers that travel, counted from the head; a residual block counts as one.
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
        """Names in the last layers."""
        return super().shared_names() & {f"backbone.{name}" for name in self.backbone.last_layers(self.shared_layers)}

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        """A server that averages the layers; check before the first round that they are equal in all networks."""
        shared = self.shared_state()
        for client, other in one_per_architecture(self, clients):
            what = f"What client {client.id}'s network, {name_of(other.backbone)}, shares"
            try:
                check_fits(other.shared_state(), shared, what)
            except FederationError as error:
                raise FederationError(f"{error} Choose networks whose last {self.shared_layers} layers are equal.") from error
        return super().configure_server(clients)
