"""Vision transformers of the transformers library."""

from typing import Any

from torch import Tensor
from torch.nn.functional import interpolate

from lightning_fed.models.transformer import TransformerClassifier


class VisionTransformer(TransformerClassifier):
    """An image classifier: pretrained body, new head. Images are resized on the batch to the size that the network was made for.

    Args:
        num_classes: outputs of the head.
        name: see :class:`lightning_fed.models.Transformer`.
        config: see :class:`lightning_fed.models.Transformer`; ``model_type: vit`` for one.
        attention: see :class:`lightning_fed.models.Transformer`.
    """

    auto_class = "AutoModelForImageClassification"

    def __init__(
        self,
        num_classes: int = 10,
        name: str | None = None,
        config: dict[str, Any] | None = None,
        attention: str | None = None,
    ) -> None:
        # A pretrained head for other classes is replaced by a new one, as the task has it.
        pretrained = {} if name is None else {"ignore_mismatched_sizes": True}
        super().__init__(num_classes, name, config, attention, **pretrained)

    def forward(self, images: Tensor) -> Tensor:  # type: ignore[override]
        """Logits ``(B, num_classes)`` of images ``(B, C, H, W)``."""
        size = self.network.config.image_size
        if images.shape[-2:] != (size, size):
            images = interpolate(images, (size, size), mode="bilinear", antialias=True)
        logits: Tensor = self.network(pixel_values=images).logits
        return logits
