"""Clients that are never trained with: nobody else's numbers know of them, and they get what the method's own procedure gives."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from often import mostly_slow
from tiny import (
    CLASSES,
    METHODS,
    Net,
    NoisyNet,
    Recording,
    assert_same,
    momentum,
    new_data,
    new_federation,
    new_method,
    same,
    without_seconds,
)

import lightning_fed.methods
from lightning_fed.core import FineTuning, PublicDistillation
from lightning_fed.core.messages import STAGES, Turn
from lightning_fed.core.module import FederatedModule
from lightning_fed.data import ByColumn, InMemory
from lightning_fed.engines import Processes
from lightning_fed.errors import FederationError
from lightning_fed.experiments.report.runs import UNSEEN
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import FedAvg, FedHM, FedRep
from lightning_fed.methods.families.adapter_module import AdapterModule

model = partial(FedAvg, Net, CLASSES, momentum)
ON_NUMBERS = [name for name in METHODS if not issubclass(getattr(lightning_fed.methods, name), (AdapterModule, PublicDistillation))]


def fit(method: FederatedModule, data: InMemory | None = None, **options: Any) -> tuple[Federation, Recording]:
    engine = Recording()
    federation = new_federation(2, **{"engine": engine, "unseen": [1, 3]} | options)
    federation.fit(method, data or new_data(5, 200))
    return federation, engine


def test_a_share_is_drawn_by_the_seed_and_never_takes_part() -> None:
    drawn = set()
    for seed in range(6):
        federation, engine = fit(model(), unseen=0.4, participation=0.7, seed=seed)
        assert len(federation.run.unseen) == 2
        assert not {turn.client.id for turn in engine.turns if turn.verb == "fit"} & federation.run.unseen
        assert federation.run.unseen == fit(model(), unseen=0.4, participation=0.7, seed=seed)[0].run.unseen
        drawn.add(federation.run.unseen)
    assert len(drawn) > 1


def with_other_examples(data: InMemory, clients: list[int]) -> InMemory:
    """The same, but some clients' training images are noise."""
    data.setup()
    for client in clients:
        places = data.client(client).splits[0]
        data.client(client).data.images[places] = torch.randn(len(places), 3, 4, 4, generator=torch.Generator().manual_seed(client))
    return data


@pytest.mark.often(2)
@pytest.mark.parametrize("name", ["FedAvg", "FedRep", "FedHM", "Centralized"])
def test_what_they_train_on_changes_no_number_of_others(name: str) -> None:
    """Means over clients, the global model's test data and gathered statistics included; their own change."""
    plain, other = (fit(new_method(name), data)[0] for data in (new_data(5, 200), with_other_examples(new_data(5, 200), [1, 3])))
    assert same(plain.run.server.state_dict(), other.run.server.state_dict())
    one, two = (without_seconds(federation.run.history)[-1] for federation in (plain, other))
    differing = {key for key in one if one[key] != two[key]}
    assert any(key.startswith("unseen/fine_tuned") for key in differing)
    assert all(key.startswith(("unseen/fine_tuned", "unseen/personalized", "unseen/gap")) for key in differing)


def test_a_sized_model_is_measured_with_the_others_statistics() -> None:
    federation, engine = fit(FedHM(NoisyNet, CLASSES, ratios=[0.5, 1.0], optimizer=momentum))
    assert {turn.client.id for turn in engine.turns if turn.verb == "compute_statistics"} == {0, 2, 4}
    row = federation.run.history[-1]
    assert row["unseen/personalized/test_accuracy/mean"] == row["unseen/as_received/test_accuracy/mean"]


def test_fedreps_new_client_trains_its_head_on_the_features_that_came() -> None:
    federation, _ = fit(FedRep(Net, CLASSES, optimizer=momentum, head_epochs=3), seed=1)
    run = federation.run
    info = run.clients[1]
    sent = run.server.broadcast(info)
    run.local.run_turn(Turn("personalize", info, 2, sent, evaluated_with=sent), None)
    [module] = run.local._modules.values()  # as it was measured last
    assert same(module.shared_state(), run.server.state)
    assert not same(module.private_state(), run.local.clients.of(info).private_state())
    row = run.history[-1]
    gap = row["after/test_accuracy/mean"] - row["unseen/personalized/test_accuracy/mean"]
    assert row["unseen/gap"] == gap


def test_fine_tuning_is_in_what_they_take() -> None:
    plain, tuned = (fit(new_method(name))[0].run.history[-1] for name in ("FedAvg", "FedAvgFT"))
    assert tuned["unseen/flops"] > plain["unseen/flops"] > 0


