"""Prompt tuning (Lester et al., EMNLP 2021, https://arxiv.org/abs/2104.08691) of vision transformers (VPT, Jia et al., ECCV 2022,
https://arxiv.org/abs/2203.12119), as a comparison of FedHM (Section 6.4).
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
    """Tokens that every image gets are trained and averaged; the vision transformer is frozen.

    p tokens stand behind the class token, without a position. ``"deep"``: what a block makes of them is dropped, and the next
    block has p tokens of its own. ``"shallow"``: the first block's tokens go through the network like those of the image. Either
    way the class is read from the class token, and a block's sequence is ``1 + N + p`` long, N being the patches.

    Trained are ``blocks * p * d`` values, of shallow prompts ``p * d``. Deep ones with p = 16 have 73,728 on ViT-S (12 blocks, d =
    384): FedHM's budget. p = 0 is the plain network.

    peft's prompt tuning puts its tokens before embedded texts and needs a vocabulary, which a network of images has not; these are
    the library's own. Groups and monitored metric: see :class:`.GroupTuning`.

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
        """Tokens before every block, or before the first."""
        config, blocks = self.backbone.network.config, self.blocks()
        bound = math.sqrt(6 / (config.num_channels * config.patch_size**2 + config.hidden_size))  # as the authors of VPT have it
        for place, block in enumerate(blocks if self.depth == "deep" else blocks[:1]):
            tokens = torch.empty(self.size(), config.hidden_size).uniform_(-bound, bound)
            block.prompt = Prompt(tokens, self.size() if place > 0 else 0)
            block.register_forward_pre_hook(prompted)
