"""Batches that go on in the next round where the last one stopped: through lost turns, stops, on worker processes and at sites."""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tiny import CLASSES, Net, Stop, assert_same_end, new_data, new_federation, new_method, new_trainer, sgd
from tiny_rounds import Losing
from tiny_sites import STUDY, Clock, Memory

from lightning_fed.core.fine_tuning import FineTuning
from lightning_fed.data import InMemory
from lightning_fed.data.batches import ShuffledBatches
from lightning_fed.deployment.data import DataAtSites
from lightning_fed.deployment.engine import Sites
from lightning_fed.deployment.site import OneClient, Site
from lightning_fed.engines import InProcess, Processes
from lightning_fed.engines.silence import quiet_lightning
from lightning_fed.engines.worker_spec import WorkerSpec
from lightning_fed.errors import FederationError
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import FedAvg
from lightning_fed.seeding import ORDER, derive_seed

STEPS = 3


class Noting(FedAvg):
    """FedAvg that notes the first number of each example that it is trained on, by client."""

    seen: ClassVar[defaultdict[int, list[float]]] = defaultdict(list)

    def client_step(self, batch: Any) -> torch.Tensor:
        assert self.client is not None
        self.seen[self.client.id] += batch[0].flatten(1)[:, 0].tolist()
        return super().client_step(batch)


def data() -> InMemory:
    return new_data(3, 120, batch_size=8, continue_epochs=True, single_example="keep")


def fit(rounds: int, path: str | None = None, folder: Path | None = None, **options: Any) -> Federation:
    method = Noting if "engine" not in options or isinstance(options["engine"], Losing) else FedAvg
    federation = new_federation(rounds, **{"run_dir": folder, "evaluate_every": 0} | options)
    federation.fit(method(Net, CLASSES, optimizer=sgd, steps=STEPS), data(), path)
    return federation


def expected(client: int, steps: int) -> list[float]:
    """What a client sees in its first steps: permutations, one after the other."""
    own = data().client(client)
    sampler = ShuffledBatches(own.splits[0], 8, derive_seed(0, ORDER, client), "keep")
    batches: list[torch.Tensor] = []
    for epoch in range(-(-steps // len(sampler))):
        sampler.set_epoch(epoch)
        batches += sampler
    inputs = own.data.images
    assert isinstance(inputs, torch.Tensor)
    return inputs[torch.cat(batches[:steps])].flatten(1)[:, 0].tolist()


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    Noting.seen.clear()


def test_batches_go_on_through_epochs_that_are_cut_short() -> None:
    sampler, one_epoch = ShuffledBatches(torch.arange(20), 6, seed=5, start=3), ShuffledBatches(torch.arange(20), 6, seed=5)
    assert len(sampler) == 4
    played = [batch for _, batch in zip(range(2), sampler, strict=False)] + list(sampler)  # the first epoch is cut short
    whole = []
    for epoch in range(3):
        one_epoch.set_epoch(epoch)
        whole += one_epoch
    assert [batch.tolist() for batch in played] == [batch.tolist() for batch in whole[3:9]]
    assert sorted(torch.cat(whole[4:8]).tolist()) == list(range(20))


def test_a_round_goes_on_where_the_last_one_stopped_and_a_lost_turn_moves_nothing() -> None:
    fit(5, engine=Losing(lambda turn: (turn.verb, turn.round, turn.client.id) == ("fit", 2, 1)))
    sizes = [len(data().client(client).splits[0]) for client in range(3)]
    assert min(sizes) < 5 * STEPS * 8  # more than an epoch of some
    for client, turns in enumerate([5, 4, 5]):
        assert Noting.seen[client] == expected(client, turns * STEPS)


def test_a_run_that_was_stopped_goes_on_with_the_batch_that_was_next(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(4, folder=tmp_path, callbacks=[Stop(3)])  # before its checkpoint
    Noting.seen.clear()
    fit(4, "last", tmp_path)
    for client in range(3):  # rounds 3 and 4
        already = len(expected(client, 2 * STEPS))
        assert Noting.seen[client] == expected(client, 4 * STEPS)[already:]


def test_worker_processes_play_the_same_batches(tmp_path: Path, two_workers: Processes) -> None:
    options = {"participation": 0.7, "evaluate_every": 1}
    fit(3, folder=tmp_path / "one", engine=InProcess(), **options)
    fit(2, folder=tmp_path / "two", engine=two_workers, **options)
    fit(3, "last", tmp_path / "two", engine=two_workers, **options)
    assert_same_end(tmp_path / "one" / "version_0", tmp_path / "two" / "version_0")


def test_sites_fine_tune_on_the_batches_of_one_process(tmp_path: Path) -> None:
    """Only what is trained in rounds goes on where it stopped."""
    method = FedAvg(Net, CLASSES, optimizer=sgd, steps=STEPS, fine_tuning=FineTuning(epochs=1))
    with quiet_lightning():
        specs = [WorkerSpec(method.unbuilt_copy(), OneClient(data(), client, client), new_trainer, 0) for client in range(3)]
        link = Memory({client: Site(spec, client, STUDY, tmp_path / str(client)) for client, spec in enumerate(specs)})
    apart, together = new_federation(2, engine=Sites(link, 3, STUDY, poll=0.01)), new_federation(2, trainer=new_trainer)
    apart.fit(method, DataAtSites(data()))
    together.fit(method, data())
    assert apart.run.results == together.run.results


def test_sites_go_on_where_the_server_stopped_and_train_again_what_it_did_not_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("lightning_fed.deployment.engine.time", clock)
    method = Noting(Net, CLASSES, optimizer=sgd, steps=STEPS)

    def lose(client: int, head: dict[str, Any], answer: Callable[[], bytes]) -> bytes | None:
        answered = answer()
        return None if (head.get("verb"), head.get("round"), client) == ("fit", 2, 1) else answered

    with quiet_lightning():
        specs = [WorkerSpec(method, OneClient(data(), client, client), new_trainer, 0) for client in range(3)]
        link = Memory({client: Site(spec, client, STUDY, tmp_path / str(client)) for client, spec in enumerate(specs)}, lose)

    def serve(path: str | None = None, **options: Any) -> None:
        engine = Sites(link, 3, STUDY, wait=5.0, deadline=5.0, poll=0.1, quorum=0.5)
        federation = new_federation(4, engine=engine, run_dir=tmp_path / "runs", evaluate_every=0, **options)
        federation.fit(method, DataAtSites(data()), path)

    with pytest.raises(KeyboardInterrupt):
        serve(callbacks=[Stop(3)])  # before its checkpoint
    stopped = {client: list(seen) for client, seen in Noting.seen.items()}
    serve("last")
    for client in (0, 2):  # round 3 is played twice
        assert stopped[client] == expected(client, 3 * STEPS)
        assert Noting.seen[client] == stopped[client] + expected(client, 4 * STEPS)[len(expected(client, 2 * STEPS)) :]
    second = expected(1, 2 * STEPS)[len(expected(1, STEPS)) :]
    third = expected(1, 3 * STEPS)[len(expected(1, 2 * STEPS)) :]
    assert stopped[1] == expected(1, STEPS) + second + second
    assert Noting.seen[1] == stopped[1] + second + third


@pytest.mark.parametrize("name", ["FedALA", "FedAS"])
def test_turns_of_different_lengths_are_refused(name: str) -> None:
    with pytest.raises(FederationError, match=f"continue_epochs is set, but {name}'s turns differ in length"):
        new_federation(1).fit(new_method(name), data())
