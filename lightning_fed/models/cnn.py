"""The five convolutional networks of the pFedLoRA experiments (Yi et al. 2023, table of heterogeneous models)."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu

from lightning_fed.errors import FederationError
from lightning_fed.models.backbone import Backbone, scaled
from lightning_fed.options import PositiveFloat, PositiveInt


class CNN(Backbone):
    """Two 5×5 convolutions, each with ReLU and 2×2 max-pooling, then three linear layers; input ``(B, 3, 32, 32)``.

    The cuts are ``"conv"``, the flattened output of the convolutions (25 pixels of each filter), ``"fc1"``, the output of
    the first linear layer, and ``"features"``, the output of the second (500 wide in all five networks), both after ReLU.

    Args:
        num_classes: outputs of the head.
        conv2_filters: filters of the second convolution.
        fc1_width: width of the first linear layer.
        width: multiplies all hidden numbers of filters and features.
    """

    def __init__(
        self,
        num_classes: PositiveInt = 10,
        conv2_filters: PositiveInt = 32,
        fc1_width: PositiveInt = 2000,
        width: PositiveFloat = 1.0,
    ) -> None:
        super().__init__()
        first, second, fc1, fc2 = (scaled(channels, width) for channels in (16, conv2_filters, fc1_width, 500))
        self.conv1 = nn.Conv2d(3, first, kernel_size=5)
        self.conv2 = nn.Conv2d(first, second, kernel_size=5)
        self.fc1 = nn.Linear(second * 5 * 5, fc1)
        self.fc2 = nn.Linear(fc1, fc2)
        self.head = nn.Linear(fc2, num_classes)
        self.to(memory_format=torch.channels_last)  # convolutions follow their weights: a step takes 0.83 to 0.98 times as long

    @property
    def cuts(self) -> Mapping[str, int]:
        return {"conv": self.fc1.in_features, "fc1": self.fc1.out_features, **super().cuts}

    def encode(self, x: Tensor, cut: str = "features") -> Tensor:
        if x.shape[1:] != (3, 32, 32):
            raise FederationError(
                f"{type(self).__name__} got images of shape {tuple(x.shape[1:])}, it is built for (3, 32, 32): "
                "set the data's image_size to 32 or choose another backbone."
            )
        x = max_pool2d(relu(self.conv1(x)), 2)  # (B, 16, 14, 14)
        x = max_pool2d(relu(self.conv2(x)), 2).flatten(1)  # (B, conv2_filters · 25)
        return x if cut == "conv" else self._between(x, "conv", cut)

    def classify(self, representation: Tensor, cut: str = "features") -> Tensor:
        return self.head(self._between(representation, cut, "features"))

    def _between(self, x: Tensor, cut: str, end: str) -> Tensor:
        """Apply the linear layers to the representation at a cut, up to a later cut."""
        if cut == "conv":
            x, cut = relu(self.fc1(x)), "fc1"  # (B, fc1_width)
        return relu(self.fc2(x)) if (cut, end) == ("fc1", "features") else x  # (B, 500)


class CNN1(CNN):
    """CNN-1: 2,621,558 parameters for 10 classes (10.00 MiB)."""

    def __init__(self, num_classes: PositiveInt = 10, width: PositiveFloat = 1.0) -> None:
        super().__init__(num_classes, conv2_filters=32, fc1_width=2000, width=width)


class CNN2(CNN):
    """CNN-2: 1,815,142 parameters for 10 classes (6.92 MiB)."""

    def __init__(self, num_classes: PositiveInt = 10, width: PositiveFloat = 1.0) -> None:
        super().__init__(num_classes, conv2_filters=16, fc1_width=2000, width=width)


class CNN3(CNN):
    """CNN-3: 1,320,558 parameters for 10 classes (5.04 MiB)."""

    def __init__(self, num_classes: PositiveInt = 10, width: PositiveFloat = 1.0) -> None:
        super().__init__(num_classes, conv2_filters=32, fc1_width=1000, width=width)


class CNN4(CNN):
    """CNN-4: 1,060,358 parameters for 10 classes (4.05 MiB).

    The paper prints 3.81 MB, which its own layer widths cannot give; the widths, which the authors' code also uses, are kept.
    """

    def __init__(self, num_classes: PositiveInt = 10, width: PositiveFloat = 1.0) -> None:
        super().__init__(num_classes, conv2_filters=32, fc1_width=800, width=width)


class CNN5(CNN):
    """CNN-5: 670,058 parameters for 10 classes (2.56 MiB)."""

    def __init__(self, num_classes: PositiveInt = 10, width: PositiveFloat = 1.0) -> None:
        super().__init__(num_classes, conv2_filters=32, fc1_width=500, width=width)
