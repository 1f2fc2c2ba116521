"""Lightning without what nobody listens to: it does the same, and hears everybody who does listen."""

import logging
import warnings
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.profilers import SimpleProfiler
from torch import Tensor, nn

from lightning_fed.engines.silence import quiet_lightning
from lightning_fed.engines.turn_loop import _is_on, lean_lightning
from lightning_fed.engines.worker import QUIET


class Listens(L.LightningModule):
    """A plain LightningModule that overrides hooks of every batch and logs from a step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.heard: list[str] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.heard.append("before transfer")
        return [2 * tensor for tensor in batch]

    def on_after_backward(self) -> None:
        self.heard.append("after backward")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.heard.append("batch end")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.layer(batch[0]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class CallbackListens(L.Callback):
    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        self.batches += 1


def train(profiler: str | None = None) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str], int, L.Trainer]:
    torch.manual_seed(0)
    module, callback = Listens(), CallbackListens()
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(12, 4)), batch_size=4)
    trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=2, callbacks=[callback], profiler=profiler, **QUIET)
    trainer.fit(module, data)
    return module.state_dict(), trainer.callback_metrics, module.heard, callback.batches, trainer


def test_a_run_is_the_same_and_all_who_listen_are_heard() -> None:
    state, metrics, heard, batches, _ = train()
    with lean_lightning():
        lean_state, lean_metrics, lean_heard, lean_batches, _ = train()
    assert all(torch.equal(state[name], lean_state[name]) for name in state)
    assert metrics == lean_metrics
    assert {"loss_step", "loss_epoch"} <= metrics.keys()
    assert heard == lean_heard
    assert batches == lean_batches == 6


def test_a_profiler_profiles() -> None:
    with lean_lightning():
        trainer = train("simple")[-1]
    assert isinstance(trainer.profiler, SimpleProfiler)
    assert len(trainer.profiler.recorded_durations["run_training_batch"]) == 6


def test_only_what_is_there_already_is_not_moved() -> None:
    cpu, meta = torch.device("cpu"), torch.device("meta")
    assert _is_on((torch.ones(2), torch.ones(2)), cpu)
    assert not _is_on((torch.ones(2), torch.ones(2, device=meta)), cpu)
    assert not _is_on((torch.ones(2),), meta)
    assert not _is_on(({"input_ids": torch.ones(2)}, torch.ones(2)), cpu)  # looked into by Lightning itself


def test_a_trainer_starts_under_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Started by srun, as one task."""
    variables = {"NTASKS": "1", "JOB_NAME": "study", "PROCID": "0", "LOCALID": "0", "NODEID": "0", "NNODES": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    with lean_lightning():
        assert train()[3] == 6


def test_of_runs_that_overlap_the_last_one_puts_lightning_back() -> None:
    before = L.LightningModule._call_batch_hook
    first, second = lean_lightning(), lean_lightning()
    first.__enter__()
    replaced = L.LightningModule._call_batch_hook
    second.__enter__()
    first.__exit__(None, None, None)
    assert L.LightningModule._call_batch_hook is replaced is not before
    second.__exit__(None, None, None)
    assert L.LightningModule._call_batch_hook is before


def test_of_runs_that_overlap_the_last_one_lets_lightning_speak_again() -> None:
    logger, filters = logging.getLogger("lightning.pytorch"), list(warnings.filters)
    level = logger.level
    first, second = quiet_lightning(), quiet_lightning()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert logger.level == logging.WARNING
    assert warnings.filters != filters
    second.__exit__(None, None, None)
    assert logger.level == level
    assert warnings.filters == filters
