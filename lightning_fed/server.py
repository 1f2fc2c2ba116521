"""What the server keeps, what it sends, and how it merges what comes back."""

from collections.abc import Iterable
from typing import Literal

from lightning_fed.aggregation import WeightedMean, check_update
from lightning_fed.exchange import Broadcast, ClientInfo, ClientUpdate, State


class Server:
    r"""Federated averaging: one state, sent to everybody, replaced by the mean of the updates.

    With ``weighting="examples"`` (McMahan et al. 2017, Algorithm 1) client :math:`k` counts :math:`n_k / \sum_{j \in S} n_j`,
    :math:`n` being training examples and :math:`S` the clients that took part in the round; with ``"uniform"`` everybody counts
    the same. Either way the weights sum to 1 over the participants.

    Args:
        state: the initial shared state.
        weighting: how updates are weighted.
    """

    def __init__(self, state: State, weighting: Literal["examples", "uniform"] = "examples") -> None:
        self.state = state
        self.weighting = weighting

    def broadcast(self, client: ClientInfo) -> Broadcast:
        """What ``client`` receives at the start of its turn."""
        return Broadcast(self.state)

    def aggregate(self, updates: Iterable[ClientUpdate]) -> dict[str, float]:
        """Merge a round's updates, which arrive one at a time and in client order; returns metrics, none by default.

        Raises:
            FederationError: for an update that does not fit or is not finite; the server's state is then unchanged.
        """
        mean = WeightedMean()
        for update in updates:
            check_update(update, self.state)
            mean.add(update.state, update.num_examples if self.weighting == "examples" else 1)
        if self.state:
            self.state = mean.result()
        return {}

    def state_dict(self) -> State:
        """Everything a checkpoint must hold."""
        return self.state

    def load_state_dict(self, state: State) -> None:
        """Continue from :meth:`state_dict`."""
        self.state = state
