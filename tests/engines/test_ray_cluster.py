"""What can be said of Ray without a cluster, and mostly without Ray."""

import json
import pickle
import signal
import subprocess
import sys
from collections import deque
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny import Net, new_data, new_federation
from tiny_commands import refused

from lightning_fed import __version__
from lightning_fed.engines import Ray
from lightning_fed.engines.packing import pack, unpack
from lightning_fed.engines.ray.cluster import _ask, _own_signals
from lightning_fed.engines.ray.engine import _Actors, _Member
from lightning_fed.engines.ray.worker import CopiedBuffer, SharedBuffer, new_actor
from lightning_fed.errors import FederationError
from lightning_fed.methods import FedAvg


def test_without_ray_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        FederationError, match=r'needs the package ray, which cannot be imported .*: pip install "lightning-fed\[ray\]"\.$'
    ):
        Ray()
    Path("config.yaml").write_text("data: Digits\nmodel: {class_path: FedAvg, init_args: {backbone: CNN5}}\n")
    engine = ["--federation.engine", "Ray", "--federation.engine.init_args.address", "auto"]
    assert "error: The engine Ray needs the package ray" in refused(capsys, "fit", "--config", "config.yaml", *engine)


def test_an_address_of_a_client_is_refused() -> None:
    with pytest.raises(FederationError, match=r"address is ray://10.0.0.1:10001: the engine Ray runs on a machine of the cluster"):
        _ask("ray://10.0.0.1:10001", 1)


def test_workers_without_a_gpu_are_not_what_a_trainer_with_one_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason='needs pip install "lightning-fed[ray]"')
    monkeypatch.setattr("lightning_fed.engines.worker_spec.WorkerSpec.is_for_gpu", lambda spec: True)
    with pytest.raises(FederationError, match=r"computes on a GPU, but workers get none: set federation.engine"):
        new_federation(1, engine=Ray()).fit(FedAvg(Net, 4), new_data(2))


def test_a_signal_that_ray_took_for_itself_reaches_whom_it_was_for() -> None:
    def connect() -> None:
        with _own_signals():
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))  # as ray.init does
            signal.raise_signal(signal.SIGTERM)

    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        ours = signal.getsignal(signal.SIGTERM)
        with pytest.raises(SystemExit):
            connect()
        assert heard == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is ours
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("kind", [CopiedBuffer, SharedBuffer])
def test_tensors_arrive_as_they_were(kind: type[CopiedBuffer]) -> None:
    """A copy, or a view of the memory in which Ray keeps them, which must not be written to."""
    images = torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last)
    thing = {"a": images, "b": [torch.arange(3), "text"], "none": torch.empty(0)}
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(pack(thing, allocate=kind), protocol=5, buffer_callback=buffers.append)
    kept = [np.frombuffer(bytes(buffer.raw()), np.uint8) for buffer in buffers]
    arrived = unpack(pickle.loads(head, buffers=kept))
    assert torch.equal(arrived["a"], images)
    assert arrived["a"].stride() == images.stride()
    assert torch.equal(arrived["b"][0], torch.arange(3))
    start = kept[0].ctypes.data
    assert (start <= arrived["a"].data_ptr() < start + kept[0].nbytes) == (kind is SharedBuffer)


VERSIONS = """
import json, pickle, sys

actor = pickle.load(sys.stdin.buffer)()
address, versions = actor.versions()
json.dump([address, versions, "torch" in sys.modules], sys.stdout)
"""


def test_a_machine_says_what_is_installed_before_anything_is_imported() -> None:
    """Whoever has another version would stumble over it."""
    ray = pytest.importorskip("ray", reason='needs pip install "lightning-fed[ray]"')
    sent = ray.cloudpickle.dumps(new_actor())
    said = subprocess.run([sys.executable, "-c", VERSIONS], input=sent, stdout=subprocess.PIPE, check=True)
    address, versions, imported = json.loads(said.stdout)
    assert address.count(".") == 3
    assert versions == {
        "Python": sys.version.split()[0],
        "torch": version("torch").partition("+")[0],
        "lightning": version("lightning"),
        "lightning-fed": __version__,
    }
    assert not imported


