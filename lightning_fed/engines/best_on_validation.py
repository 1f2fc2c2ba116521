"""The choice of the model that is best on held-out data, within one training."""

from typing import Any

import lightning as L
import torch

from lightning_fed.tensors import State


class BestOnValidation(L.Callback):
    """Leaves a module as it was when it was best on validation data, and stops where it gets no better.

    Args:
        metric: the column of ``callback_metrics`` that says how good it is.
        higher_is_better: whether it is to be large.
        every: after how many steps there is a validation.
        patience: after how many steps that made it no better the fit stops; None: not before its end.
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
        """What a Trainer needs to validate so often."""
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
