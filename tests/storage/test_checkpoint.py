"""Checkpoints are complete or absent, and what is damaged is noticed."""

import json
import random
import re
import shutil
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from often import mostly_slow
from tiny import CLASSES, assert_same_end, new_data, new_federation, new_method, new_trainer, same, without_seconds
from torchmetrics.classification import HammingDistance

import lightning_fed.storage.checkpoint
import lightning_fed.storage.client_store
from lightning_fed.errors import FederationError
from lightning_fed.storage.checkpoint import Checkpoint, Checkpoints
from lightning_fed.storage.client_store import ClientStore, read_state
from lightning_fed.storage.index import CLIENTS
from lightning_fed.storage.manifest import FORMAT, Best, Manifest
from lightning_fed.tensors import State

STATE = {"weight": torch.tensor([1.0, 0.1, -0.0]), "count": torch.tensor(3)}
IDENTITY = {"method": "PFedLoRA", "seed": 0, "clients": 500, "data": "0123abcd"}


def history(rounds: int) -> list[dict[str, float]]:
    """So many rounds, of which the second brings a new metric."""
    rows = [{"round": float(round), "accuracy": 0.1 + 0.2 * round} for round in range(1, rounds + 1)]
    return [row | ({"other": -0.0} if row["round"] == 2 else {}) for row in rows]


def best(round: int | None) -> Best | None:
    """A round that is taken for the best."""
    return None if round is None else Best(round, 0.5, 0.25)


@pytest.fixture
def checkpoints() -> Checkpoints:
    return Checkpoints(Path("run"))


@pytest.fixture
def store(checkpoints: Checkpoints) -> ClientStore:
    return ClientStore(checkpoints.clients_folder, memory_limit=10**6)


def save(checkpoints: Checkpoints, store: ClientStore, round: int) -> Path:
    """A round in which client 0 changed and, once, client 1."""
    since = {0: round}
    store.put(0, {"x": torch.tensor([float(round)])}, round)
    if round == 1:
        store.put(1, {"x": torch.tensor([-1.0])}, round)
        since[1] = round
    return checkpoints.save(Manifest(round, IDENTITY, 1), history(round), STATE, store, since)


def client_files(run_folder: Path = Path("run")) -> set[str]:
    """Names of the files of private states."""
    return {path.name for path in (run_folder / "clients").iterdir()}


def referred_to(checkpoints: Checkpoints) -> set[str]:
    """Names of the files of private states that the checkpoints there are need."""
    loaded = [checkpoints.load(path) for path in checkpoints.paths()]
    return {record["file"] for checkpoint in loaded for record in (*checkpoint.clients.values(), *checkpoint.client_state.values())}


@pytest.mark.parametrize("rounds", [1, 4])
def test_what_is_saved_comes_back_bit_for_bit(checkpoints: Checkpoints, store: ClientStore, rounds: int) -> None:
    *_, path = [save(checkpoints, store, round) for round in range(1, rounds + 1)]
    checkpoint, problems = checkpoints.latest()
    assert (checkpoint.path, checkpoint.run_folder, problems) == (path, Path("run"), [])
    assert same(checkpoint.server, STATE)
    assert checkpoint.manifest.round == rounds
    assert checkpoint.manifest.identity == IDENTITY
    assert checkpoint.manifest.threads == 1
    assert repr(checkpoint.history) == repr(history(rounds))  # -0.0 is not 0.0
    assert checkpoint.last_rounds == {0: rounds, 1: 1}
    assert checkpoint.clients.keys() == {0, 1}
    assert same(read_state(checkpoints.clients_folder, checkpoint.clients[0]), {"x": torch.tensor([float(rounds)])})
    assert same(read_state(checkpoints.clients_folder, checkpoint.clients[1]), {"x": torch.tensor([-1.0])})


