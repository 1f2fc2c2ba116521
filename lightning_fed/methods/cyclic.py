"""Cyclic training (Chang et al., JAMIA 2018, https://doi.org/10.1093/jamia/ocy017)."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np

from lightning_fed.core import ClientInfo, ClientUpdate, FederatedModule, Server
from lightning_fed.models import Backbones
from lightning_fed.options import PositiveInt


class Cyclic(FederatedModule):
    r"""The network passes from client to client without averaging (cyclical weight transfer): :math:`w \leftarrow w_k`.

    A round is one client's turn, whatever the federation's ``participation`` is; a cycle is as many rounds as there are clients
    that may take part. Monitored: accuracy after aggregation.

    Args:
        backbone: the network that every client trains.
        num_classes: number of classes; None: as many as the data have.
        order: of the clients in a cycle: ``shuffled`` anew for each, with NumPy's ``default_rng`` of the run's seed as in FLamby,
            or ``fixed``, by their ids.
        hand_on: whether a client trains the model that the previous one sent. False matches FLamby's program: only the first
            client's updates are kept; all others start from its model, and their updates are discarded.
        **kwargs: see :class:`.FederatedModule`.
    """

    def __init__(
        self,
        backbone: Backbones,
        num_classes: PositiveInt | None = None,
        order: Literal["shuffled", "fixed"] = "shuffled",
        hand_on: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, num_classes, **kwargs)
        self.order = order
        self.hand_on = hand_on

    def cohort(self, clients: Sequence[ClientInfo], round: int, seed: int) -> Sequence[ClientInfo]:
        """The client whose turn it is."""
        cycle, place = divmod(round - 1, len(clients))
        if self.order == "shuffled":
            stream = np.random.default_rng(seed)
            place = [stream.permutation(len(clients)) for _ in range(cycle + 1)][-1][place]
        return [clients[place]]

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        """A server that takes the one update as its model."""
        if self.hand_on:
            return super().configure_server(clients)
        first = next(client.id for client in clients if client.takes_part)
        return OneClientsServer(first, self.update_state(), self.weighting, holds_model=self.shares_whole_model)


class OneClientsServer(Server):
    """Keeps the updates of one client and discards those of others.

    Args:
        client: its id.
        *args: see :class:`.Server`.
        **kwargs: the same.
    """

    def __init__(self, client: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.client = client

    def aggregate(self, updates: Iterable[ClientUpdate]) -> dict[str, float]:
        """Merge a round's updates; see :meth:`.Server.aggregate`."""
        return super().aggregate(update for update in updates if update.client == self.client)
