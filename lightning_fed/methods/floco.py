"""Floco (Grinwald et al., "Federated Learning over Connected Modes", NeurIPS 2024, https://arxiv.org/abs/2403.03333)."""

import logging
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_fed.core import (
    Broadcast,
    ClientInfo,
    ClientUpdate,
    FederatedModule,
    FederationError,
    PersonalServer,
    Phase,
    Server,
    State,
    check_fits,
    mean_of_updates,
)
from lightning_fed.errors import require
from lightning_fed.models import Backbones
from lightning_fed.nn.factorize import require_plain_weight
from lightning_fed.nn.simplex import Mixture, mixed_weight, principal_scores, spread
from lightning_fed.options import NonNegativeFloat, PositiveInt

log = logging.getLogger(__name__)

POINT = "point"
"""A client's place in the simplex, on the wire and as the server keeps it."""


class Floco(FederatedModule):
    r"""One body and a simplex of connected heads, all of which are good, with a subregion of it for each client.

    The weight of the head is :math:`\sum_m \alpha_m W_m`, a point of the simplex with the corners :math:`W_1, \dots, W_M`; its bias
    and the rest of the network are ordinary. All of it travels and is averaged.

    - Until round :math:`\tau` a client draws, for each batch, :math:`\alpha` uniformly in the simplex.
    - In round :math:`\tau` all clients take part. The server projects the received corners on their M principal components, and
      from there on the simplex, in the scale that separates clients best. This gives each client its :math:`\beta_k`.
    - From then on it draws :math:`\alpha = \beta_k + r u`, r uniform in :math:`[0, \rho]`, u a direction with :math:`\lVert u
      \rVert_1 = 1`.

    A client predicts with its :math:`\beta_k`; without one, until round :math:`\tau` or if it missed that round, with the center,
    which is ``global``. Nothing is private: the server keeps the :math:`\beta_k`. Floco+, which adds Ditto's personal network, is
    not included. Monitored: accuracy after aggregation, of the clients' points.

    Args:
        backbone: the network of every client, whose head shares no weights.
        num_classes: number of classes; None: as many as the data have.
        corners: M; with 1, and ``rho`` 0, it is FedAvg. The authors: 10.
        tau: round :math:`\tau`. The authors: 250 of 500; in a run of fewer rounds no client gets a point.
        rho: :math:`\rho`. The authors: 0.1, with data by Dirichlet 0.3.
        **kwargs: see :class:`.FederatedModule`. The authors: SGD, lr 0.02, momentum 0.5, weight decay 5e-4, 5 ``epochs``.
    """

    refuses_adapters = "it makes a simplex of the network's own head"
    dynamic_payload = True  # a point, for clients that have one

    def __init__(
        self,
        backbone: Backbones,
        num_classes: PositiveInt | None = None,
        corners: PositiveInt = 10,
        tau: PositiveInt = 250,
        rho: NonNegativeFloat = 0.1,
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, num_classes, **kwargs)
        self.corners = corners
        self.tau = tau
        self.rho = rho
        self.has_point = False

    def build(self) -> None:
        """Build the network and, drawn after it, further corners of its head."""
        super().build()
        head = self.backbone.head
        require(
            isinstance(head, nn.Linear),
            f"Floco makes a simplex of the head, a {type(head).__name__}: give a network with a linear one.",
        )
        require_plain_weight(self.backbone, head, "make a simplex of")
        names = [name for name, p in self.backbone.named_parameters(remove_duplicate=False) if p is head.weight]
        if len(names) > 1:
            raise FederationError(
                f"Floco makes a simplex of the head's weight, which is {names[0]}, too: choose a network whose head has its own."
            )
        mixed_weight(head, self.corners)

    @property
    def mixture(self) -> Mixture:
        """Point of the head in the simplex."""
        return cast(Any, self.backbone.head).parametrizations.weight[0]

    @property
    def corners_name(self) -> str:
        """Name of the corners in the state dict."""
        own = cast(Any, self.backbone.head).parametrizations.weight.original
        return next(name for name, parameter in self.named_parameters() if parameter is own)

    def load_payload(self, payload: State) -> None:
        """The client's point, or none: the center."""
        point = self.mixture.point
        self.has_point = bool(payload)
        check_fits(payload, {POINT: point} if payload else {}, "The payload for Floco")
        self.mixture.point = payload[POINT].to(point) if payload else torch.full_like(point, 1 / self.corners)

    def phases(self) -> list[Phase]:
        """FedAvg's phase, at drawn points."""
        return [self.local_phase("local", list(self.parameters()), self.drawn_loss)]

    def drawn_loss(self, batch: Any) -> Tensor:
        """The loss of a batch at a drawn point."""
        own = self.mixture.point
        self.mixture.point = self.draw().to(own)
        try:
            return self.client_loss(batch)
        finally:
            self.mixture.point = own

    def draw(self) -> Tensor:
        """A point for a batch."""
        if not self.has_point:
            exponentials = torch.empty(self.corners).exponential_()
            return exponentials / exponentials.sum()
        direction = 2 * torch.rand(self.corners) - 1
        return self.mixture.point.cpu() + self.rho * torch.rand(()) * direction / direction.abs().sum()

    def cohort(self, clients: Sequence[ClientInfo], round: int, seed: int) -> Sequence[ClientInfo] | None:
        r"""All clients in round :math:`\tau`."""
        return clients if round == self.tau else None

    def check_rounds(self, rounds: int) -> None:
        r"""Report a run without a round after :math:`\tau`, in which no client trains at its point."""
        super().check_rounds(rounds)
        if rounds <= self.tau:
            log.warning(f"Floco's tau is {self.tau} and the run has {rounds} rounds: no client trains at its point. Set tau lower.")

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        """FedAvg's server, which also gives each client a point."""
        count = sum(client.takes_part for client in clients)
        if self.corners > 1 and count < self.corners:
            raise FederationError(
                f"Floco projects {count} clients on {self.corners} principal components, but needs as many: set corners to "
                f"{count} at most."
            )
        return SimplexServer(self)

    def export_state(self, private: bool = True) -> State:
        """The network with the head at the client's point; without private state, at the center."""
        state = self.state_dict()
        corners = state.pop(name := self.corners_name)
        mixture = self.mixture
        weight = mixture(corners) if private else corners.mean(dim=0)
        return state | {name.replace(".parametrizations.weight.original", ".weight"): weight}


