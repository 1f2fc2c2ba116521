"""A pass over a client's training data after training."""

from typing import Any

import lightning as L

from lightning_fed.core.flops import FlopMeter
from lightning_fed.core.module import FederatedModule
from lightning_fed.tensors import State


class PostTrainingPass(L.LightningModule):
    """Calls a method's ``post_training_step`` for each batch and sums what it returns. ``Trainer.predict`` runs it in eval mode on
    the client's ``predict_dataloader``, which has the training examples in order and without augmentation.
    """

    def __init__(self, module: FederatedModule, flops: FlopMeter) -> None:
        super().__init__()
        self.module = module
        self.flops = flops
        self.total: State = {}

    def predict_step(self, batch: Any, batch_idx: int) -> int:
        """Process a batch; returns its index."""
        for name, tensor in self.module.post_training_step(batch).items():
            tensor = tensor.detach()
            self.total[name] = self.total[name] + tensor if name in self.total else tensor.clone()
        self.flops.note(self.module, "post_training", batch, type(self.module).post_training_step)
        return batch_idx

    def result(self) -> State:
        """The sums, on the CPU."""
        return {name: tensor.cpu() for name, tensor in self.total.items()}
