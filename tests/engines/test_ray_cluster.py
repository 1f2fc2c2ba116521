"""What can be said of Ray without a cluster, and mostly without Ray."""

import json
import pickle
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_fed import __version__
from lightning_fed.__main__ import main
from lightning_fed.engines import Ray
from lightning_fed.engines.packing import pack, unpack
from lightning_fed.engines.ray_cluster import _ask, _own_signals
from lightning_fed.engines.ray_worker import Carried, Lasting, new_actor
from lightning_fed.errors import FederationError


def test_without_ray_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        FederationError, match=r'needs the package ray, which cannot be imported .*: pip install "lightning-fed\[ray\]"\.$'
    ):
        Ray()
    Path("config.yaml").write_text("data: Digits\nmodel: {class_path: FedAvg, init_args: {backbone: CNN5}}\n")
    with pytest.raises(SystemExit) as error:
        main(["fit", "--config", "config.yaml", "--federation.engine", "Ray", "--federation.engine.init_args.address", "auto"])
    told = capsys.readouterr().err
    assert error.value.code == 2
    assert told.startswith("lightning-fed: error: The engine Ray needs the package ray")
    assert told.count("\n") == 1


def test_an_address_of_a_client_is_refused() -> None:
    with pytest.raises(FederationError, match=r"address is ray://10.0.0.1:10001: the engine Ray runs on a machine of the cluster"):
        _ask("ray://10.0.0.1:10001", 1)


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


@pytest.mark.parametrize("kind", [Carried, Lasting])
def test_tensors_arrive_as_they_were(kind: type[Carried]) -> None:
    """A copy, or a view of the memory in which Ray keeps them, which must not be written to."""
    images = torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last)
    thing = {"a": images, "b": [torch.arange(3), "text"], "none": torch.empty(0)}
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(pack(thing, room=kind), protocol=5, buffer_callback=buffers.append)
    kept = [np.frombuffer(bytes(buffer.raw()), np.uint8) for buffer in buffers]
    arrived = unpack(pickle.loads(head, buffers=kept))
    assert torch.equal(arrived["a"], images)
    assert arrived["a"].stride() == images.stride()
    assert torch.equal(arrived["b"][0], torch.arange(3))
    start = kept[0].ctypes.data
    assert (start <= arrived["a"].data_ptr() < start + kept[0].nbytes) == (kind is Lasting)


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
