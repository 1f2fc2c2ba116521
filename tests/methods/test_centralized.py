"""Centralised training: everybody's data in one place."""

import pytest
import torch
from tiny import CLASSES, Net, momentum, new_data, new_federation, same

from lightning_fed.data import IID
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import Centralized, FedAvg


def fit(method: type, clients: int) -> Federation:
    federation = new_federation(2, evaluate_every=1)
    federation.fit(method(Net, CLASSES, momentum), new_data(clients, 80, partition=IID(), batch_size=80))
    return federation


def test_with_one_client_it_is_that_client() -> None:
    """All examples are in one batch, in whatever order."""
    one, other = (fit(method, 1) for method in (Centralized, FedAvg))
    assert one.run.history[-1]["after/test_accuracy/mean"] == pytest.approx(one.run.history[-1]["global/test_accuracy"])
    torch.testing.assert_close(one.run.server.state, other.run.server.state)


def test_it_learns_from_everybody_and_sends_nothing() -> None:
    federation = fit(Centralized, 4)
    assert {value for row in federation.run.history for name, value in row.items() if name.startswith("traffic/")} == {0}
    assert federation.run.results.keys() == {0, 1, 2, 3}
    assert not same(federation.run.server.state, fit(FedAvg, 4).run.server.state)
