"""Fine-tuning of a frozen network that all clients share in memory: something small is trained beside it."""

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
    """What methods of federated fine-tuning have in common. A method overrides :meth:`attach`, and :meth:`shared_names` if part of
    what it attaches stays with the client.

    The network is loaded once and frozen; all modules share its tensors. A head that the task adds to it is trained and averaged
    with what the method attaches, and so is whatever else the network's files lack (the pooler of a BERT that was pretrained
    without one): nobody else has what is drawn here. What is predicted, and how that is measured, is the network's affair: see
    :class:`lightning_fed.models.Transformer`.

    Args:
        backbone: a network of the transformers library: a :class:`lightning_fed.models.Transformer`; the name of a model on the
            Hugging Face hub, or a folder, for a classifier; the model itself, or a function that builds one. See
            :func:`.transformer_of`.
        num_classes: number of classes; None: as many as the data have.
        train_head: train and average the head, and what else was drawn; otherwise it stays as it was drawn.
        optimizer: of all that is trained.
        steps: optimizer steps per round; None: ``epochs`` epochs.
        **kwargs: see :class:`.FederatedModule`. ``metric`` is one that the network has, such as ``f1`` or ``matthews`` of a
            classifier, or one of those in ``metrics``; None: the network's first.
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
        """The network and what the method attaches; the latter's random numbers are drawn after the network's."""
        network: Transformer = self.without_adapters()
        self.backbone: Transformer = network  # type: ignore[assignment]
        heads = network.head_names()
        body = {id(p) for name, p in network.named_parameters() if name not in heads}
        self.attach()
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(id(parameter) not in body and (self.train_head or name not in heads))

    def attach(self) -> None:
        """Put what is trained on ``self.backbone``. Default: nothing, so that the head alone is trained."""

    # ------------------------------------------------------------------------------------------------------------ learning

    def trainable(self) -> list[nn.Parameter]:
        """What is trained and averaged."""
        shared = self.shared_names()
        return [p for name, p in self.named_parameters() if name in shared]

    def phases(self) -> list[Phase]:
        """``steps`` steps, or ``epochs`` epochs, on what is trained."""
        return [self.local_phase("local", self.trainable(), self.client_loss)]
