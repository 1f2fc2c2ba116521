"""What turns on public data take: a pass that says something of each example, and the choice of the model that is best on held-out
data.
"""

from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_fed.core.flops import FlopMeter
from lightning_fed.core.module import FederatedModule
from lightning_fed.core.public_distillation import PublicDistillation
from lightning_fed.errors import FederationError
from lightning_fed.tensors import State


class OutputsPass(L.LightningModule):
    """What a module says of each example. ``Trainer.predict`` runs it, on examples in order.

    Args:
        module: whose ``forward`` is asked.
        flops: counts the passes.
        examples: how many there are.
    """

    def __init__(self, module: PublicDistillation, flops: FlopMeter, examples: int) -> None:
        super().__init__()
        self.module = module
        self.flops = flops
        self.examples = examples
        self.outputs: Tensor | None = None
        self._seen = 0

    def predict_step(self, batch: Any, batch_idx: int) -> int:
        """Take a batch in; returns its number. Each output goes to its row: pieces put together in the end are in memory twice."""
        x, _ = self.module.unpack(batch)
        said: Tensor = self.module(x)
        self.flops.note(self.module, "predict", batch, _predict)
        if self.outputs is None:
            size = 4 * self.examples * said[0].numel()  # in float32
            wide = torch.promote_types(said.dtype, torch.float32)
            dtype = wide if size <= self.module.public_table_limit else torch.bfloat16
            self.outputs = torch.empty(self.examples, *said.shape[1:], dtype=dtype)
        self.outputs[self._seen : self._seen + len(said)] = said
        self._seen += len(said)
        return batch_idx

    def result(self) -> Tensor:
        """All of them, ``(M, …)``, on the CPU: in float32 at least, or in bfloat16 where they are large.

        Raises:
            FederationError: if not all examples were looked at.
        """
        if self.outputs is None or self._seen < self.examples:
            raise FederationError(
                f"the model was asked about {self._seen} of {self.examples} public examples: set no limit_predict_batches and no "
                "fast_dev_run for the trainer, which apply to each turn."
            )
        return self.outputs


def _predict(copied: FederatedModule, batch: Any) -> None:
    copied(copied.unpack(batch)[0])


class BestOnValidation(L.Callback):
    """Leaves a module as it was when it was best on validation data, and stops where it gets no better.

    Args:
        metric: the column of ``callback_metrics`` that says how good it is.
        more_is_better: whether it is to be large.
        every: after how many steps there is a validation.
        patience: after how many steps that made it no better the fit stops; None: not before its end.
    """

    def __init__(self, metric: str, more_is_better: bool, every: int, patience: int | None) -> None:
        self.metric = metric
        self.more_is_better = more_is_better
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
        """Compare, and remember."""
        value = float(trainer.callback_metrics[self.metric])
        if self.best is None or (value > self.best if self.more_is_better else value < self.best):
            self.best, self.waited = value, 0
            self.state = {name: tensor.clone() for name, tensor in pl_module.state_dict().items()}
        else:
            self.waited += self.every
            trainer.should_stop = self.patience is not None and self.waited >= self.patience

    @torch.no_grad()
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Go back to the best."""
        if self.state:
            pl_module.load_state_dict(self.state)
            self.state = {}
