"""Passes over data besides training: over a client's after training, and over public data, which a model predicts."""

from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_fed.core.flops import FlopMeter
from lightning_fed.core.module import FederatedModule
from lightning_fed.core.public_distillation import PublicDistillation
from lightning_fed.errors import FederationError
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


class OutputsPass(L.LightningModule):
    """Collects a module's outputs for each example. ``Trainer.predict`` runs it, on examples in order.

    Args:
        module: module whose ``forward`` is called.
        flops: counts the passes.
        examples: number of examples.
    """

    def __init__(self, module: PublicDistillation, flops: FlopMeter, examples: int) -> None:
        super().__init__()
        self.module = module
        self.flops = flops
        self.examples = examples
        self.outputs: Tensor | None = None
        self._seen = 0

    def predict_step(self, batch: Any, batch_idx: int) -> int:
        """Process a batch; returns its index. Outputs are written to their rows: concatenating them would need twice the memory."""
        x, _ = self.module.unpack(batch)
        outputs: Tensor = self.module(x)
        self.flops.note(self.module, "predict", batch, _predict)
        if self.outputs is None:
            size = 4 * self.examples * outputs[0].numel()  # in float32
            wide = torch.promote_types(outputs.dtype, torch.float32)
            dtype = wide if size <= self.module.public_table_limit else torch.bfloat16
            self.outputs = torch.empty(self.examples, *outputs.shape[1:], dtype=dtype)
        self.outputs[self._seen : self._seen + len(outputs)] = outputs
        self._seen += len(outputs)
        return batch_idx

    def result(self) -> Tensor:
        """All outputs, ``(M, …)``, on the CPU, in float32 or wider, or in bfloat16 if they are large.

        Raises:
            FederationError: if not all examples were processed.
        """
        if self.outputs is None or self._seen < self.examples:
            raise FederationError(
                f"the model predicted {self._seen} of {self.examples} public examples: remove limit_predict_batches and "
                "fast_dev_run from the trainer, which apply to each turn."
            )
        return self.outputs


def _predict(copied: FederatedModule, batch: Any) -> None:
    copied(copied.unpack(batch)[0])
