"""A pass over public data, which a model predicts."""

from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_fed.core.flops import FlopMeter
from lightning_fed.core.module import FederatedModule
from lightning_fed.core.public_distillation import PublicDistillation
from lightning_fed.errors import FederationError


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