def test_a_round_that_changed_no_private_state(checkpoints: Checkpoints, store: ClientStore) -> None:
    for round in (1, 2):
        checkpoints.save(Manifest(round, IDENTITY, 1), history(round), STATE, store, {})
    checkpoint, problems = checkpoints.latest()
    assert (checkpoint.history, checkpoint.clients, checkpoint.last_rounds, problems) == (history(2), {}, {}, [])
    checkpoints.go_on_from(checkpoint)
    assert not checkpoints.clients_folder.exists()


class Played:
    """A run of random turns, which remembers what every client had after every round, and what the server kept for it.

    Args:
        keep: how many checkpoints to keep.
        every: rounds between checkpoints.
        memory_limit: of the store, in states.
        improving: how likely a round is to be the best so far; it is checkpointed then.
    """

    def __init__(self, keep: int, every: int, memory_limit: int, improving: float = 0) -> None:
        self.keep, self.every, self.memory_limit, self.improving = keep, every, 8 * memory_limit, improving
        self.best: int | None = None
        self.expected_payload: dict[int, dict[int, State]] = {0: {}}
        self.expected_kept: dict[int, dict[int, State]] = {0: {}}
        self.last_rounds: dict[int, int] = {}
        self.stream = random.Random(keep)
        self.open(None)

    def open(self, checkpoint: Checkpoint | None) -> None:
        """Begin, or go on from a checkpoint, as a new process does."""
        self.checkpoints = Checkpoints(Path("run"), checkpoint, self.keep)
        self.store = ClientStore(self.checkpoints.clients_folder, self.memory_limit)
        self.client_state = ClientStore(self.checkpoints.clients_folder, self.memory_limit, "server")
        self.round = 0
        if checkpoint:
            self.store.restore(checkpoint.clients)
            self.client_state.restore(checkpoint.client_state)
            self.round = checkpoint.manifest.round
            self.best = checkpoint.manifest.best.round if checkpoint.manifest.best else None
            self.last_rounds = {}
            self.checkpoints.go_on_from(checkpoint)

    def play(self, rounds: int) -> None:
        """Rounds with three of eight clients each."""
        for _ in range(rounds):
            self.round += 1
            self.expected_payload[self.round] = dict(self.expected_payload[self.round - 1])
            self.expected_kept[self.round] = dict(self.expected_kept[self.round - 1])
            for client in self.stream.sample(range(8), 3):
                state = {"x": torch.rand(2)}
                self.store.put(client, state, self.round)
                self.expected_payload[self.round][client] = state
                self.last_rounds[client] = self.round
                if client % 2:
                    self.client_state.put(client, {"y": torch.rand(3)}, self.round)
                    self.expected_kept[self.round][client] = self.client_state.get(client)
            if self.stream.random() < self.improving:
                self.best = self.round
            if self.round % self.every == 0 or self.best == self.round:
                manifest = Manifest(self.round, IDENTITY, 1, best=best(self.best))
                self.checkpoints.save(manifest, history(self.round), STATE, self.store, self.last_rounds, self.client_state)
                self.last_rounds = {}
                self.check()

    def check(self) -> None:
        """ClientStates checkpoints are what they were, and nothing else lies about."""
        for path in self.checkpoints.paths():
            checkpoint = self.checkpoints.load(path)
            expected = self.expected_payload[checkpoint.manifest.round]
            assert checkpoint.clients.keys() == checkpoint.last_rounds.keys() == expected.keys()
            assert all(same(read_state(Path("run/clients"), checkpoint.clients[client]), expected[client]) for client in expected)
            kept = self.expected_kept[checkpoint.manifest.round]
            assert checkpoint.client_state.keys() == kept.keys()
            assert all(same(read_state(Path("run/clients"), checkpoint.client_state[client]), kept[client]) for client in kept)
            assert checkpoint.history == history(checkpoint.manifest.round)
        assert client_files() == referred_to(self.checkpoints)
        recent = [int(path.name.removeprefix("round_")) for path in self.checkpoints.paths()][-self.keep :]
        manifests = [self.checkpoints.load(self.checkpoints.path(round)).manifest for round in recent]
        named = {one.best.round for one in manifests if one.best}
        assert {self.checkpoints.path(round) for round in {*recent, *named}} == set(self.checkpoints.paths())
        assert self.best is None or self.checkpoints.best().manifest.round == self.best
        assert not list(self.checkpoints.folder.glob(".*"))
        indices = [name for path in self.checkpoints.paths() for name in self.checkpoints.load(path).manifest.index.values()]
        assert {path.name for path in Path("run/index").iterdir()} == set(indices)


