"""Parameter-efficient fine-tuning of a frozen network that all clients share in memory."""

from typing import Any, Literal

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import nn

from lightning_fed.core import FederatedModule, Phase
from lightning_fed.models.frozen import FrozenBackbone
from lightning_fed.models.pretrained import transformer_of
from lightning_fed.models.transformer import Transformer, TransformerFactory
from lightning_fed.options import NonNegativeInt, PositiveInt


def default_adamw(parameters: Any) -> torch.optim.Optimizer:
    """AdamW with learning rate 1e-3, which the experiments of PF2LoRA use for most tasks."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def default_adam(parameters: Any) -> torch.optim.Optimizer:
    """Adam with learning rate 2e-3, which the experiments on FedLoRA use (FedHM, Section 6.1)."""
    return torch.optim.Adam(parameters, lr=2e-3)


class AdapterModule(FederatedModule):
    """Base of parameter-efficient fine-tuning methods. A method overrides :meth:`attach`, and :meth:`shared_names` if part of
    the attached parameters stays with the client.

    The network is loaded once and frozen; all modules share its tensors. A head that the task adds is trained and averaged
    with the attached parameters. So is every other tensor that the network's files lack (such as the pooler of a BERT that was
    pretrained without one), because it is randomly initialized. The network defines predictions and metrics: see
    :class:`lightning_fed.models.Transformer`.

    Args:
        backbone: a network of the transformers library: a :class:`lightning_fed.models.Transformer`; the name of a model on the
            Hugging Face hub, or a folder, for a classifier; the model itself, or a function that builds one. See
            :func:`.transformer_of`.
        num_classes: number of classes; None: as many as the data have.
        train_head: train and average the head and other randomly initialized tensors; otherwise they keep their initial values.
        optimizer: optimizer of all trained tensors.
        steps: optimizer steps per round; None: ``epochs`` epochs.
        **kwargs: see :class:`.FederatedModule`. ``metric`` is one of the network's, such as ``f1`` or ``matthews`` of a
            classifier, or one of ``metrics``; None: the network's first.
    """

    weighting: Literal["examples", "uniform"] = "uniform"
    local_baseline = None
    refuses_adapters = "it puts what learns on the network itself"

    def __init__(
        self,
        backbone: TransformerFactory,
        num_classes: PositiveInt | None = None,
        train_head: bool = True,
        optimizer: OptimizerCallable = default_adamw,
        steps: NonNegativeInt | None = 10,
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, num_classes, optimizer, steps=steps, **kwargs)
        self.networks.frozen = [FrozenBackbone(backbone, transformer_of)]
        self.train_head = train_head

    # ------------------------------------------------------------------------------------------------------------ networks

    def build(self) -> None:
        """Build the network and attach the method's parameters, whose random numbers are drawn after the network's."""
        network: Transformer = self.without_adapters()
        self.backbone: Transformer = network  # type: ignore[assignment]
        heads = network.head_names()
        body = {id(p) for name, p in network.named_parameters() if name not in heads}
        self.attach()
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(id(parameter) not in body and (self.train_head or name not in heads))

    def attach(self) -> None:
        """Attach the trained parameters to ``self.backbone``. Default: none, so that only the head is trained."""

    # ------------------------------------------------------------------------------------------------------------ learning

    def trainable(self) -> list[nn.Parameter]:
        """The trained and averaged parameters."""
        return [p for name, p in self.named_parameters() if name in self._shared]

    def phases(self) -> list[Phase]:
        """One phase of ``steps`` steps, or ``epochs`` epochs, for the trained tensors."""
        return [self.local_phase("local", self.trainable(), self.client_loss)]
