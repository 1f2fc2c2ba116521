"""Static batch norm (Diao et al., HeteroFL, ICLR 2021): running statistics do not travel, but are gathered when needed."""

import lightning as L
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def running_statistics(module: nn.Module) -> set[str]:
    """Names of the running means, variances and batch counters of all batch-norm layers, as in the state dict."""
    return {
        f"{name}.{buffer}" if name else buffer
        for name, layer in module.named_modules()
        if isinstance(layer, _BatchNorm)
        for buffer, _ in layer.named_buffers(recurse=False)
    }


class StatisticsPass(L.LightningModule):
    """One pass over data that sets the statistics of each batch-norm layer to the plain mean of the batches' means and variances.

    Batches are normalized by their own statistics, as in training; variances are unbiased; everything else is in eval mode. This
    is not the pooled variance: it leaves out the variance between batch means. ``Trainer.predict`` runs it.

    Args:
        module: the network; called with the inputs ``(B, …)`` of each batch.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._norms = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
        self._momenta: list[float | None] = []  # the layers' original momenta

    def on_predict_start(self) -> None:
        """Reset the statistics, with a momentum of None: PyTorch's cumulative average."""
        self._momenta = [norm.momentum for norm in self._norms]
        for norm in self._norms:
            norm.reset_running_stats()
            norm.momentum = None
            norm.train()

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> int:
        """Process a batch; returns its number of examples."""
        self.module(batch[0])
        return len(batch[0])

    def on_predict_end(self) -> None:
        """Restore the layers except for their statistics; Lightning restores their mode."""
        for norm, momentum in zip(self._norms, self._momenta, strict=True):
            norm.momentum = momentum
