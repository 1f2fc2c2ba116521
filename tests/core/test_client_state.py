"""What a server keeps for each client: in memory as far as there is room, in checkpoints, and mixed a block at a time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import CLASSES, Net, assert_same_end, final_kept, new_data, new_federation, same, server_client_states, sgd

import lightning_fed.core.client_state
from lightning_fed.core.client_state import Vectors, common_bits, flatten, mixtures, squared_distances, squared_norms, unflatten
from lightning_fed.core.server import PersonalServer, Server
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.methods import FedAvg
from lightning_fed.storage.checkpoint import Checkpoints
from lightning_fed.storage.client_store import ClientStore, RoundStore
from lightning_fed.tensors import pack_bits

N, LENGTH = 5, 37


class Remembering(FedAvg):
    """Its server keeps the last update of each client."""

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        return PersonalServer(self.update_state())


def fit(rounds: int, ckpt_path: str | None = None, **options: Any) -> Path:
    federation = new_federation(rounds, "runs", participation=0.5, evaluate_every=1, **options)
    federation.fit(Remembering(Net, CLASSES, sgd), new_data(4, 120), ckpt_path)
    assert federation.run.folder is not None
    return federation.run.folder


@pytest.mark.often(1)
@pytest.mark.parametrize("limit", [1e-6, 100])
def test_what_is_kept_is_in_checkpoints_and_continued(limit: float) -> None:
    whole, stopped = fit(4, store_limit_mb=limit), fit(2, store_limit_mb=limit)
    before = final_kept(stopped)
    assert fit(4, "last", store_limit_mb=limit) == stopped
    assert_same_end(whole, stopped)
    assert 2 <= len(before) <= len(final_kept(whole)) <= 4
    assert not all(same(state, final_kept(whole)[client]) for client, state in before.items())


def test_a_checkpoint_refers_to_what_did_not_change_and_drops_what_nobody_needs() -> None:
    folder = fit(6, store_limit_mb=1e-6)
    checkpoints = Checkpoints(folder)
    needed = set()
    for path in checkpoints.paths():
        checkpoint = checkpoints.load(path)
        assert {
            client: f"server_{client:06d}_round_{round:06d}.safetensors" for client, round in checkpoint.last_rounds.items()
        } == {client: record["file"] for client, record in checkpoint.client_state.items()}
        needed |= {record["file"] for record in checkpoint.client_state.values()}
    assert len(set(checkpoint.last_rounds.values())) > 1  # not everybody took part in the last round
    assert {path.name for path in (folder / "clients").iterdir()} == needed
    assert not (folder / "scratch").exists()


def test_a_damaged_file_of_the_server_is_noticed() -> None:
    folder = fit(2)
    victim = next((folder / "clients").glob("server_*_round_000002.safetensors"))
    victim.write_bytes(victim.read_bytes()[:-1])
    checkpoint, [problem] = Checkpoints(folder).latest()
    assert checkpoint.manifest.round == 1
    assert victim.name in problem


def test_the_limit_of_memory_changes_nothing() -> None:
    small, large = (fit(3, store_limit_mb=limit) for limit in (1e-6, 100))
    assert_same_end(small, large)


def test_without_a_run_folder_it_is_kept_all_the_same() -> None:
    federation = new_federation(2, evaluate_every=0, store_limit_mb=1e-6)
    federation.fit(Remembering(Net, CLASSES, sgd), new_data(3, 120))
    assert server_client_states(federation).keys() == {0, 1, 2}


# ----------------------------------------------------------------------------------------------------------------- arithmetic


@pytest.fixture(params=["memory", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ClientStore:
    """Vectors and masks of five clients; of clients 0 and 3 they are equal."""
    torch.manual_seed(0)
    store = ClientStore(tmp_path, 10**6 if request.param == "memory" else 1)
    for client in range(N):
        store.put(client, {"x": torch.randn(LENGTH), "mask": pack_bits(torch.rand(LENGTH) < 0.5)}, 1)
    store.put(3, store.get(0), 1)
    return store


@pytest.fixture(params=[1, 60, 2**23])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Numbers in memory: one column, some, all."""
    monkeypatch.setattr(lightning_fed.core.client_state, "BLOCK", request.param)
    return int(request.param)


def matrix(store: ClientStore) -> torch.Tensor:
    return torch.stack([store.get(client)["x"] for client in range(N)]).double()


