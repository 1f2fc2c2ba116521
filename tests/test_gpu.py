"""What needs a GPU."""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from often import OFTEN
from tiny import METHODS, ON_IMAGES, TINY_TRANSFORMER, Net, data_for, new_federation, new_method, without_seconds

import lightning_fed.methods
from lightning_fed.callbacks import FederationCallback, RunView
from lightning_fed.core.client_modules import frozen_parameters
from lightning_fed.core.fine_tuning import FineTuning
from lightning_fed.core.messages import ClientUpdate
from lightning_fed.engines import InProcess, Processes
from lightning_fed.engines.compression import Compression
from lightning_fed.federation.federation import Federation
from lightning_fed.methods.families.adapter_module import AdapterModule
from lightning_fed.methods.families.model_sizes import SizedModule
from lightning_fed.models import Adapters, TransformerClassifier
from lightning_fed.privacy import ExampleDP
from lightning_fed.testing.toys import PartlyFrozenNet

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
each_method = pytest.mark.parametrize("name", METHODS)
on_gpu = partial(L.Trainer, accelerator="gpu", devices=1)


@each_method
def test_a_run_on_the_gpu_leaves_everything_on_the_cpu(name: str) -> None:
    federation = new_federation(trainer=on_gpu)
    federation.fit(new_method(name), data_for(name, num_clients=3, size=120))
    states = [federation.run.server.state_dict(), *(federation.run.store.get(k) for k in range(3) if k in federation.run.store)]
    assert all(tensor.device.type == "cpu" for state in states for tensor in state.values())
    modules = federation.run.model, federation.run.client_module(0), federation.run.server_module()
    assert all(tensor.device.type == "cpu" for module in modules for tensor in module.state_dict().values())


@each_method
def test_what_is_frozen_stays_on_the_gpu_from_turn_to_turn(name: str) -> None:
    places = []

    class Noting(FederationCallback):
        def on_turn_end(self, run: RunView, update: ClientUpdate) -> None:
            frozen = frozen_parameters(run.model).values()
            places.append([(parameter.device.type, parameter.data_ptr()) for parameter in frozen])

    federation = new_federation(2, callbacks=[Noting()], trainer=on_gpu)
    federation.fit(new_method(name), data_for(name, num_clients=3, size=120))
    assert all(place == places[0] for place in places)
    assert all(kind == "cuda" for kind, _ in places[0])


@each_method
def test_cpu_and_gpu_learn_the_same_at_first(name: str) -> None:
    """One round; later ones drift apart with the order of sums."""
    rows = []
    for accelerator in ("cpu", "gpu"):
        federation = new_federation(1, trainer=partial(L.Trainer, accelerator=accelerator, devices=1))
        model, data = new_method(name, **without_dropout(name)), data_for(name, num_clients=3, size=120)
        rows.append(without_seconds(federation.fit(model, data))[0])
    losses = [name for name in rows[0] if name.startswith("train/")]
    assert [rows[0][loss] for loss in losses] == pytest.approx([rows[1][loss] for loss in losses], rel=1e-3)


@pytest.fixture(scope="module")
def engine() -> Iterator[Processes]:
    """Two workers that share the first GPU."""
    engine = Processes(workers=2)
    yield engine
    engine._stop()


@each_method
def test_worker_processes_on_the_gpu_learn_what_one_process_does(name: str, engine: Processes) -> None:
    rows = []
    for chosen in (InProcess(threads=1), engine):
        federation = new_federation(1, engine=chosen, trainer=on_gpu)
        rows.append(without_seconds(federation.fit(new_method(name), data_for(name, num_clients=3, size=120)))[0])
    losses = [name for name in rows[0] if name.startswith("train/")]
    assert [rows[0][loss] for loss in losses] == pytest.approx([rows[1][loss] for loss in losses], rel=1e-3)


class TakingModels(FederationCallback):
    """Asks for models between two rounds, when frozen tensors are on the GPU."""

    def on_round_end(self, run: Any) -> None:
        for module in (run.client_module(0), run.server_module()):
            assert {tensor.device.type for tensor in module.state_dict().values()} == {"cpu"}


@pytest.mark.parametrize("name", sorted({*OFTEN, "FFALoRA", "FedALA", "FedExLoRA", "FedProto", "HeteroFL", "SLoRA"}))
def test_a_run_is_continued_measured_predicted_and_exported(name: str, tmp_path: Path) -> None:
    def new(rounds: int) -> Federation:
        return new_federation(rounds, tmp_path / "runs", evaluate_every=1, callbacks=[TakingModels()], trainer=on_gpu)

    model, data = new_method(name), data_for(name, num_clients=3, size=120)
    new(2).fit(model, data)
    row = new(3).fit(model, data, ckpt_path="last")[-1]
    measured = new(3).test(model, data)
    assert measured
    assert measured == pytest.approx({column: row[column] for column in measured}, rel=1e-3, nan_ok=True)
    assert new(3).predict(model, data, tmp_path / "predictions.csv")
    new(3).export(model, data, tmp_path / "exported", client=1)
    assert list((tmp_path / "exported").glob("*.safetensors"))


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "int8": ({"compression": Compression(up="int8", down="int8")}, {}),
    "topk": ({"compression": Compression(up="topk", down="bf16", share=0.3)}, {}),
    "privacy": ({"privacy": ExampleDP(clip=0.1, delta=1e-3, noise_multiplier=1.0)}, {}),
    "unseen": ({"unseen": [2]}, {"fine_tuning": FineTuning(epochs=1)}),
    "fused": ({}, {"optimizer": partial(torch.optim.AdamW, fused=True), "persistent": True}),
    "bf16": ({"trainer": partial(on_gpu, precision="bf16-true")}, {}),
}
"""Of the federation and of the method."""


@pytest.mark.parametrize("name", ["FedAvg", "FedPer", "AdapterTuning"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_run_with_this_setting_trains(setting: str, name: str) -> None:
    of_federation, of_method = SETTINGS[setting]
    federation = new_federation(2, **{"trainer": on_gpu} | of_federation)
    rows = federation.fit(new_method(name, **of_method), data_for(name, num_clients=3, size=120))
    losses = [value for row in rows for column, value in row.items() if column.startswith("train/")]
    assert losses
    assert all(map(math.isfinite, losses))


@pytest.mark.parametrize("network", ["frozen", "adapters"])
@pytest.mark.parametrize("name", ["FedAvg", "FedALA", "Ditto", "FedKD", "SCAFFOLD"])
def test_a_network_that_is_frozen_in_part_trains(name: str, network: str) -> None:
    """What is frozen is on the GPU when the next client loads the rest."""
    ways: dict[str, dict[str, Any]] = {
        "frozen": {"backbone": PartlyFrozenNet},
        "adapters": {"backbone": Net, "adapters": Adapters(r=2, target_modules=["fc1", "fc2"])},
    }
    federation = new_federation(2, trainer=on_gpu)
    assert len(federation.fit(new_method(name, **ways[network]), data_for(name, num_clients=3, size=120))) == 2


def without_dropout(name: str) -> dict[str, Any]:
    """A network without it, for methods that are tested on one that has it: the devices do not draw the same numbers."""
    method = getattr(lightning_fed.methods, name)
    if issubclass(method, AdapterModule) and name not in ON_IMAGES:
        none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return {"backbone": partial(TransformerClassifier, config=TINY_TRANSFORMER | none)}
    return {"backbone": Net} if issubclass(method, SizedModule) else {}
