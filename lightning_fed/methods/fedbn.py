"""FedBN (Li et al., ICLR 2021, https://arxiv.org/abs/2102.07623)."""

from torch.nn.modules.batchnorm import _BatchNorm

from lightning_fed.core import FederatedModule


class FedBN(FederatedModule):
    """Federated averaging with local batch normalization: scale, shift, running statistics and counter stay with the client.

    The layers are found by their type, not by their name: the batch norm of a residual shortcut is called ``downsample.1``, which
    implementations that look for "bn" share by mistake. Group and layer norms are shared. The average is weighted by training
    examples; in the paper the few clients have equal weights. Monitored: accuracy after aggregation.
    """

    def shared_names(self) -> set[str]:
        """Names of all tensors but the state of batch-norm layers."""
        norms = tuple(f"{name}." for name, module in self.named_modules(remove_duplicate=False) if isinstance(module, _BatchNorm))
        return {name for name in super().shared_names() if not name.startswith(norms)}
