"""A multilayer perceptron, for rows of numbers."""

from itertools import pairwise

from torch import Tensor, nn

from lightning_fed.models.backbone import Backbone, scaled
from lightning_fed.options import PositiveFloat, PositiveInt


class MLP(Backbone):
    """Linear layers with ReLU between them, then the head; input ``(B, …)`` of ``inputs`` numbers per example.

    Args:
        num_classes: outputs of the head.
        inputs: numbers per example.
        hidden: outputs of each hidden layer; an empty list gives a linear model. None: 64 and 64.
        width: multiplies the widths of the hidden layers; 1: no change.
    """

    def __init__(
        self,
        num_classes: PositiveInt = 10,
        inputs: PositiveInt = 10,
        hidden: list[PositiveInt] | None = None,
        width: PositiveFloat = 1.0,
    ) -> None:
        super().__init__()
        sizes = [inputs, *(scaled(size, width) for size in ([64, 64] if hidden is None else hidden))]
        self.hidden = nn.ModuleList(nn.Linear(size, following) for size, following in pairwise(sizes))
        self.head = nn.Linear(sizes[-1], num_classes)

    @property
    def factorizable(self) -> list[str]:
        return [f"hidden.{place}" for place in range(len(self.hidden))]

    def encode(self, x: Tensor, cut: str = "features") -> Tensor:
        x = x.flatten(1)
        for layer in self.hidden:
            x = layer(x).relu()
        return x


class SoftmaxMLP(MLP):
    r"""An MLP that ends in a softmax, so that the cross-entropy treats probabilities as logits: the "double softmax" of LG-FedAvg's
    code (Liang et al. 2020) and of code derived from it. Use it only to compare with their numbers: the loss cannot fall below
    :math:`\log(1 + (C - 1)/e)` of :math:`C` classes, and gradients vanish if the network is certain.

    With 784 inputs and hidden layers of 512, 256, 256 and 128, as there, it has 633,226 parameters.
    """

    def classify(self, representation: Tensor, cut: str = "features") -> Tensor:
        return self.head(representation).softmax(dim=1)
