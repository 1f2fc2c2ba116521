"""Networks of two convolutions for small images, as in benchmarks of federated learning."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, max_pool2d, relu

from lightning_fed.errors import FederationError, require
from lightning_fed.models.backbone import Backbone, scaled
from lightning_fed.options import PositiveFloat, PositiveInt


class SmallCNN(Backbone):
    """Two 5×5 convolutions, each with 2×2 max-pooling and ReLU, then linear layers with ReLU, and the head. Input
    ``(B, channels, image_size, image_size)``.

    Args:
        num_classes: outputs of the head.
        channels: of an image.
        image_size: its height and width, at least 16.
        filters: of the two convolutions.
        features: outputs of each linear layer.
        width: multiplies all hidden numbers of filters and features.
    """

    def __init__(
        self,
        num_classes: int,
        channels: int,
        image_size: int,
        filters: tuple[int, int],
        features: tuple[int, ...],
        width: float = 1.0,
    ) -> None:
        super().__init__()
        require(
            image_size >= 16, f"{type(self).__name__} got image_size={image_size}: two convolutions and poolings need 16 pixels."
        )
        self.image_shape = (channels, image_size, image_size)
        first, second = (scaled(count, width) for count in filters)
        self.conv1 = nn.Conv2d(channels, first, kernel_size=5)
        self.conv2 = nn.Conv2d(first, second, kernel_size=5)
        self.to(memory_format=torch.channels_last)  # convolutions follow their weights: a step takes 0.68 to 0.94 times as long
        self.between: nn.Module = nn.Identity()  # the second convolution and its pooling
        sizes = [second * (((image_size - 4) // 2 - 4) // 2) ** 2, *(scaled(size, width) for size in features)]
        self.linear = [f"fc{number}" for number in range(1, len(sizes))]
        for name, (size, following) in zip(self.linear, pairwise(sizes), strict=True):
            self.add_module(name, nn.Linear(size, following))
        self.head = nn.Linear(sizes[-1], num_classes)

    def encode(self, x: Tensor, cut: str = "features") -> Tensor:
        if x.shape[1:] != self.image_shape:
            raise FederationError(
                f"{type(self).__name__} got images of shape {tuple(x.shape[1:])}, it is built for {self.image_shape}: set channels "
                "and image_size, of the data or of the network, so that they agree."
            )
        # ReLU after pooling: the same values and gradients as before it, on a quarter of the numbers.
        x = relu(max_pool2d(self.conv1(x), 2))  # (B, filters[0], 12, 12) of 28 pixels
        x = relu(max_pool2d(self.between(self.conv2(x)), 2)).flatten(1)  # (B, filters[1] · 4 · 4)
        for name in self.linear:
            x = relu(self.get_submodule(name)(x))
        return x


class LeNet5(SmallCNN):
    """LeNet-5: convolutions of 6 and 16 filters, then linear layers of 120 and 84 features with ReLU, and the head.

    62,006 parameters for colour images of 32 pixels, 44,426 for grey ones of 28. The original (LeCun et al. 1998) had sigmoids and
    trained its pooling; this is the network of NIID-Bench (Li et al. 2022, https://arxiv.org/abs/2102.02079) and of most
    benchmarks since.
    """

    def __init__(
        self, num_classes: PositiveInt = 10, channels: PositiveInt = 3, image_size: PositiveInt = 32, width: PositiveFloat = 1.0
    ) -> None:
        super().__init__(num_classes, channels, image_size, (6, 16), (120, 84), width)


class FedAvgCNN(SmallCNN):
    """FedAvg's CNN as in PFLlib: convolutions of 32 and 64 filters without padding, a linear layer of 512 features with ReLU,
    and the head.

    582,026 parameters for grey images of 28 pixels, 878,538 for colour images of 32. FedAvg's paper pads its convolutions and so
    has 1,663,370.
    """

    def __init__(
        self, num_classes: PositiveInt = 10, channels: PositiveInt = 3, image_size: PositiveInt = 32, width: PositiveFloat = 1.0
    ) -> None:
        super().__init__(num_classes, channels, image_size, (32, 64), (512,), width)


class FedProtoCNN(SmallCNN):
    """The CNN of FedProto (Tan et al., AAAI 2022), of LG-FedAvg's code and of many later papers: convolutions of 10 and ``filters``
    filters, a linear layer of 50 features with ReLU, and the head; dropout of whole channels after the second convolution and of
    features before the head, both with rate 0.5.

    21,840 parameters for grey images of 28 pixels and 20 filters. FedProto's experiment with different networks has 18, 20 and 22.

    Args:
        filters: of the second convolution.
    """

    def __init__(
        self, num_classes: PositiveInt = 10, channels: PositiveInt = 3, image_size: PositiveInt = 32, filters: PositiveInt = 20
    ) -> None:
        super().__init__(num_classes, channels, image_size, (10, filters), (50,))
        self.between = nn.Dropout2d()

    def classify(self, representation: Tensor, cut: str = "features") -> Tensor:
        return self.head(dropout(representation, training=self.training))
