"""Per-FedAvg on a LoRA adapter, a baseline of PF2LoRA."""

from typing import Any

from lightning_fed.methods.families.lora import LoRAModule
from lightning_fed.methods.per_fedavg import PerFedAvg
from lightning_fed.models.transformer import TransformerFactory
from lightning_fed.options import NonNegativeFloat, NonNegativeInt, PositiveInt


class PerFedAvgLoRA(PerFedAvg, LoRAModule):
    r"""A common adapter from which one gradient step leads to a good personal one: :class:`.PerFedAvg` with LoRA's defaults.

    The adapter and the head are averaged with equal weights; AdamW steps them along G. Only its moments are private between
    rounds. Monitored: the adapted model (``adapted_accuracy``); the received model is reported too (``accuracy``). PF2LoRA's
    paper does not say which of them it reports.

    Args:
        backbone: builds the network, given the number of classes: ``TransformerClassifier``. Its attention becomes ``eager`` with
            ``hessian: exact``.
        num_classes: number of classes; None: as many as the data have.
        adaptation_lr: :math:`\alpha`. PF2LoRA's paper: 1e-3 for most of GLUE, 1e-2 for CoLA.
        steps: optimizer steps per round; None: ``epochs`` epochs.
        **kwargs: see :class:`.PerFedAvg` and :class:`.LoRAModule`. PF2LoRA's paper: AdamW, lr 1e-3 or 2e-3.
    """

    def __init__(
        self,
        backbone: TransformerFactory,
        num_classes: PositiveInt | None = None,
        adaptation_lr: NonNegativeFloat = 1e-3,
        steps: NonNegativeInt | None = 10,
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, num_classes, adaptation_lr, steps=steps, **kwargs)
