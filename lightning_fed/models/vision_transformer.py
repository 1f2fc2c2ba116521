"""Vision transformers of the transformers library."""

from typing import Any, cast

from torch import Tensor, nn
from torch.nn.functional import interpolate

from lightning_fed.errors import FederationError
from lightning_fed.models.backbone import Backbone
from lightning_fed.models.transformer import Model, TransformerClassifier
from lightning_fed.options import PositiveInt


class VisionTransformer(Backbone, TransformerClassifier):  # type: ignore[misc]  # images are not tokenised texts
    """A vision transformer (Dosovitskiy et al., ICLR 2021) with a new head on its first token, fine-tuned as a whole like any
    backbone, or frozen with adapters. Batches of images are resized to the network's input size.

    Args:
        config: see :class:`lightning_fed.models.Transformer`; ``model_type: vit`` and, for example, the sizes of ViT-Small/16:
            ``hidden_size: 384, intermediate_size: 1536, num_attention_heads: 6``.
    """

    auto_class = "AutoModelForImageClassification"
    projections = ("q_proj", "k_proj", "v_proj", "o_proj")

    def __init__(
        self,
        num_classes: PositiveInt = 10,
        name: Model | None = None,
        config: dict[str, Any] | None = None,
        attention: str | None = None,
    ) -> None:
        # A pretrained head for other classes is replaced by a new one for the task.
        pretrained = {"ignore_mismatched_sizes": True} if isinstance(name, str) else {}
        super().__init__(num_classes, name, config, attention, **pretrained)
        if (kind := self.network.config.model_type) != "vit":
            raise FederationError(f"VisionTransformer got a network of model_type {kind!r}: give one of model_type 'vit'.")
        size, patch = self.network.config.image_size, self.network.config.patch_size
        if not (isinstance(size, int) and isinstance(patch, int) and 1 <= patch <= size):
            raise FederationError(f"config has patch_size {patch} and image_size {size}: give a patch that fits into the image.")

    @property
    def head(self) -> nn.Linear:  # type: ignore[override]
        """The classifier, as the transformers library stores it."""
        return cast(nn.Linear, self.network.classifier)

    def encode(self, x: Tensor, cut: str = "features") -> Tensor:
        """The first token after the last layer, ``(B, hidden_size)``, of images ``(B, C, H, W)``."""
        size = self.network.config.image_size
        if x.shape[-2:] != (size, size):
            x = interpolate(x, (size, size), mode="bilinear", antialias=True)
        tokens: Tensor = self.network.base_model(pixel_values=x).last_hidden_state  # (B, 1 + patches, hidden_size)
        return tokens[:, 0]
