"""Every method in every precision of a Trainer: it trains, what is built, sent and kept has that precision, and a run continues
exactly.
"""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from often import mostly_slow
from tiny import (
    CLASSES,
    METHODS,
    TINY_BERT,
    Recording,
    assert_same_end,
    data_for,
    final_checkpoint,
    final_kept,
    new_federation,
    new_method,
    new_texts,
)
from transformers import BertConfig, BertForSequenceClassification

from lightning_fed.core.client_modules import frozen_parameters
from lightning_fed.errors import FederationError
from lightning_fed.models import TransformerClassifier
from lightning_fed.tensors import State

DTYPES = {"bf16-true": torch.bfloat16, "64-true": torch.float64, "bf16-mixed": torch.float32}


def fit(name: str, precision: str, folder: Path, rounds: int, ckpt_path: str | None = None) -> Path:
    trainer = partial(L.Trainer, accelerator="cpu", devices=1, precision=precision)
    federation = new_federation(rounds, run_dir=folder, evaluate_every=1, trainer=trainer)
    federation.fit(new_method(name), data_for(name, num_clients=2, size=60), ckpt_path=ckpt_path)
    [run_folder] = folder.glob("version_*")
    return run_folder


OFTEN = {("FedAvg", "bf16-true"), *((name, "64-true") for name in ("FedHM", "HETLoRA", "SCAFFOLD"))}
"""What is tried in the default tests; the rest is slow."""


@pytest.mark.parametrize(
    ("name", "precision"),
    mostly_slow([(name, precision) for name in METHODS for precision in DTYPES], OFTEN),
)
def test_a_method_in_a_precision(name: str, precision: str, tmp_path: Path) -> None:
    whole = fit(name, precision, tmp_path / "whole", 2)
    fit(name, precision, tmp_path / "stopped", 1)
    assert_same_end(whole, fit(name, precision, tmp_path / "stopped", 2, "last"))
    _, _, _, server, clients = final_checkpoint(whole)
    for state in (server, *clients.values(), *final_kept(whole).values()):
        assert floating(state) <= {DTYPES[precision]}


def floating(state: State) -> set[torch.dtype]:
    """Types of a state's tensors, without the counters of optimizers, which PyTorch keeps in float32."""
    return {tensor.dtype for name, tensor in state.items() if tensor.is_floating_point() and not name.endswith("/step")}


@pytest.mark.parametrize("name", ["PF2LoRA", "PerFedAvgLoRA", "FedNova", "APFL", "SCAFFOLD"])
def test_gradients_that_nobody_scales_are_refused_at_half_precision(name: str) -> None:
    """On a CPU, Lightning has bf16-mixed in its place."""
    module = new_method(name)
    module._trainer = SimpleNamespace(precision="16-mixed", ckpt_path=None, lr_scheduler_configs=[])
    with pytest.raises(FederationError, match=f"{name} computes gradients itself, which 16-mixed cannot scale"):
        module.on_fit_start()


@pytest.mark.often(3)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("name", ["HOMLoRA", "PF2LoRA", "FedAvg"])
def test_what_learns_of_a_bf16_checkpoint_is_float32(name: str, precision: str) -> None:
    """Unless the Trainer's precision says otherwise: small steps would be rounded away. What is frozen stays as it is."""
    settings = {key: value for key, value in TINY_BERT.items() if key != "model_type"}
    BertForSequenceClassification(BertConfig(**settings, num_labels=CLASSES)).to(torch.bfloat16).save_pretrained("bert")
    small = partial(torch.optim.SGD, lr=1e-4)  # steps far below the spacing of bf16
    options = {"optimizer": small, "backbone": partial(TransformerClassifier, name="bert")}
    engine = Recording()
    trainer = partial(L.Trainer, accelerator="cpu", devices=1, precision=precision)
    federation = new_federation(1, engine=engine, trainer=trainer)
    federation.fit(new_method(name, **options), new_texts(2, 40))
    wanted = torch.bfloat16 if precision == "bf16-true" else torch.float32
    client = federation.client_module(0)
    for state in (federation.run.server.state_dict(), client.private_state()):
        assert floating(state) <= {wanted}
    assert {tensor.dtype for tensor in frozen_parameters(client).values()} <= {torch.bfloat16}
    [(turn, update), *_] = engine.fits()
    before, after = (state["backbone.network.classifier.weight"] for state in (turn.broadcast.state, update.state))
    assert torch.equal(before, after) == (precision == "bf16-true")
