"""Selection of the best model on validation data within one training."""

from typing import Any

import lightning as L
import torch

from lightning_fed.tensors import State


class BestOnValidation(L.Callback):
    """Restores the best model on validation data after a fit, and stops when it no longer improves.

    Args:
        metric: column of ``callback_metrics`` to compare.
        higher_is_better: whether larger values are better.
        every: number of steps between validations.
        patience: number of steps without improvement after which the fit stops. None: it runs to its end.
    """

    def __init__(self, metric: str, higher_is_better: bool, every: int, patience: int | None) -> None:
        self.metric = metric
        self.higher_is_better = higher_is_better
        self.every = every
        self.patience = patience
        self.waited = 0  # steps
        self.best: float | None = None
        self.state: State = {}

    @property
    def trainer_options(self) -> dict[str, Any]:
        """Options with which a Trainer validates that often."""
        return {"val_check_interval": self.every, "check_val_every_n_epoch": None}

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        value = float(trainer.callback_metrics[self.metric])
        if self.best is None or (value > self.best if self.higher_is_better else value < self.best):
            self.best, self.waited = value, 0
            self.state = {name: tensor.clone() for name, tensor in pl_module.state_dict().items()}
        else:
            self.waited += self.every
            trainer.should_stop = self.patience is not None and self.waited >= self.patience

    @torch.no_grad()
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.state:
            pl_module.load_state_dict(self.state)
            self.state = {}
