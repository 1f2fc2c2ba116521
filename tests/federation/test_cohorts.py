"""Cohorts that vary: who is drawn, who drops out, and that it is the same wherever turns run."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import CLASSES, Net, Recording, Shuffled, assert_same, momentum, new_data, new_federation, new_method, same

from lightning_fed.data.client_info import ClientInfo
from lightning_fed.engines import Processes
from lightning_fed.errors import FederationError
from lightning_fed.federation.cohorts import draw_cohort, dropouts
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import FedAvg, FedRep
from lightning_fed.seeding import COHORT

model = partial(FedRep, Net, CLASSES, optimizer=momentum)
varying: dict[str, Any] = {"sampling": "poisson", "participation": 0.5, "dropout": 0.4}


def clients(count: int) -> list[ClientInfo]:
    return [ClientInfo(client, 1, 1, 1, ()) for client in range(count)]


def fit(rounds: int = 4, **options: Any) -> Federation:
    federation = new_federation(rounds, **options)
    federation.fit(model(), new_data(4, 100), **({"ckpt_path": "last"} if options.get("run_dir") else {}))
    return federation


def test_poisson_cohorts_are_independent_draws_of_each_client() -> None:
    """Marginals and pairs, each within four standard errors; and independent of the round before."""
    rounds, rate = 4000, 0.3
    taken = np.zeros((rounds, 6))
    for round in range(rounds):
        taken[round, [client.id for client in draw_cohort(clients(6), "poisson", rate, [5, COHORT, round + 1])]] = 1
    error = np.sqrt(rate * (1 - rate) / rounds)
    assert abs(taken.mean(axis=0) - rate).max() < 4 * error
    pairs = taken.T @ taken / rounds
    off = ~np.eye(6, dtype=bool)
    assert abs(pairs[off] - rate**2).max() < 4 * np.sqrt(rate**2 * (1 - rate**2) / rounds)
    assert abs((taken[1:] * taken[:-1]).mean(axis=0) - rate**2).max() < 4 * np.sqrt(rate**2 * (1 - rate**2) / rounds)
    sizes = taken.sum(axis=1)
    assert sizes.min() == 0
    assert sizes.var() == pytest.approx(6 * rate * (1 - rate), rel=0.1)


def test_fixed_cohorts_are_those_that_they_always_were() -> None:
    """Of a seed and a round, for ever: a run of an older version goes on with its own cohorts."""
    drawn = [[client.id for client in draw_cohort(clients(10), "fixed", 0.3, [0, COHORT, round])] for round in (1, 2, 3)]
    expected = [sorted(np.random.default_rng([0, 0, round]).choice(10, 3, replace=False)) for round in (1, 2, 3)]
    assert drawn == expected


def test_a_client_drops_out_whoever_else_takes_part() -> None:
    everybody = dropouts(clients(50), 0.3, 0.0, 1, 7)
    assert 5 < len(everybody) < 25
    some = [client for client in clients(50) if client.id % 3 == 0]
    assert dropouts(some, 0.3, 0.0, 1, 7) == {client for client in everybody if client % 3 == 0}
    assert dropouts(clients(50), 0.3, 0.0, 1, 8) != everybody


def test_below_the_quorum_a_round_is_given_up() -> None:
    cohort = clients(20)
    away = dropouts(cohort, 0.5, 0.0, 3, 1)
    stays = (20 - len(away)) / 20
    assert dropouts(cohort, 0.5, stays, 3, 1) == away
    assert dropouts(cohort, 0.5, stays + 0.01, 3, 1) == set(range(20))
    rate = next(rate for rate in np.linspace(0.9, 0.99, 91) if len(dropouts(clients(100), rate, 0.0, 3, 1)) == 93)
    assert len(dropouts(clients(100), rate, 0.07, 3, 1)) == 93  # 0.07 of 100 is 7.000000000000001


def test_who_drops_out_was_sent_the_model_and_nothing_of_it_is_merged() -> None:
    engine = Recording()
    run = fit(rounds=6, dropout=0.4, participation=1.0, engine=engine, seed=2).run
    stayed_in = [sum((turn.verb, turn.round) == ("fit", round) for turn in engine.turns) for round in range(1, 7)]
    assert len(set(stayed_in)) > 1
    for row, stayed in zip(run.history, stayed_in, strict=True):
        assert row.get("round/failed_clients", 0) == 4 - stayed
        assert row["traffic/down_bytes"] == run.history[0]["traffic/down_bytes"]
        assert row["traffic/up_bytes"] * 4 == row["traffic/down_bytes"] * stayed


def test_the_same_on_other_engines_and_after_an_interruption(two_workers: Processes, tmp_path: Path) -> None:
    whole = fit(seed=3, **varying)
    sizes = [row["round/clients"] for row in whole.run.history]
    assert len(set(sizes)) > 1
    assert any("round/failed_clients" in row for row in whole.run.history)
    for engine in (Shuffled(), two_workers):
        assert_same(fit(seed=3, engine=engine, **varying), whole)
    for rounds in (1, 2, 4):
        again = fit(rounds, seed=3, run_dir=tmp_path, **varying)
    assert same(again.run.server.state_dict(), whole.run.server.state_dict())
    assert [row["round/clients"] for row in again.run.history] == sizes


@pytest.mark.parametrize("options", [{"sampling": "poisson"}, {"dropout": 0.5}])
@pytest.mark.parametrize("name", ["Centralized", "Cyclic"])
def test_who_says_itself_who_takes_part_is_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(FederationError, match=f"but {name} chooses the participants itself"):
        new_federation(1, **options).fit(new_method(name), new_data(3, 60))


@pytest.mark.parametrize("options", [{"sampling": "shuffled"}, {"dropout": 1.0}, {"quorum": 1.5}])
def test_what_is_no_probability_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(FederationError, match="give fixed or poisson, a probability below 1"):
        new_federation(1, **options)


def test_a_quorum_of_those_who_do_not_drop_out_needs_dropout() -> None:
    with pytest.raises(FederationError, match=r"quorum is 0.5, .* set dropout; .*quorum of the engine"):
        new_federation(1, quorum=0.5)


def test_naming_the_default_changes_nothing() -> None:
    plain, named = (new_federation(2, participation=0.5, **options) for options in ({}, {"sampling": "fixed", "dropout": 0.0}))
    for federation in (plain, named):
        federation.fit(FedAvg(Net, CLASSES, momentum), new_data(4, 100))
    assert_same(named, plain)
    assert "round/clients" not in plain.run.history[0]


@pytest.mark.parametrize(("participation", "size"), [(0.7, 3), (0.6, 2), (0.1, 1)])
def test_the_size_of_a_cohort_is_rounded_to_the_nearest(participation: float, size: int) -> None:
    federation = new_federation(1, participation=participation)
    federation.fit(FedAvg(Net), new_data(4, 80))
    assert federation.run.cohort_size == size
