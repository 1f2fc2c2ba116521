"""Prompt tuning (Lester et al., EMNLP 2021, https://arxiv.org/abs/2104.08691) of vision transformers (VPT, Jia et al., ECCV 2022,
https://arxiv.org/abs/2203.12119), as in the comparison of FedHM (Section 6.4).
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch

from lightning_fed.methods.families.grouped_adapters import GroupTuning
from lightning_fed.models.transformer import TransformerFactory
from lightning_fed.nn.adapters import Prompt, prompted
from lightning_fed.options import NonNegativeInt, PositiveInt


class PromptTuning(GroupTuning):
    """Clients train prompt tokens in the blocks of a frozen vision transformer, and the server averages them.

    The p tokens follow the class token, without a position. ``"deep"``: a block's outputs for them are dropped, and the next
    block has its own p tokens. ``"shallow"``: the first block's tokens pass through the network like those of the image. In both
    cases the class is read from the class token, and a block's sequence has ``1 + N + p`` tokens with N patches.

    ``blocks * p * d`` values are trained, or ``p * d`` of shallow prompts. Deep ones with p = 16 have 73,728 on ViT-S (12 blocks,
    d = 384): FedHM's budget. p = 0 is the plain network.

    peft's prompt tuning puts its tokens before embedded texts and needs a vocabulary, which a network for images does not have, so
    the library implements these. Groups and monitored metric: see :class:`.GroupTuning`.

    Args:
        backbone: builds the network, given the number of classes: ``VisionTransformer``.
        num_classes: number of classes; None: as many as the data have.
        tokens: lengths p of the prompts; client ``k`` has entry ``k mod len(list)``. FedHM's experiments: 16, 32, 64, 128.
        depth: ``"deep"`` or ``"shallow"``.
        **kwargs: see :class:`.GroupTuning`. FedHM's experiments: Adam, lr 2e-3, one epoch, batches of 64.
    """

    def __init__(
        self,
        backbone: TransformerFactory,
        num_classes: PositiveInt | None = None,
        tokens: Sequence[NonNegativeInt] = (16,),
        depth: Literal["deep", "shallow"] = "deep",
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, sizes=tokens, num_classes=num_classes, **kwargs)
        self.depth = depth

    def attach(self) -> None:
        """Put tokens before every block, or before the first."""
        config, blocks = self.backbone.network.config, self.blocks()
        bound = math.sqrt(6 / (config.num_channels * config.patch_size**2 + config.hidden_size))  # as in the code of VPT's authors
        for place, block in enumerate(blocks if self.depth == "deep" else blocks[:1]):
            tokens = torch.empty(self.size(), config.hidden_size).uniform_(-bound, bound)
            block.prompt = Prompt(tokens, self.size() if place > 0 else 0)
            block.register_forward_pre_hook(prompted)
