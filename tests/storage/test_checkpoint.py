"""Checkpoints are complete or absent, and what is damaged is noticed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import assert_same_end, new_data, new_federation, new_method, same

import lightning_fed.storage.checkpoint
import lightning_fed.storage.client_store
from lightning_fed.errors import FederationError
from lightning_fed.storage.checkpoint import Checkpoints
from lightning_fed.storage.client_store import ClientStore

STATE = {"weight": torch.tensor([1.0, 0.1, -0.0]), "count": torch.tensor(3)}
IDENTITY = {"method": "PFedLoRA", "seed": 0}
HISTORY = [{"round": 1.0, "accuracy": 0.1 + 0.2}]


@pytest.fixture
def checkpoints() -> Checkpoints:
    return Checkpoints(Path("run"))


@pytest.fixture
def store(checkpoints: Checkpoints) -> ClientStore:
    return ClientStore(checkpoints.clients_folder, memory_limit=10**6)


def save(checkpoints: Checkpoints, store: ClientStore, round: int) -> Path:
    """A round in which client 0 changed and, once, client 1."""
    store.put(0, {"x": torch.tensor([float(round)])}, round)
    if round == 1:
        store.put(1, {"x": torch.tensor([-1.0])}, round)
    return checkpoints.save(round, IDENTITY, HISTORY, STATE, store)


def test_what_is_saved_comes_back_bit_for_bit(checkpoints: Checkpoints, store: ClientStore) -> None:
    path = save(checkpoints, store, 1)
    checkpoint, problems = checkpoints.latest()
    assert (checkpoint.path, checkpoint.run_folder, problems) == (path, Path("run"), [])
    assert same(checkpoint.server, STATE)
    assert checkpoint.manifest.round == 1
    assert checkpoint.manifest.identity == IDENTITY
    assert checkpoint.manifest.history == HISTORY
    assert checkpoint.manifest.clients.keys() == {0, 1}


def test_the_last_two_are_kept_with_the_files_they_need(checkpoints: Checkpoints, store: ClientStore) -> None:
    for round in range(1, 5):
        save(checkpoints, store, round)
    assert [path.name for path in checkpoints.paths()] == ["round_000003", "round_000004"]
    assert {path.name for path in checkpoints.clients_folder.iterdir()} == {
        "client_000000_round_000003.safetensors",
        "client_000000_round_000004.safetensors",
        "client_000001_round_000001.safetensors",
    }
    for path in checkpoints.paths():
        checkpoints.load(path)


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_keep(store: ClientStore, keep: int) -> None:
    checkpoints = Checkpoints(Path("run"), keep)
    for round in range(1, 6):
        save(checkpoints, store, round)
    assert len(checkpoints.paths()) == keep


class DiskFullError(OSError):
    pass


def fail(*args: Any, **kwargs: Any) -> None:
    raise DiskFullError


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (lightning_fed.storage.checkpoint, "write_state"),
        (lightning_fed.storage.client_store, "write_state"),
        (lightning_fed.storage.checkpoint, "_write_manifest"),
        (lightning_fed.storage.checkpoint, "_sync"),
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
    assert checkpoints.latest()[0].manifest.round == 2


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
    assert path.name in problems[0]
    with pytest.raises(FederationError, match="cannot be used"):
        checkpoints.load(newest)


def test_without_a_complete_checkpoint_the_message_says_why(checkpoints: Checkpoints, store: ClientStore) -> None:
    truncate(save(checkpoints, store, 1) / "server.safetensors")
    with pytest.raises(FederationError, match=r"No complete checkpoint .*server\.safetensors is damaged .*without --ckpt_path"):
        checkpoints.latest()


def test_a_manifest_of_another_format_is_refused(checkpoints: Checkpoints, store: ClientStore) -> None:
    manifest = save(checkpoints, store, 1) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(FederationError, match="has format 99, this version reads 1"):
        checkpoints.latest()


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_run_continues_from_the_checkpoint_before_and_says_so(victim: str, capsys: pytest.CaptureFixture[str]) -> None:
    new_federation(rounds=3, run_dir="whole").fit(new_method("PFedLoRA"), new_data())
    new_federation(rounds=2, run_dir="stopped").fit(new_method("PFedLoRA"), new_data())
    damaged = Path("stopped/version_0") / victim.replace("client_000000", "client_000001")
    flip(damaged)
    new_federation(rounds=3, run_dir="stopped").fit(new_method("PFedLoRA"), new_data(), ckpt_path="last")
    said = capsys.readouterr().out
    assert str(damaged) in said
    assert "Continuing from round 1" in said
    assert_same_end(Path("stopped/version_0"), Path("whole/version_0"))