@pytest.mark.parametrize(
    ("keep", "every", "memory_limit", "improving"),
    mostly_slow(
        product([1, 2, 3], [1, 3], [1, 100], [0, 0.1, 0.5]),
        often={(2, 1, 1, 0.1), (2, 3, 100, 0), (1, 3, 1, 0)},
    ),
)
def test_the_files_are_those_that_kept_checkpoints_need(keep: int, every: int, memory_limit: int, improving: float) -> None:
    run = Played(keep, every, memory_limit, improving)
    run.play(6 * every)
    for place in (-1, 0, -1, 0):  # the newest, the oldest
        run.play(1)  # of which no checkpoint knows, and with which files may have been written
        checkpoints = Checkpoints(Path("run"))
        run.open(checkpoints.load(checkpoints.paths()[place]))
        run.play(4 * every)
    assert len(run.checkpoints.paths()) == keep or improving


@pytest.mark.parametrize("improving", [0, 0.3])
@pytest.mark.parametrize("keep", [1, 2, 3])
def test_continued_after_a_kill_before_the_old_checkpoints_went(
    keep: int, improving: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Played(keep, every=1, memory_limit=1, improving=improving)
    run.play(5)
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_prune", fail)
        with pytest.raises(DiskFullError):
            run.play(1)
    assert len(run.checkpoints.paths()) == keep + 1 or improving
    run.open(Checkpoints(Path("run")).latest()[0])
    assert client_files() == referred_to(run.checkpoints)
    run.play(5)


def test_an_older_checkpoint_that_is_damaged_goes_when_a_run_is_continued(checkpoints: Checkpoints, store: ClientStore) -> None:
    for round in (1, 2):
        save(checkpoints, store, round)
    older, newest = checkpoints.paths()
    flip(older / "server.safetensors")
    checkpoint, problems = checkpoints.latest()
    assert problems == []
    continued = Checkpoints(Path("run"), checkpoint)
    continued.go_on_from(checkpoint)
    assert continued.paths() == [newest]
    assert client_files() == referred_to(continued)
    store.restore(checkpoint.clients)
    for round in (3, 4, 5):
        save(continued, store, round)
        assert client_files() == referred_to(continued)
    assert len(continued.paths()) == 2


def written_by(run: Path, save: Callable[[], Path]) -> tuple[int, ...]:
    """What the checkpoint of a round writes, the server's state aside: characters of its manifest, without the names of index
    files, and of index files, where a number is one character; bytes of private states.
    """
    before = {path: path.stat().st_ino for path in run.rglob("*.*")}
    manifest = json.loads(json.loads((save() / "manifest.json").read_bytes())["body"])
    del manifest["index"]
    new = [path for path in run.rglob("*.*") if path.stat().st_ino != before.get(path)]
    texts = [json.dumps(manifest), *(path.read_text() for path in new if path.parent.name == "index")]
    states = [path.stat().st_size for path in new if path.parent.name == "clients"]
    return *(len(re.sub(r"-?[0-9][-+.e0-9]*", "0", text)) for text in texts), *states


def test_what_a_checkpoint_writes_depends_on_what_changed_only() -> None:
    """Neither on the rounds played nor on the clients that did nothing: of 256 of these a manifest has a name."""
    found = []
    for clients in (CLIENTS, 9 * CLIENTS):
        checkpoints = Checkpoints(Path(f"run_{clients}"))
        store = ClientStore(checkpoints.clients_folder, memory_limit=10**6)
        rows = [{"round": float(round), "accuracy": 1 / round} for round in range(1, 21)]
        identity = IDENTITY | {"clients": clients}
        for round in range(1, 21):
            store.put(round % 2, {"x": torch.rand(1)}, round)
            since = {round % 2: round} if round > 1 else dict.fromkeys(range(clients), 1)
            save = partial(checkpoints.save, Manifest(round, identity, 1), rows[:round], STATE, store, since)
            found.append(written_by(checkpoints.run_folder, save))
        assert len(checkpoints.latest()[0].manifest.index) == clients / CLIENTS
    assert len(set(found[2:20] + found[22:])) == 1


def test_an_index_file_is_of_so_many_clients(checkpoints: Checkpoints) -> None:
    """A round writes those of its clients anew, and names the others."""
    store, identity = ClientStore(checkpoints.clients_folder, 10**6), IDENTITY | {"clients": 2 * CLIENTS + 1}
    everybody = range(-1, 2 * CLIENTS + 1)
    for client in (-1, 0, 2 * CLIENTS):
        store.put(client, {"x": torch.tensor([float(client)])}, 1)
    checkpoints.save(Manifest(1, identity, 1), history(1), STATE, store, dict.fromkeys(everybody, 1))
    store.put(2 * CLIENTS, {"x": torch.tensor([0.5])}, 2)
    checkpoints.save(Manifest(2, identity, 1), history(2), STATE, store, {2 * CLIENTS: 2, 0: 2})
    before, after = (checkpoints.load(path) for path in checkpoints.paths())
    assert before.manifest.index.keys() == after.manifest.index.keys() == {-1, 0, 1, 2}
    assert {k for k in after.manifest.index if after.manifest.index[k] != before.manifest.index[k]} == {0, 2}
    assert {number: len(own) for number, own in after.entries.items()} == {-1: 1, 0: CLIENTS, 1: CLIENTS, 2: 1}
    assert after.last_rounds == dict.fromkeys(everybody, 1) | {2 * CLIENTS: 2, 0: 2}
    assert after.clients.keys() == {-1, 0, 2 * CLIENTS}


def test_what_a_run_writes_does_not_grow_with_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of four clients takes part in each round; the last round is measured."""
    found = {}
    save = Checkpoints.save

    def noting(self: Checkpoints, manifest: Manifest, *args: Any) -> None:
        found[manifest.round] = written_by(self.run_folder, lambda: save(self, manifest, *args))

    monkeypatch.setattr(Checkpoints, "save", noting)
    federation = new_federation(31, "run", participation=0.25, evaluate_every=0)
    federation.fit(new_method("FedRep"), new_data(size=80))
    assert len(federation.run.last_rounds) == 4
    assert found[30] == found[20]


# ------------------------------------------------------------------------------------------------------------------- history


HARMS_OF_ROWS = [Path.unlink, lambda path: path.write_bytes(b"")]


@pytest.mark.often(1)
@pytest.mark.parametrize("harm", HARMS_OF_ROWS)
def test_a_lost_row_is_a_gap_in_the_table(harm: Callable[[Path], None], capsys: pytest.CaptureFixture[str]) -> None:
    """What the target took and the totals are in the newest checkpoint."""

    def fit(rounds: int, run_dir: str, ckpt_path: str | None = None) -> list[dict[str, float]]:
        federation = new_federation(rounds, run_dir, evaluate_every=1, target=0.0)
        return without_seconds(federation.fit(new_method("FedAvg"), new_data(2, 40, val_share=0.0), ckpt_path))

    fit(5, "run")
    whole = fit(6, "whole")
    lost = sorted(Path("run/version_0/history").iterdir())
    assert lost
    for path in lost:
        harm(path)
    found = fit(6, "run", "last")
    rounds = {int(path.stem[-6:]) for path in lost}
    assert found == [row for row in whole if row["round"] not in rounds]
    assert found[-1]["target/round"] == 1 in rounds
    assert "run/version_0 has lost the metrics of " in capsys.readouterr().out
    table = Path("run/version_0/metrics.csv").read_text().splitlines()
    assert len(table) == 1 + len(found)


def test_a_checkpoint_that_was_being_deleted_leaves_no_gap(tmp_path: Path) -> None:
    """The process was killed when the manifest was in the history, and the folder still had its name."""
    run = tmp_path / "version_0"
    new_federation(2, tmp_path).fit(new_method("FedAvg"), new_data(2, 40))
    (run / "history").mkdir()
    (run / "checkpoints/round_000001/manifest.json").rename(run / "history/round_000001.json")
    history = new_federation(3, tmp_path).fit(new_method("FedAvg"), new_data(2, 40), "last")
    assert [row["round"] for row in history] == [1, 2, 3]


def test_rows_come_back_however_seldom_checkpoints_are_written() -> None:
    federation = new_federation(7, "run", checkpoint_every=3, evaluate_every=0)
    federation.fit(new_method("FedAvg"), new_data(2, 40))
    assert Checkpoints(Path("run/version_0")).latest()[0].history == federation.run.history


# -------------------------------------------------------------------------------------------------------------- best round


def save_rounds(checkpoints: Checkpoints, store: ClientStore, bests: list[int | None]) -> None:
    """One round after the other, in which client 0 changes, and what each takes for the best."""
    for round, named in enumerate(bests, start=1):
        store.put(0, {"x": torch.tensor([float(round)])}, round)
        checkpoints.save(Manifest(round, IDENTITY, 1, best=best(named)), history(round), STATE, store, {0: round})


def rounds_of(checkpoints: Checkpoints) -> list[int]:
    return [int(path.name.removeprefix("round_")) for path in checkpoints.paths()]


def test_the_best_before_stays_until_the_last_two_agree(checkpoints: Checkpoints, store: ClientStore) -> None:
    """If the newest checkpoint turns out to be damaged, the run before it still has its best round."""
    save_rounds(checkpoints, store, [1, 1, 1, 1, 5])
    assert rounds_of(checkpoints) == [1, 4, 5]
    flip(checkpoints.paths()[-1] / "server.safetensors")
    assert checkpoints.best().manifest.round == 1
    continued = Checkpoints(Path("run"), checkpoints.latest()[0])
    continued.go_on_from(checkpoints.latest()[0])
    assert rounds_of(continued) == [1, 4, 5]  # the last one, which is damaged, until there is a new one
    assert client_files() == {f"client_000000_round_{round:06d}.safetensors" for round in (1, 4)}


def test_continued_from_the_best_round_itself(checkpoints: Checkpoints, store: ClientStore) -> None:
    save_rounds(checkpoints, store, [1, 2, 2, 2, 2])
    chosen = checkpoints.best()
    continued = Checkpoints(Path("run"), chosen)
    continued.go_on_from(chosen)
    assert rounds_of(continued) == [2, 4, 5]
    store.restore(chosen.clients)
    store.put(0, {"x": torch.tensor([3.0])}, 3)
    continued.save(Manifest(3, IDENTITY, 1, best=best(2)), history(3), STATE, store, {0: 3})
    assert rounds_of(continued) == [2, 3]
    assert client_files() == referred_to(continued) == {f"client_000000_round_{round:06d}.safetensors" for round in (2, 3)}
    assert continued.best().manifest.round == 2


def test_a_best_round_without_a_checkpoint_is_named(checkpoints: Checkpoints, store: ClientStore) -> None:
    save_rounds(checkpoints, store, [1, 1, 1])
    shutil.rmtree(checkpoints.path(1))
    with pytest.raises(FederationError, match="The best round of run is 1, of which it has no checkpoint"):
        checkpoints.best()


@pytest.mark.parametrize("every", mostly_slow([1, 3, 100], often={3}))
def test_the_best_round_of_a_run_can_be_measured(every: int) -> None:
    """However seldom checkpoints are written, the best round gets one. Measured again, it has what it had in its round."""
    federation = new_federation(7, "run", participation=0.5, checkpoint_every=every, evaluate_every=2, trainer=new_trainer)
    federation.fit(new_method("FedRep", epochs=2), new_data())
    last = federation.run.history[-1]
    best = federation.run.history[int(last["selected/round"]) - 1]
    assert best["round"] < 6  # else it would be among the last anyway
    again = new_federation(7, "run", participation=0.5, trainer=new_trainer)
    for measure, kind in ((again.validate, "val"), (again.test, "test")):
        found = measure(new_method("FedRep", epochs=2), new_data(), ckpt_path="best")
        assert again.run.round == best["round"]
        assert found == {name: value for name, value in best.items() if name.startswith(f"after/{kind}_")}
        assert measure(new_method("FedRep", epochs=2), new_data(), ckpt_path="run/version_0/best") == found
    assert found["after/test_accuracy/mean"] == last["selected/test_accuracy"]


@pytest.mark.parametrize("ckpt_path", mostly_slow(["last", "best"], often={"best"}))
def test_a_run_that_continues_selects_as_one_that_was_never_stopped(ckpt_path: str) -> None:
    def fit(rounds: int, run_dir: str, ckpt_path: str | None = None) -> Path:
        federation = new_federation(rounds, run_dir, participation=0.5, checkpoint_every=2, evaluate_every=1, trainer=new_trainer)
        federation.fit(new_method("FedRep", epochs=2), new_data(), ckpt_path)
        assert federation.run.folder is not None
        return federation.run.folder

    fit(5, "stopped")
    stopped, whole = fit(8, "stopped", ckpt_path), fit(8, "whole")
    assert_same_end(stopped, whole)
    ours, theirs = (Checkpoints(run).best() for run in (stopped, whole))
    assert ours.manifest.round == theirs.manifest.round
    assert same(ours.server, theirs.server)
    assert {name.replace("_2.", ".") for name in client_files(stopped)} == client_files(whole)


def test_a_run_that_continues_by_another_metric_selects_as_one_that_has_had_it_from_the_start() -> None:
    """Its best round, and the one that reached the target, are not those of the metric before."""

    def fit(rounds: int, run_dir: str, metric: str) -> dict[str, float]:
        federation = new_federation(rounds, run_dir, evaluate_every=1, trainer=new_trainer, target=0.9)
        distance = {"distance": HammingDistance(task="multiclass", num_classes=CLASSES)}
        federation.fit(new_method("FedAvg", metrics=distance, metric=metric), new_data(), "last")
        row = federation.run.history[-1]
        return {name: value for name, value in row.items() if name.startswith(("selected/", "target/"))}

    assert "target/round" not in fit(2, "changed", "accuracy")
    whole = fit(3, "whole", "distance")
    assert fit(3, "changed", "distance") == whole
    assert {"selected/round", "selected/test_distance", "target/round"} < whole.keys()


def test_best_of_a_run_without_validation_data_is_refused() -> None:
    new_federation(1, "run").fit(new_method("FedAvg"), new_data(val_share=0.0))
    with pytest.raises(FederationError, match="none of them is the best: hold some out"):
        new_federation(1, "run").test(new_method("FedAvg"), new_data(val_share=0.0), ckpt_path="best")


class DiskFullError(OSError):
    pass


def fail(*args: Any, **kwargs: Any) -> None:
    raise DiskFullError


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (lightning_fed.storage.checkpoint, "write_state"),
        (lightning_fed.storage.client_store, "write_state"),
        (lightning_fed.storage.checkpoint, "write_index"),
        (lightning_fed.storage.checkpoint, "write_manifest"),
        (lightning_fed.storage.checkpoint, "sync_folder"),
        (Path, "rename"),
    ],
)
def test_a_checkpoint_that_fails_is_absent(
    checkpoints: Checkpoints, store: ClientStore, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    save(checkpoints, store, 1)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        with pytest.raises(DiskFullError):
            save(checkpoints, store, 2)
    checkpoint, problems = checkpoints.latest()
    assert (checkpoint.manifest.round, problems) == (1, [])
    save(checkpoints, store, 2)
    checkpoint, problems = checkpoints.latest()
    assert (checkpoint.manifest.round, checkpoint.history, problems) == (2, history(2), [])
    assert (checkpoint.clients.keys(), checkpoint.last_rounds) == ({0, 1}, {0: 2, 1: 1})
    assert same(read_state(checkpoints.clients_folder, checkpoint.clients[0]), {"x": torch.tensor([2.0])})


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


HARMS = [truncate, flip, empty, Path.unlink]
VICTIMS = [
    "checkpoints/round_000002/server.safetensors",
    "checkpoints/round_000002/manifest.json",
    "clients/client_000000_round_000002.safetensors",
]


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_damaged_checkpoint_is_passed_over(
    checkpoints: Checkpoints, store: ClientStore, victim: str, harm: Callable[[Path], None]
) -> None:
    save(checkpoints, store, 1)
    newest = save(checkpoints, store, 2)
    path = checkpoints.run_folder / victim
    harm(path)
    checkpoint, problems = checkpoints.latest()
    assert checkpoint.manifest.round == 1
    assert len(problems) == 1
    assert str(newest) in problems[0]
    assert f"{path.name} is {'missing' if harm is Path.unlink else 'damaged'}" in problems[0]
    with pytest.raises(FederationError, match="cannot be used"):
        checkpoints.load(newest)


def test_no_bit_of_a_manifest_may_change(checkpoints: Checkpoints, store: ClientStore) -> None:
    path = save(checkpoints, store, 1)
    data = (path / "manifest.json").read_bytes()
    for place in range(8 * len(data)):
        changed = bytearray(data)
        changed[place // 8] ^= 1 << place % 8
        (path / "manifest.json").write_bytes(changed)
        with pytest.raises(FederationError, match="cannot be used"):
            checkpoints.load(path)


def test_without_a_complete_checkpoint_the_message_says_why(checkpoints: Checkpoints, store: ClientStore) -> None:
    truncate(save(checkpoints, store, 1) / "server.safetensors")
    with pytest.raises(FederationError, match=r"No complete checkpoint .*server\.safetensors is damaged .*without --ckpt_path"):
        checkpoints.latest()


def test_a_manifest_of_another_format_is_refused(checkpoints: Checkpoints, store: ClientStore) -> None:
    manifest = save(checkpoints, store, 1) / "manifest.json"
    manifest.write_text(manifest.read_text().replace(f'"format": {FORMAT}', '"format": 99'))
    with pytest.raises(FederationError, match=f"has format 99, this version reads {FORMAT}"):
        checkpoints.latest()


@pytest.mark.parametrize("victim", mostly_slow([*VICTIMS, "index"], often={VICTIMS[0], "index"}))
def test_a_run_continues_from_the_checkpoint_before_and_says_so(victim: str, capsys: pytest.CaptureFixture[str]) -> None:
    data, often = new_data(2, 60), {"evaluate_every": 1}
    new_federation(rounds=3, run_dir="whole", **often).fit(new_method("PFedLoRA"), data)
    new_federation(rounds=2, run_dir="stopped", **often).fit(new_method("PFedLoRA"), data)
    run = Path("stopped/version_0")
    damaged = run / victim.replace("client_000000", "client_000001")
    if victim == "index":
        damaged = run / "index" / Checkpoints(run).latest()[0].manifest.index[0]
    flip(damaged)
    new_federation(rounds=3, run_dir="stopped", **often).fit(new_method("PFedLoRA"), data, ckpt_path="last")
    said = capsys.readouterr().out
    assert str(damaged) in said
    assert "Continuing from round 1" in said
    assert_same_end(Path("stopped/version_0"), Path("whole/version_0"))