def test_distances_and_norms(store: ClientStore, block: int) -> None:
    vectors, x = Vectors(store, "x", range(N), LENGTH), matrix(store)
    found = squared_distances(vectors, [3, 1])
    torch.testing.assert_close(found, torch.cdist(x, x)[[3, 1]].square(), atol=1e-12, rtol=1e-12)
    assert found.min() >= 0
    torch.testing.assert_close(squared_norms(vectors), x.square().sum(dim=1))


def test_distances_of_equal_vectors_are_zero(store: ClientStore, block: int) -> None:
    assert not squared_distances(Vectors(store, "x", [0, 3], LENGTH), [0, 1]).any()


def test_mixtures(store: ClientStore, block: int) -> None:
    vectors, x = Vectors(store, "x", range(N), LENGTH), matrix(store)
    weights = torch.randn(7, N, dtype=torch.float64)
    torch.testing.assert_close(mixtures(vectors, weights, torch.float64), weights @ x)
    assert torch.equal(mixtures(vectors, weights, torch.float32), mixtures(vectors, weights, torch.float64).float())
    weights /= weights.sum(dim=1, keepdim=True)
    torch.testing.assert_close(mixtures(vectors, weights, torch.float64, about=torch.randn(LENGTH)), weights @ x)


def test_mixtures_of_equal_vectors_are_that_vector_bit_for_bit(store: ClientStore, block: int) -> None:
    """With weights far from 0 and 1."""
    weights = torch.tensor([[-3899.0, 3900.0], [0.3, 0.7]], dtype=torch.float64)
    x = store.get(0)["x"]
    assert torch.equal(mixtures(Vectors(store, "x", [0, 3], LENGTH), weights, x.dtype, about=x), x.expand(2, -1))


def test_who_has_nothing_has_the_default(store: ClientStore) -> None:
    default = torch.arange(LENGTH).float()
    block = Vectors(store, "x", [1, 99], LENGTH, default).columns(3, 9)
    assert torch.equal(block, torch.stack([store.get(1)["x"][3:9], default[3:9]]).double())


def test_common_bits(store: ClientStore, block: int) -> None:
    masks = torch.stack([torch.from_numpy(np.unpackbits(store.get(c)["mask"].numpy())) for c in range(N)]).long()
    assert torch.equal(common_bits(store, "mask", range(N)), masks @ masks.T)
    assert common_bits(store, "mask", []).shape == (0, 0)


def test_states_are_flat_and_back() -> None:
    state = {"b": torch.randn(2, 3), "a": torch.randn(()), "c": torch.randn(4)}
    assert torch.equal(flatten(state)[6], state["a"])
    back = unflatten(flatten(state).double(), state)
    assert list(back) == list(state)
    assert same(back, state)
    assert all(back[name].dtype == tensor.dtype for name, tensor in state.items())


# -------------------------------------------------------------------------------------------------------------------- stores


def test_stores_of_two_owners_share_a_folder(tmp_path: Path) -> None:
    ours, theirs = ClientStore(tmp_path, 1), ClientStore(tmp_path, 1, "server")
    for client in (7, 2):
        ours.put(client, {"x": torch.tensor([1.0])}, 1)
        theirs.put(client, {"x": torch.tensor([2.0])}, 1)
    assert list(ours) == list(theirs) == [2, 7]
    assert theirs.flush() == {2, 7}
    assert {record["file"] for record in theirs.records.values()} == {
        "server_000002_round_000001.safetensors",
        "server_000007_round_000001.safetensors",
    }
    assert ours.get(7)["x"].item() == 1


def test_a_part_leaves_the_rest_on_disk(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, 1)
    store.put(0, {"x": torch.arange(10)}, 1)
    store.put(1, {"x": torch.arange(10)}, 1)  # 0 leaves memory
    assert store.part(0, "x", 3, 6).tolist() == store.part(1, "x", 3, 6).tolist() == [3, 4, 5]
    assert list(store._memory) == [1]
    with pytest.raises(KeyError):
        store.part(2, "x", 0, 1)


def test_scratch_is_cleared_with_what_a_killed_run_left(tmp_path: Path) -> None:
    store = RoundStore(tmp_path / "scratch", 1)
    for client in range(3):
        store.put(client, {"x": torch.ones(2)}, 1)
    assert list((tmp_path / "scratch").iterdir())
    again = RoundStore(tmp_path / "scratch", 1)
    again.clear()
    assert not (tmp_path / "scratch").exists()
    again.put(0, {"x": torch.ones(2)}, 2)
    assert list(again) == [0]
