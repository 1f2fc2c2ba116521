"""Vision transformers on whose blocks something is put."""

from functools import partial

import torch
from tiny import TINY_VIT
from torch import Tensor

from lightning_fed.models import VisionTransformer

strong = partial(VisionTransformer, config=TINY_VIT | {"initializer_range": 0.5})
"""With weights so large that all parts of it matter."""

VIT_SMALL = {"model_type": "vit", "hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}
vit_small = partial(VisionTransformer, config=VIT_SMALL)


def images(number: int = 5) -> Tensor:
    return torch.randn(number, 3, 4, 4)
