"""Hostile clients: what they send, what stops them, and that others alone are measured."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tiny import CLASSES, Net, NoisyNet, Recording, Shuffled, assert_same, momentum, new_data, new_federation, new_method, same

from lightning_fed.core.messages import ClientUpdate
from lightning_fed.core.robust import ClippedMean, GeometricMedian, Krum, Median, MultiKrum, TrimmedMean
from lightning_fed.engines import Processes
from lightning_fed.errors import FederationError
from lightning_fed.federation.attacks import (
    Attack,
    GaussianNoise,
    InnerProduct,
    LabelFlip,
    LittleIsEnough,
    SignFlip,
    UpdateAttack,
    little_is_enough,
)
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import FedAvg, FedRep

ATTACKS: list[Attack] = [SignFlip(), GaussianNoise(), LittleIsEnough(z=1.0), InnerProduct(), LabelFlip()]


def fit(method: Any = None, rounds: int = 2, **options: Any) -> Federation:
    federation = new_federation(rounds, **options)
    federation.fit(method or FedAvg(Net, CLASSES, momentum, weighting="uniform"), new_data(5, 150))
    return federation


def sent(attack: UpdateAttack, rows: list[list[float]], attackers: set[int]) -> list[list[float]]:
    updates = [ClientUpdate(k, 1, {"w": torch.tensor(row), "n": torch.tensor(k)}) for k, row in enumerate(rows)]
    start = {"w": torch.ones(len(rows[0])), "n": torch.tensor(0)}
    changed = list(attack.sent(updates, attackers, start, np.random.default_rng(0)))
    assert [update.client for update in changed] == list(range(len(rows)))
    assert [int(update.state["n"]) for update in changed] == list(range(len(rows)))
    return [update.state["w"].tolist() for update in changed]


def test_known_answers() -> None:
    """Changes of 1: what a client sends is that and the server's 1."""
    honest = [[2.0, 3.0, 4.0], [5.0, 6.0, 7.0], [8.0, 9.0, 10.0]]
    rows = [[4.0, 4.0, 4.0], *honest]
    assert sent(SignFlip(scale=2.0), rows, {0})[0] == [-5.0, -5.0, -5.0]
    assert sent(InnerProduct(tau=2.0), rows, {0})[0] == [-7.0, -9.0, -11.0]
    assert sent(LittleIsEnough(z=1.5), rows, {0})[0] == [0.5, 1.5, 2.5]  # a mean of 4 and a deviation of 3
    for attack in (SignFlip(), InnerProduct(), LittleIsEnough()):
        assert sent(attack, rows, {0})[1:] == honest


@pytest.mark.parametrize("attack", [SignFlip(scale=2.0), GaussianNoise()], ids=str)
def test_who_knows_nobody_else_waits_for_nobody(attack: UpdateAttack) -> None:
    arrived: list[int] = []

    def updates() -> Iterator[ClientUpdate]:
        for client in range(3):
            arrived.append(client)
            yield ClientUpdate(client, 1, {"w": torch.ones(2)})

    emitted = attack.sent(updates(), {0, 2}, {"w": torch.zeros(2)}, np.random.default_rng(0))
    assert [(update.client, len(arrived)) for update in emitted] == [(0, 1), (1, 2), (2, 3)]


def test_what_is_too_large_to_be_sent_is_refused() -> None:
    with pytest.raises(
        FederationError, match=r"scale=1e\+39\) sends numbers that are too large for torch.float32: choose a smaller"
    ):
        sent(SignFlip(scale=1e39), [[4.0], [2.0]], {0})


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0], ids=str)
@pytest.mark.parametrize(
    ("attack", "option"),
    [
        (SignFlip, "scale"),
        (GaussianNoise, "std"),
        (LittleIsEnough, "z"),
        (InnerProduct, "tau"),
        (LabelFlip, "share"),
        (SignFlip, "share"),
    ],
)
def test_options_that_are_no_such_numbers_are_refused(attack: type[Attack], option: str, value: float) -> None:
    with pytest.raises(FederationError, match=f"Got {option}={value}: give a"):
        attack(**{option: value})


@pytest.mark.parametrize(("clients", "attackers", "z"), [(50, 24, 1.426), (20, 4, 0.157), (10, 2, 0.0), (4, 3, 0.0)])
def test_how_far_off_is_little_enough(clients: int, attackers: int, z: float) -> None:
    assert little_is_enough(clients, attackers) == pytest.approx(z, abs=1e-3)


@pytest.mark.often(2)
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: type(attack).__name__)
def test_attackers_are_drawn_by_the_seed_and_not_measured(attack: Attack) -> None:
    federation, engine = fit(attack=attack, seed=2), Recording()
    again = fit(attack=attack, seed=2, engine=engine)
    assert_same(again, federation)
    run = federation.run
    assert len(run.attackers) == 1
    honest = [update for turn, update in engine.fits(2) if turn.client.id not in run.attackers]
    weights, losses = ([update.num_examples for update in honest], [update.metrics["train/local_loss"] for update in honest])
    assert run.history[-1]["train/local_loss"] == pytest.approx(np.average(losses, weights=weights))
    assert run.history[-1]["compute/flops"] == sum(update.metrics["flops"] for _, update in engine.fits(2))
    assert run.results.keys() == set(range(5)) - run.attackers
    assert not same(run.server.state_dict(), fit(seed=2).run.server.state_dict())
    assert {turn.client.id for turn in engine.turns if turn.verb == "fit"} == set(range(5))
    assert run.history[-1]["before/test_accuracy/mean"] == pytest.approx(
        np.mean([update.metrics["test/accuracy"] for update in honest])
    )


