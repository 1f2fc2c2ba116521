"""Short federations of methods for clients of different capacity."""

from typing import Any

from tiny import new_data, new_federation

from lightning_fed.data import ClassesPerClient, InMemory
from lightning_fed.federation import Federation
from lightning_fed.methods import FedAvg
from lightning_fed.module import FederatedModule


class UniformFedAvg(FedAvg):
    """FedAvg that counts every client the same."""

    weighting = "uniform"


def fit(model: FederatedModule, data: InMemory | None = None, rounds: int = 1, **options: Any) -> Federation:
    federation = new_federation(rounds, **{"evaluate_every": 0} | options)
    federation.fit(model, data or new_data(3, 120))
    return federation


def two_classes_each() -> InMemory:
    return new_data(3, 120, partition=ClassesPerClient(2), test_share=0.4, batch_size=10)