class Machines:
    """What the pool asks of Ray, and a cluster of which it is written down how many workers each machine has room for.

    Args:
        rooms: of each machine.
    """

    exceptions = SimpleNamespace(
        **dict.fromkeys(["RayActorError", "NodeDiedError", "ObjectLostError", "OutOfMemoryError"], OSError)
    )

    def __init__(self, *rooms: int) -> None:
        self.rooms = list(rooms)
        self.busy = 0
        self.reserved: list[object] = []
        self.util = SimpleNamespace(
            placement_group=self.reserve,
            remove_placement_group=self.reserved.remove,
            placement_group_table=lambda one: {"state": "CREATED" if self.has(one) else "PENDING"},
        )

    def reserve(self, bundles: list[dict[str, float]]) -> object:
        self.reserved.append(one := object())
        return one

    def has(self, one: object) -> bool:
        return self.reserved.index(one) < sum(self.rooms) - self.busy

    def nodes(self) -> list[dict[str, Any]]:
        share = {"CPU": 2.0, "GPU": 0.3}
        totals = [{name: room * amount for name, amount in share.items()} for room in self.rooms]
        return [{"NodeID": str(k), "Alive": self.rooms[k] > 0, "Resources": total} for k, total in enumerate(totals)]

    def remote(self, kind: type) -> type:
        return kind


def pool(monkeypatch: pytest.MonkeyPatch, machines: Machines, workers: int | None = None, wait: float = 0.3) -> _Actors:
    pytest.importorskip("ray", reason='needs pip install "lightning-fed[ray]"')
    monkeypatch.setattr("lightning_fed.engines.ray.engine.the_package", lambda: machines)
    monkeypatch.setattr("lightning_fed.engines.ray.engine.SETTLED", 0.1)
    there: Any = SimpleNamespace(check=lambda: None, is_gone=False)
    return _Actors(there, workers, {"CPU": 2.0, "GPU": 0.3}, wait, ordered=None, turn_timeout=None)


def test_there_are_as_many_workers_as_all_machines_have_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines(3, 1)
    actors = pool(monkeypatch, machines)
    assert actors.available() == [0, 1, 2, 3]
    machines.rooms.append(2)  # one that joins
    assert actors.available() == [0, 1, 2, 3, 4, 5]


def test_a_worker_whose_machine_has_left_comes_back_with_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines(1, 1)
    actors = pool(monkeypatch, machines)
    assert actors.available() == [0, 1]
    machines.rooms[1] = 0
    assert not actors.replace(1)
    assert actors.available() == [0]
    machines.rooms[1] = 1
    assert actors.available() == [0, 1]
    assert actors.replace(0)  # it was the worker alone that died
    actors.stop()
    assert machines.reserved == []


def test_whoever_is_idle_on_a_machine_that_left_gets_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines(1, 1)
    machines.kill = lambda actor: None  # type: ignore[attr-defined]
    actors = pool(monkeypatch, machines)
    actors.available()
    for worker in (0, 1):
        actors._members[worker] = _Member(None, deque(), None, node_id=str(worker))
    assert actors.available() == [0, 1]
    machines.rooms[1] = 0
    assert actors.available() == [0]


def test_a_busy_cluster_gives_fewer_workers_than_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lines: None
) -> None:
    machines = Machines(4)
    machines.busy = 2
    actors = pool(monkeypatch, machines, workers=3)
    assert actors.available() == [0, 1]
    assert actors.available() == [0, 1]
    machines.busy = 0
    assert actors.available() == [0, 1, 2]
    assert capsys.readouterr().out == "Ray has resources for 2 of 3 workers.\n"


def test_a_cluster_without_room_is_one_line_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FederationError, match=r"^Ray has had no resources for a worker \(2 CPU and 0.3 GPU each\) for 0.3 s: "):
        pool(monkeypatch, Machines(0)).available()