def test_the_same_on_other_engines(two_workers: Processes) -> None:
    options: dict[str, Any] = {"attack": LabelFlip(0.4), "aggregation": GeometricMedian(), "seed": 1}
    plain = fit(**options)
    for engine in (Shuffled(), two_workers):
        assert_same(fit(engine=engine, **options), plain)
    assert_same(fit(store_limit_mb=1e-6, **options), plain)


def test_a_run_without_attackers_has_the_labels_back() -> None:
    data = new_data(5, 150)
    attacked = new_federation(1, attack=LabelFlip(0.4))
    attacked.fit(FedAvg(Net, CLASSES, momentum), data)
    first, second = (data.client(client).data for client in sorted(attacked.run.attackers))
    assert first is second  # made once
    after = new_federation(1)
    after.fit(FedAvg(Net, CLASSES, momentum), data)
    fresh = new_federation(1)
    fresh.fit(FedAvg(Net, CLASSES, momentum), new_data(5, 150))
    assert_same(after, fresh)
    assert after.run.clients == fresh.run.clients != attacked.run.clients
    assert not same(attacked.run.server.state_dict(), fresh.run.server.state_dict())


@pytest.mark.parametrize("name", ["FedRoD", "HeteroFL", "FD"])
def test_flipped_labels_are_those_of_data_that_have_them(name: str) -> None:
    """Whatever a method knows of its clients' labels."""
    flipped, engine = new_data(5, 150), Recording()
    federation = new_federation(2, attack=LabelFlip(0.4), engine=engine)
    federation.fit(new_method(name), flipped)
    attackers, true = federation.run.attackers, new_data(5, 150)
    known = {turn.client.id: turn.client.label_counts for turn in engine.turns if turn.verb == "fit"}
    for client in true.clients:
        labels = torch.cat([batch[1] for batch in flipped.client(client.id).predict_dataloader()])
        assert known[client.id] == tuple(torch.bincount(labels, minlength=CLASSES).tolist())
        assert (known[client.id] == client.label_counts) == (client.id not in attackers)
    assert torch.equal(flipped.label_counts(), torch.tensor([known[k] for k in range(5)]))
    baseline, right = flipped.majority_accuracy(), true.majority_accuracy()
    assert baseline is not None
    assert right is not None
    assert torch.equal(baseline, right)


@pytest.mark.often(3)
@pytest.mark.parametrize("rule", [Median(), TrimmedMean(1), Krum(1), MultiKrum(1), GeometricMedian(), ClippedMean(1.0)], ids=str)
def test_a_rule_keeps_the_model_near_that_of_honest_clients(rule: Any) -> None:
    """One of five sends a hundred times its change, the other way round: the mean follows."""
    attack = SignFlip(0.2, scale=100.0)
    clean = fit(seed=2)
    kept, lost = fit(seed=2, attack=attack, aggregation=rule), fit(seed=2, attack=attack)

    def off(federation: Federation) -> float:
        state, other = federation.run.server.state, clean.run.server.state
        return math.sqrt(sum((state[name] - other[name]).square().sum().item() for name in state))

    assert off(kept) < 0.1 * off(lost)


def test_a_personalized_method_is_attacked_in_what_travels() -> None:
    federation = fit(FedRep(Net, CLASSES, optimizer=momentum), attack=SignFlip(0.4, scale=5.0), aggregation=Median())
    assert math.isfinite(federation.run.history[-1]["after/test_loss/mean"])


def test_batch_norm_is_combined_by_medians() -> None:
    engine = Recording()
    state = fit(FedAvg(NoisyNet, CLASSES, momentum), rounds=1, aggregation=Krum(1), engine=engine).run.server.state
    for name in ("running_mean", "running_var"):
        sent = torch.stack([update.state[f"backbone.norm.{name}"] for update in engine.trained])
        assert torch.equal(state[f"backbone.norm.{name}"], sent.median(dim=0).values)
    assert state["backbone.norm.num_batches_tracked"].dtype == torch.int64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"aggregation": Krum(2)},
            "Krum needs 7 updates, and a round has 5 clients: draw larger cohorts, or give a rule that needs fewer",
        ),
        (
            {"aggregation": Median(), "method": new_method("SCAFFOLD")},
            "SCAFFOLD got aggregation=Median, but its server does not take",
        ),
        ({"attack": SignFlip(0.05)}, "attack.share is 0.05, which is 0 of 5 clients"),
        ({"attack": SignFlip(1.0)}, "which is 5 of 5 clients"),
        *(
            ({"attack": SignFlip(0.4), "method": new_method(name)}, f"{name} does not send all clients the same one")
            for name in ("FedHM", "SplitMix", "FedAMP", "FD")
        ),
        ({"attack": SignFlip(0.4), "method": new_method("PFedGate")}, "clients send '.*', which is not part of it"),
        *(
            (
                {"attack": attack(0.4), "method": new_method("Centralized")},
                f"{attack.__name__} makes clients hostile, but Centralized",
            )
            for attack in (SignFlip, LabelFlip)
        ),
        ({"attack": SignFlip(0.4), "method": new_method("Standalone")}, "clients send none: choose another method"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FederationError, match=message):
        fit(**options)
