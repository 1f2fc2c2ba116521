"""Private states between memory and disk."""

import weakref
from pathlib import Path

import pytest
import torch
from tiny import same

import lightning_fed.storage.client_store
from lightning_fed.storage.client_store import ClientStore, read_state, write_state
from lightning_fed.tensors import State

SIZE = 4 * 100 + 8
"""Bytes of a state below."""


def new_state(client: int, round: int = 0) -> State:
    return {"weight": torch.full((100,), client + round / 100), "count": torch.tensor(client)}


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files in the order in which they are written."""
    names: list[str] = []

    def noting(path: Path, state: State) -> lightning_fed.storage.client_store.FileRecord:
        names.append(path.name)
        return write_state(path, state)

    monkeypatch.setattr(lightning_fed.storage.client_store, "write_state", noting)
    return names


def test_states_come_back_from_disk_bit_for_bit(tmp_path: Path) -> None:
    store = ClientStore(tmp_path / "clients", memory_limit=2 * SIZE)
    for client in range(10):
        store.put(client, new_state(client), round=1)
    for client in (3, 9, 0, 0, 5):
        assert same(store.get(client), new_state(client))


def test_memory_stays_within_the_limit_and_one_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    references: list[weakref.ref[torch.Tensor]] = []
    peak = 0

    def measure(path: Path, state: State) -> lightning_fed.storage.client_store.FileRecord:
        nonlocal peak
        peak = max(peak, sum(reference() is not None for reference in references))
        return write_state(path, state)

    monkeypatch.setattr(lightning_fed.storage.client_store, "write_state", measure)
    store = ClientStore(tmp_path / "clients", memory_limit=3 * SIZE)
    for client in range(20):
        state = new_state(client)
        references.append(weakref.ref(state["weight"]))
        store.put(client, state, round=1)
        del state
        assert sum(reference() is not None for reference in references) <= 3
    assert peak == 4


def test_the_state_last_used_is_kept_however_large(tmp_path: Path) -> None:
    store = ClientStore(tmp_path / "clients", memory_limit=1)
    state = new_state(0)
    store.put(0, state, round=1)
    assert store.get(0) is state


def test_the_least_recently_used_state_goes_first(tmp_path: Path, written: list[str]) -> None:
    store = ClientStore(tmp_path / "clients", memory_limit=2 * SIZE)
    store.put(0, new_state(0), round=1)
    store.put(1, new_state(1), round=1)
    store.get(0)
    store.put(2, new_state(2), round=1)
    assert written == ["client_000001_round_000001.safetensors"]


def test_replacing_a_state_frees_its_memory(tmp_path: Path, written: list[str]) -> None:
    store = ClientStore(tmp_path / "clients", memory_limit=2 * SIZE)
    for round in range(10):
        store.put(0, new_state(0, round), round)
        store.put(1, new_state(1, round), round)
    assert written == []
    assert same(store.get(0), new_state(0, 9))


def test_flush_writes_only_what_changed(tmp_path: Path, written: list[str]) -> None:
    store = ClientStore(tmp_path / "clients", memory_limit=10 * SIZE)
    for client in range(3):
        store.put(client, new_state(client), round=1)
    assert store.flush() == {0, 1, 2}
    first = dict(store.records)
    assert sorted(written) == [first[client]["file"] for client in range(3)]
    store.put(1, new_state(1, 2), round=2)
    assert store.flush() == {1}
    assert written[3:] == ["client_000001_round_000002.safetensors"]
    assert store.flush() == set()
    assert len(written) == 4
    assert same(read_state(store.folder, first[1]), new_state(1))
    assert same(read_state(store.folder, store.records[1]), new_state(1, 2))


def test_a_state_evicted_before_flush_is_written_once(tmp_path: Path, written: list[str]) -> None:
    store = ClientStore(tmp_path / "clients", memory_limit=SIZE)
    for client in range(3):
        store.put(client, new_state(client), round=1)
    assert store.flush() == {0, 1, 2}
    assert len(written) == len(set(written)) == 3
    assert all(same(read_state(store.folder, store.records[client]), new_state(client)) for client in range(3))
    store.put(2, new_state(2, 2), round=2)
    for client in range(2):
        store.get(client)
    assert written[3:] == ["client_000002_round_000002.safetensors"]
    assert store.flush() == {2}
    assert len(written) == 4
    assert store.in_use() == {record["file"] for record in store.records.values()}


def test_restore_continues_from_the_files_of_a_flush(tmp_path: Path) -> None:
    store = ClientStore(tmp_path / "clients", memory_limit=SIZE)
    store.put(3, new_state(3), round=1)
    store.put(4, new_state(4), round=1)
    store.flush()
    records = dict(store.records)
    for client in (4, 5, 6):  # in memory and, evicted, on disk
        store.put(client, new_state(client, 3), round=3)
    store.restore(records)
    assert 5 not in store
    assert 6 not in store
    assert same(store.get(3), new_state(3))
    assert same(store.get(4), new_state(4))
    assert store.flush() == set()
    store.put(3, new_state(3, 3), round=3)
    assert store.flush() == {3}


def test_files_of_another_folder_are_read_where_they_are(tmp_path: Path) -> None:
    theirs, ours = (ClientStore(tmp_path / name, memory_limit=SIZE) for name in ("theirs", "ours"))
    for client in (0, 1):
        theirs.put(client, new_state(client), round=1)
    theirs.flush()
    before = sorted(theirs.folder.iterdir())
    ours.restore(theirs.records, theirs.folder)
    assert same(ours.get(1), new_state(1))
    for client in (0, 1, 0):
        ours.put(client, new_state(client, 2), round=2)
    assert sorted(theirs.folder.iterdir()) == before
    assert ours.flush() == {0, 1}
    assert {path.name for path in ours.folder.iterdir()} == {record["file"] for record in ours.records.values()}


def test_what_no_flush_has_returned_goes_when_it_is_replaced(tmp_path: Path) -> None:
    """However long a run goes without a checkpoint, a client has one file of its own."""
    store = ClientStore(tmp_path / "clients", memory_limit=SIZE)
    for round in range(1, 6):
        for client in range(3):
            store.put(client, new_state(client, round), round)
    assert len(list(store.folder.iterdir())) <= 3
    store.flush()
    assert {record["file"] for record in store.records.values()} == {path.name for path in store.folder.iterdir()}


def test_rounds_are_those_of_the_files_that_are_there(tmp_path: Path) -> None:
    """Also of a round that was played again."""
    for _ in range(2):
        store = ClientStore(tmp_path, memory_limit=SIZE)
        store.put(0, new_state(0), round=12)
        store.flush()
    (tmp_path / "client_000000_round_000012.safetensors").unlink()
    assert store.rounds(0) == {12}
    assert store.rounds(1) == set()


def test_a_client_without_a_state() -> None:
    store = ClientStore(Path("clients"), memory_limit=SIZE)
    assert 0 not in store
    assert store.find(0) is None
    with pytest.raises(KeyError):
        store.get(0)
