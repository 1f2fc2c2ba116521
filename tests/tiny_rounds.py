"""Short federations of methods for clients of different model_size, and updates that are checked as in a round."""

from collections.abc import Iterable, Iterator
from typing import Any

from tiny import new_data, new_federation

from lightning_fed.core.aggregation import check_update
from lightning_fed.core.messages import ClientUpdate
from lightning_fed.core.module import FederatedModule
from lightning_fed.core.server import Server
from lightning_fed.data import ClassesPerClient, InMemory
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import FedAvg


class UniformFedAvg(FedAvg):
    """FedAvg that counts every client the same."""

    weighting = "uniform"


def fit(model: FederatedModule, data: InMemory | None = None, rounds: int = 1, **options: Any) -> Federation:
    federation = new_federation(rounds, **{"evaluate_every": 0} | options)
    federation.fit(model, data or new_data(3, 120), options.get("run_dir") and "last")
    return federation


def two_classes_each() -> InMemory:
    return new_data(3, 120, partition=ClassesPerClient(2), test_share=0.4, batch_size=10)


def checked(server: Server, updates: Iterable[ClientUpdate]) -> Iterator[ClientUpdate]:
    """Updates, each checked before it is passed on, as a run does."""
    for update in updates:
        check_update(update, server.expected_payload(update, server.broadcast(ClientInfo(update.client, 1, 0, 0, ()))))
        yield update