def test_they_are_fine_tuned_when_the_others_are() -> None:
    """Else the gap would be one of fine-tuned clients to others."""
    methods = (new_method("FedAvg", fine_tuning=FineTuning(epochs=3, when=when)) for when in ("always", "last"))
    (tuned, _), (first, final) = (without_seconds(fit(method, evaluate_every=1)[0].run.history) for method in methods)
    assert first["unseen/personalized/test_accuracy/mean"] == first["unseen/as_received/test_accuracy/mean"]
    assert first["unseen/flops"] < tuned["unseen/flops"] == final["unseen/flops"]
    assert final["unseen/gap"] == final["fine_tuned/test_accuracy/mean"] - final["unseen/personalized/test_accuracy/mean"]


def test_they_are_rows_of_their_own(tmp_path: Path) -> None:
    federation, _ = fit(model(), run_dir=tmp_path)
    lines = (tmp_path / "version_0" / "clients.csv").read_text().splitlines()
    table = [dict(zip(lines[0].split(","), line.split(","), strict=True)) for line in lines[1:]]
    for client, row in enumerate(table):
        assert bool(row["test/accuracy"]) == (client not in (1, 3))
        assert all(bool(row[f"{stage}/test/accuracy"]) == (client in (1, 3)) for stage in STAGES)
    assert federation.run.results.keys() == set(range(5))
    assert UNSEEN == STAGES


def some_with_test_data_alone() -> InMemory:
    """Users a to d, of whom b has no training examples."""
    users, labels = list("acd") * 20 + list("abcd") * 5, torch.arange(80) % CLASSES
    images = torch.randn(80, 3, 4, 4, generator=torch.Generator().manual_seed(2)) + labels.view(-1, 1, 1, 1)
    tests = {"test_images": images[60:], "test_labels": labels[60:]}
    return InMemory(
        images[:60], labels[:60], **tests, columns={"user": users}, partition=ByColumn("user"), split="official", batch_size=8
    )


@pytest.mark.parametrize("name", mostly_slow(ON_NUMBERS, often={"FedRep", "PerFedAvg"}))
def test_who_has_nothing_to_train_on_is_measured_as_it_comes(name: str) -> None:
    """Its other values are missing, and means are over those that have one."""
    engine = Recording()
    federation = new_federation(2, engine=engine, unseen=[1, 3], run_dir="runs")
    federation.fit(new_method(name), some_with_test_data_alone())
    results, row = federation.run.results, federation.run.history[-1]
    assert all(key.startswith("as_received/") for key in results[1])
    assert {turn.verb for turn in engine.turns if turn.client.id == 1} == {"evaluate"}
    assert all(math.isfinite(value) for value in results[1].values())
    measure = federation.run.metric
    received = [results[client][f"as_received/test/{measure}"] for client in (1, 3)]
    assert row[f"unseen/as_received/test_{measure}/mean"] == pytest.approx(sum(received) / 2)
    assert row[f"unseen/personalized/test_{measure}/mean"] == pytest.approx(results[3][f"personalized/test/{measure}"])


def test_who_has_nothing_to_train_on_must_be_unseen() -> None:
    for unseen in (None, [3]):
        with pytest.raises(FederationError, match=r"1 of 4 clients have no training examples.*\(\[1\], …\): set unseen"):
            new_federation(1, unseen=unseen).fit(model(), some_with_test_data_alone())
    federation = new_federation(1, unseen=0.25)
    federation.fit(model(), some_with_test_data_alone())
    assert federation.run.unseen == {1}


def test_processes_give_the_same_and_a_run_goes_on(two_workers: Processes, tmp_path: Path) -> None:
    whole, _ = fit(FedRep(Net, CLASSES, optimizer=momentum))
    apart = new_federation(2, engine=two_workers, unseen=[1, 3])
    apart.fit(FedRep(Net, CLASSES, optimizer=momentum), new_data(5, 200))
    assert_same(apart, whole)
    new_federation(1, run_dir=tmp_path, unseen=[1, 3]).fit(FedRep(Net, CLASSES, optimizer=momentum), new_data(5, 200))
    again = new_federation(2, run_dir=tmp_path, unseen=[1, 3])
    again.fit(FedRep(Net, CLASSES, optimizer=momentum), new_data(5, 200), ckpt_path="last")
    assert same(again.run.server.state_dict(), whole.run.server.state_dict())
    with pytest.raises(FederationError, match="was made with data"):
        new_federation(3, run_dir=tmp_path, unseen=[2]).fit(
            FedRep(Net, CLASSES, optimizer=momentum), new_data(5, 200), ckpt_path="last"
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unseen": 0.95}, "unseen is 0.95, which is 5 of 5 clients: leave some"),
        ({"unseen": 1.0}, "unseen is 1.0: give a share"),
        ({"unseen": math.nan}, "unseen is nan: give a share"),
        ({"unseen": [True]}, r"unseen is \[True\]: give ids of some clients"),
        ({"unseen": [7]}, r"unseen is \[7\]: give ids of some clients, from 0 to 4, and not all"),
        ({"unseen": [0, 1], "eligible_clients": [1]}, r"eligible_clients is \[1\], which are all unseen"),
    ],
)
def test_what_leaves_nobody_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FederationError, match=message):
        fit(model(), **options)
