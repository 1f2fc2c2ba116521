"""A method's module in a plain Trainer, stopped anywhere and continued from a checkpoint, ends as if it had never been stopped."""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from often import mostly_slow
from tiny import METHODS, data_for, new_method, new_trainer, same
from torch import Tensor

import lightning_fed.methods
from lightning_fed.errors import FederationError
from lightning_fed.methods.families.adapter_module import AdapterModule
from lightning_fed.tensors import State

SILENT = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}


class KeepAll(Callback):
    """A checkpoint after every third batch and after every epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: list[Path] = []

    def _save(self, trainer: L.Trainer, name: str) -> None:
        self.made.append(self.folder / f"{name}.ckpt")
        trainer.save_checkpoint(self.made[-1])

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx % 3 == 1:
            self._save(trainer, f"epoch_{trainer.current_epoch}_batch_{batch_idx}")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._save(trainer, f"epoch_{trainer.current_epoch}_end")


def train(
    name: str, epochs: int = 3, keep: Callback | None = None, ckpt_path: Path | None = None, precision: Any = None, **options: Any
) -> tuple[State, dict[str, Tensor]]:
    """One client, with validation; what there is in the end: the state, and what was logged."""
    torch.manual_seed(99 if ckpt_path else 0)  # the continued run has the random state of the checkpoint
    data = data_for(name, num_clients=2, size=120).client(1)
    module = new_method(name, **options)
    trainer = new_trainer(
        max_epochs=epochs, callbacks=[keep] if keep else [], precision=precision, enable_checkpointing=False, **SILENT
    )
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
    return module.state_dict() | module.private_state(), dict(trainer.callback_metrics)


def assert_ends_the_same(name: str, folder: Path, places: slice = slice(None, -1), **options: Any) -> None:
    """From each of the checkpoints in some places, but the last, with which nothing is left to do."""
    keep = KeepAll(folder)
    state, logged = train(name, keep=keep, **options)
    assert len(keep.made) > 4
    assert "val/accuracy" in logged  # which early stopping and checkpoints can watch
    for checkpoint in keep.made[places]:
        continued, relogged = train(name, ckpt_path=checkpoint, **options)
        assert same(state, continued), checkpoint.name
        assert relogged.items() <= logged.items(), checkpoint.name  # those of earlier phases are not logged again
        # After the last batch of all nothing is left to train, and Lightning neither validates nor ends the epoch again.
        assert "val/accuracy" in relogged or checkpoint == keep.made[-2], checkpoint.name


@pytest.mark.parametrize("name", mostly_slow(METHODS, {"FedAvg", "PFedLoRA", "DSFL", "PF2LoRA"}))
def test_it_ends_as_if_it_had_not_been_stopped(name: str, tmp_path: Path) -> None:
    """Inside of its first epoch, and of a later one; with a schedule and in other precisions, below, anywhere."""
    longer = {"steps": 5} if issubclass(getattr(lightning_fed.methods, name), AdapterModule) else {}
    assert_ends_the_same(name, tmp_path, slice(0, -1, 3), **longer)


@pytest.mark.parametrize(
    ("name", "interval"),
    mostly_slow(
        product(["FedRep", "PF2LoRA"], ["round", "epoch", "step"]),
        often={("FedRep", "round"), ("FedRep", "epoch"), ("FedRep", "step")},
    ),
)
def test_with_a_schedule(name: str, interval: str, tmp_path: Path) -> None:
    longer = {"head_epochs": 1} if name == "FedRep" else {"steps": 5}
    schedule = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.7)
    assert_ends_the_same(name, tmp_path, lr_scheduler=schedule, lr_interval=interval, **longer)


@pytest.mark.often(1)
@pytest.mark.parametrize("precision", ["bf16-true", "64-true", "bf16-mixed"])
def test_in_any_precision(precision: str, tmp_path: Path) -> None:
    assert_ends_the_same("FedRep", tmp_path, precision=precision, head_epochs=1)


def test_what_only_the_first_step_of_a_turn_trains(tmp_path: Path) -> None:
    assert_ends_the_same("APFL", tmp_path, slice(0, -1, 3), alpha_lr=0.4)


def test_within_a_step_of_several_batches(tmp_path: Path) -> None:
    assert_ends_the_same("FedAvg", tmp_path, accumulate=4)


def test_after_the_last_epoch_of_a_trainer_another_one_goes_on_inside_the_phase(tmp_path: Path) -> None:
    data = data_for("FedAvg", num_clients=2, size=120).client(1)

    def fit(max_epochs: int, ckpt_path: Path | None = None) -> tuple[L.Trainer, State]:
        torch.manual_seed(0)
        module = new_method("FedAvg", epochs=4)
        trainer = new_trainer(max_epochs=max_epochs, enable_checkpointing=False, **SILENT)
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
        return trainer, module.state_dict()

    stopped, _ = fit(2)
    stopped.save_checkpoint(tmp_path / "stopped.ckpt")  # after the fit
    assert same(fit(4, tmp_path / "stopped.ckpt")[1], fit(4)[1])
    assert not same(fit(4)[1], fit(2)[1])


def test_a_checkpoint_that_is_loaded_but_not_continued_starts_anew(tmp_path: Path) -> None:
    keep = KeepAll(tmp_path)
    train("FedAvg", keep=keep, epochs=2)
    data = data_for("FedAvg", num_clients=2, size=120).client(1)
    ends = []
    for through_lightning in (True, False):
        checkpoint = torch.load(keep.made[1], weights_only=True)
        module = new_method("FedAvg")
        module.configure_model()
        if through_lightning:
            module.on_load_checkpoint(checkpoint)
        module.load_state_dict(checkpoint["state_dict"])
        new_trainer(max_epochs=1, enable_checkpointing=False, **SILENT).fit(module, datamodule=data)
        ends.append(module.state_dict())
    assert same(*ends)


def test_other_phases_than_those_of_the_checkpoint_are_refused(tmp_path: Path) -> None:
    keep = KeepAll(tmp_path)
    train("FedRep", keep=keep, head_epochs=1)
    with pytest.raises(FederationError, match="with the phases head, representation, but FedRep has representation: continue"):
        train("FedRep", ckpt_path=keep.made[0], head_epochs=0)