class SimplexServer(PersonalServer):
    """Averages everything, and keeps each client's point.

    Args:
        method: the method of the server.
    """

    def __init__(self, method: Floco) -> None:
        super().__init__(method.shared_state(), method.weighting, mean_of_updates)
        self.holds_model = True
        self.tau, self.name, self.num_corners = method.tau, method.corners_name, method.corners

    def broadcast(self, client: ClientInfo) -> Broadcast:
        """The model, with the client's point if it has one."""
        own = self.client_state.get(client.id) if client.id in self.client_state else {}
        return Broadcast(self.state | own)

    def expected_payload(self, update: ClientUpdate, sent: Broadcast) -> State:
        """The model alone."""
        return self.state

    def state_of(self, update: ClientUpdate) -> State:
        """The tensors from which points are computed."""
        return {self.name: update.state[self.name]} if self.round == self.tau else {}

    def update_clients(self, clients: Sequence[int]) -> dict[str, float]:
        r"""Compute the clients' points in round :math:`\tau`."""
        if self.round != self.tau:
            return {}
        if len(clients) < self.num_corners:
            raise FederationError(
                f"Round {self.tau} gives clients their points, by {self.num_corners} principal components, but updates of "
                f"{len(clients)} arrived: have more take part, or set corners to fewer."
            )
        heads = torch.stack([self.round_state.get(client)[self.name].flatten() for client in clients]).double()
        points = spread(principal_scores(heads, self.num_corners)) if self.num_corners > 1 else torch.ones(len(clients), 1)
        for client, point in zip(clients, points.to(self.state[self.name].dtype), strict=True):
            self.client_state.put(client, {POINT: point.clone()}, self.round)
        return {}
