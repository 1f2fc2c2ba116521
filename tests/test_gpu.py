"""What needs a GPU."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from tiny import METHODS, ON_IMAGES, TINY_TRANSFORMER, Net, data_for, new_federation, new_method, without_seconds

import lightning_fed.methods
from lightning_fed.callbacks import FederationCallback, RunView
from lightning_fed.core.client_modules import frozen_parameters
from lightning_fed.core.messages import ClientUpdate
from lightning_fed.engines import InProcess, Processes
from lightning_fed.methods.families.adapter_module import AdapterModule
from lightning_fed.methods.families.model_sizes import SizedModule
from lightning_fed.models import TransformerClassifier

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.parametrize("name", METHODS),
]


def test_a_run_on_the_gpu_leaves_everything_on_the_cpu(name: str) -> None:
    federation = new_federation(trainer=partial(L.Trainer, accelerator="gpu", devices=1))
    federation.fit(new_method(name), data_for(name, num_clients=3, size=120))
    states = [federation.run.server.state_dict(), *(federation.run.store.get(k) for k in range(3) if k in federation.run.store)]
    assert all(tensor.device.type == "cpu" for state in states for tensor in state.values())
    modules = federation.run.model, federation.run.client_module(0), federation.run.server_module()
    assert all(tensor.device.type == "cpu" for module in modules for tensor in module.state_dict().values())


def test_what_is_frozen_stays_on_the_gpu_from_turn_to_turn(name: str) -> None:
    places = []

    class Noting(FederationCallback):
        def on_turn_end(self, run: RunView, update: ClientUpdate) -> None:
            frozen = frozen_parameters(run.model).values()
            places.append([(parameter.device.type, parameter.data_ptr()) for parameter in frozen])

    federation = new_federation(2, callbacks=[Noting()], trainer=partial(L.Trainer, accelerator="gpu", devices=1))
    federation.fit(new_method(name), data_for(name, num_clients=3, size=120))
    assert all(place == places[0] for place in places)
    assert all(kind == "cuda" for kind, _ in places[0])


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


def test_worker_processes_on_the_gpu_learn_what_one_process_does(name: str, engine: Processes) -> None:
    rows = []
    for chosen in (InProcess(threads=1), engine):
        federation = new_federation(1, engine=chosen, trainer=partial(L.Trainer, accelerator="gpu", devices=1))
        rows.append(without_seconds(federation.fit(new_method(name), data_for(name, num_clients=3, size=120)))[0])
    losses = [name for name in rows[0] if name.startswith("train/")]
    assert [rows[0][loss] for loss in losses] == pytest.approx([rows[1][loss] for loss in losses], rel=1e-3)


def without_dropout(name: str) -> dict[str, Any]:
    """A network without it, for methods that are tested on one that has it: the devices do not draw the same numbers."""
    method = getattr(lightning_fed.methods, name)
    if issubclass(method, AdapterModule) and name not in ON_IMAGES:
        none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return {"backbone": partial(TransformerClassifier, config=TINY_TRANSFORMER | none)}
    return {"backbone": Net} if issubclass(method, SizedModule) else {}
