"""A network for rows of numbers."""

from collections.abc import Sequence
from itertools import pairwise

from jsonargparse.typing import PositiveFloat, PositiveInt
from torch import Tensor, nn

from lightning_fed.models.backbone import Backbone, scaled


class MLP(Backbone):
    """Linear layers with ReLU, and a linear head.

    Args:
        num_classes: outputs of the head.
        inputs: numbers per example; they may come in any shape.
        hidden: widths of the layers before the head.
        width: factor of these widths.
    """

    def __init__(
        self,
        num_classes: int = 1,
        inputs: PositiveInt = 10,
        hidden: Sequence[PositiveInt] = (64, 64),
        width: PositiveFloat = 1.0,
    ) -> None:
        super().__init__()
        widths = [inputs, *(scaled(size, width) for size in hidden)]
        layers = ([nn.Linear(i, o), nn.ReLU()] for i, o in pairwise(widths))
        self.layers = nn.Sequential(*(layer for pair in layers for layer in pair))
        self.head = nn.Linear(widths[-1], num_classes)

    @property
    def factorisable(self) -> list[str]:
        """Names of the layers behind the first."""
        return [name for name, layer in self.named_modules() if isinstance(layer, nn.Linear)][1:-1]

    def encode(self, x: Tensor, cut: str = "features") -> Tensor:
        return self.layers(x.flatten(1))
