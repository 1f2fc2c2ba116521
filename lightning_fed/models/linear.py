"""A linear model, for rows of numbers."""

from contextlib import nullcontext

from torch import Tensor, nn

from lightning_fed.models.backbone import Backbone
from lightning_fed.options import NonNegativeInt, PositiveInt
from lightning_fed.seeding import isolated, seed_torch


class LinearModel(Backbone):
    """One linear layer, the head; input ``(B, …)`` of ``inputs`` numbers per example. Depending on the task it is logistic
    regression, Cox's model or linear regression.

    Args:
        num_classes: outputs.
        inputs: numbers per example.
        seed: its weights are PyTorch's right after ``torch.manual_seed(seed)``, as in published comparisons (FLamby);
            all clients then start with the same weights. None: they come from the run's random stream.
    """

    def __init__(self, num_classes: PositiveInt = 1, inputs: PositiveInt = 10, seed: NonNegativeInt | None = None) -> None:
        super().__init__()
        with nullcontext() if seed is None else isolated():
            if seed is not None:
                seed_torch(seed)
            self.head = nn.Linear(inputs, num_classes)

    def encode(self, x: Tensor, cut: str = "features") -> Tensor:
        return x.flatten(1)
