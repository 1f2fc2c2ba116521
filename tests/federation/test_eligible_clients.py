"""Who may take part in a federation, and who is only measured."""

from functools import partial
from typing import Any

import pytest
from tiny import CLASSES, Net, NoisyNet, Recording, momentum, new_data, new_federation, new_method, same

from lightning_fed.core.module import FederatedModule
from lightning_fed.errors import FederationError
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import FedAvg, FedHM, PFedLoRA

model = partial(FedAvg, Net, CLASSES, momentum)


def fit(method: FederatedModule, rounds: int = 3, **options: Any) -> tuple[Federation, Recording]:
    engine = Recording()
    federation = new_federation(rounds, **{"engine": engine, "evaluate_every": 0} | options)
    federation.fit(method, new_data(5, 200))
    return federation, engine


def test_cohorts_are_drawn_of_the_participants_and_everybody_is_measured() -> None:
    federation, engine = fit(model(), rounds=6, participation=0.7, eligible_clients=[4, 1, 3])
    trained = [turn.client.id for turn in engine.turns if turn.verb == "fit"]
    assert len(trained) == 6 * 2  # 0.7 of three
    assert set(trained) == {1, 3, 4}
    assert federation.run.results.keys() == set(range(5))


def test_at_full_participation_all_of_them_take_part_in_client_order() -> None:
    _, engine = fit(model(), rounds=1, eligible_clients=[4, 1])
    assert [turn.client.id for turn in engine.turns if turn.verb == "fit"] == [1, 4]


def test_naming_everybody_is_as_naming_nobody() -> None:
    named, default = (fit(model(), participation=0.5, eligible_clients=ids)[0] for ids in ([0, 1, 2, 3, 4], None))
    assert same(named.run.server.state_dict(), default.run.server.state_dict())


def test_statistics_are_those_of_the_participants() -> None:
    _, engine = fit(FedHM(NoisyNet, CLASSES, ratios=[1.0], optimizer=momentum), rounds=1, eligible_clients=[0, 2])
    assert {turn.client.id for turn in engine.turns if turn.verb == "compute_statistics"} == {0, 2}


def test_who_is_not_among_them_is_measured_as_it_was_drawn() -> None:
    federation, _ = fit(PFedLoRA(Net, CLASSES, optimizer=momentum), eligible_clients=[0])
    drawn = federation.run.model.for_client(federation.run.clients[3], federation.seed).private_state()
    mine = federation.client_module(3).private_state()
    assert same(mine, drawn)
    assert 3 not in federation.run.store


@pytest.mark.parametrize(
    ("participants", "message"),
    [
        ([], r"eligible_clients is \[\]: give some of the clients' ids, 0 to 4"),
        ([1, 5], r"eligible_clients is \[1, 5\]: give some"),
    ],
)
def test_participants_that_there_are_not_are_refused(participants: list[int], message: str) -> None:
    with pytest.raises(FederationError, match=message):
        fit(model(), eligible_clients=participants)


def test_pooled_training_has_none() -> None:
    federation = new_federation(1, eligible_clients=[0])
    with pytest.raises(FederationError, match="CentralizedLoRA trains on the pooled data of all clients"):
        federation.fit(new_method("CentralizedLoRA"), new_data(3, 60))
