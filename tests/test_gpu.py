"""What needs a GPU."""

from functools import partial

import lightning as L
import pytest
import torch
from tiny import METHODS, new_data, new_federation, new_method, without_seconds

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.parametrize("name", METHODS),
]


def test_a_run_on_the_gpu_leaves_everything_on_the_cpu(name: str) -> None:
    federation = new_federation(trainer=partial(L.Trainer, accelerator="gpu", devices=1))
    federation.fit(new_method(name), new_data(3, 120))
    states = [federation.server.state_dict(), *(federation.store.get(k) for k in range(3) if k in federation.store)]
    assert all(tensor.device.type == "cpu" for state in states for tensor in state.values())


def test_cpu_and_gpu_learn_the_same_at_first(name: str) -> None:
    """One round; later ones drift apart with the order of sums."""
    rows = []
    for accelerator in ("cpu", "gpu"):
        federation = new_federation(1, trainer=partial(L.Trainer, accelerator=accelerator, devices=1))
        rows.append(without_seconds(federation.fit(new_method(name), new_data(3, 120)))[0])
    losses = [name for name in rows[0] if name.startswith("train/")]
    assert [rows[0][loss] for loss in losses] == pytest.approx([rows[1][loss] for loss in losses], rel=1e-3)
