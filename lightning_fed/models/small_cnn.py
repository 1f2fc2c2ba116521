"""Networks of two convolutions for small images, as benchmarks of federated learning have them."""

from collections.abc import Callable

import torch
from jsonargparse.typing import PositiveFloat
from torch import Tensor, nn
from torch.nn.functional import dropout, max_pool2d, relu

from lightning_fed.errors import FederationError, require
from lightning_fed.models.backbone import Backbone, scaled
from lightning_fed.options import PositiveInt


class SmallCNN(Backbone):
    """Two 5×5 convolutions, each with 2×2 max-pooling and ReLU; a subclass adds linear layers and :attr:`head`. Input
    ``(B, channels, image_size, image_size)``.

    Args:
        channels: of an image.
        image_size: its height and width, at least 16.
        conv1_filters: filters of the first convolution.
        conv2_filters: filters of the second.
    """

    def __init__(self, channels: int, image_size: int, conv1_filters: int, conv2_filters: int) -> None:
        super().__init__()
        require(
            image_size >= 16, f"{type(self).__name__} got image_size={image_size}: two convolutions and poolings need 16 pixels."
        )
        self.image_shape = (channels, image_size, image_size)
        self.conv1 = nn.Conv2d(channels, conv1_filters, kernel_size=5)
        self.conv2 = nn.Conv2d(conv1_filters, conv2_filters, kernel_size=5)
        self.to(memory_format=torch.channels_last)  # convolutions follow their weights: a step takes 0.68 to 0.94 times as long
        self.conv_features = conv2_filters * (((image_size - 4) // 2 - 4) // 2) ** 2

    def convolve(self, x: Tensor, between: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """What the convolutions make of images, ``(B, conv_features)``.

        Args:
            x: the images.
            between: comes between the second convolution and its pooling.
        """
        if x.shape[1:] != self.image_shape:
            raise FederationError(
                f"{type(self).__name__} got images of shape {tuple(x.shape[1:])}, it is built for {self.image_shape}: set channels "
                "and image_size, of the data or of the network, so that they agree."
            )
        # ReLU after pooling: the same values and gradients as before it, of a quarter as many numbers.
        x = relu(max_pool2d(self.conv1(x), 2))  # (B, conv1_filters, 12, 12) of 28 pixels
        x = self.conv2(x)
        return relu(max_pool2d(x if between is None else between(x), 2)).flatten(1)  # (B, conv2_filters · 4 · 4)


class LeNet5(SmallCNN):
    """LeNet-5: convolutions of 6 and 16 filters, then linear layers of 120 and 84 features with ReLU, and the head.

    62,006 parameters for colour images of 32 pixels, 44,426 for grey ones of 28. The original (LeCun et al. 1998) had sigmoids and
    trained its pooling; this is the network of NIID-Bench (Li et al. 2022, https://arxiv.org/abs/2102.02079) and of most
    benchmarks since.

    Args:
        num_classes: outputs of the head.
        channels: of an image.
        image_size: its height and width, at least 16.
        width: multiplies all hidden numbers of filters and features.
    """

    def __init__(
        self,
        num_classes: PositiveInt = 10,
        channels: PositiveInt = 3,
        image_size: PositiveInt = 32,
        width: PositiveFloat = 1.0,
    ) -> None:
        super().__init__(channels, image_size, scaled(6, width), scaled(16, width))
        self.fc1 = nn.Linear(self.conv_features, scaled(120, width))
        self.fc2 = nn.Linear(scaled(120, width), scaled(84, width))
        self.head = nn.Linear(scaled(84, width), num_classes)

    def encode(self, x: Tensor, cut: str = "features") -> Tensor:
        return relu(self.fc2(relu(self.fc1(self.convolve(x)))))


class FedAvgCNN(SmallCNN):
    """FedAvg's CNN as PFLlib has it: convolutions of 32 and 64 filters without padding, a linear layer of 512 features with ReLU,
    and the head.

    582,026 parameters for grey images of 28 pixels, 878,538 for colour images of 32. FedAvg's paper pads its convolutions and so
    has 1,663,370.

    Args:
        num_classes: outputs of the head.
        channels: of an image.
        image_size: its height and width, at least 16.
        width: multiplies all hidden numbers of filters and features.
    """

    def __init__(
        self,
        num_classes: PositiveInt = 10,
        channels: PositiveInt = 3,
        image_size: PositiveInt = 32,
        width: PositiveFloat = 1.0,
    ) -> None:
        super().__init__(channels, image_size, scaled(32, width), scaled(64, width))
        self.fc1 = nn.Linear(self.conv_features, scaled(512, width))
        self.head = nn.Linear(scaled(512, width), num_classes)

    def encode(self, x: Tensor, cut: str = "features") -> Tensor:
        return relu(self.fc1(self.convolve(x)))


class FedProtoCNN(SmallCNN):
    """The CNN of FedProto (Tan et al., AAAI 2022), of LG-FedAvg's code and of many after it: convolutions of 10 and ``filters``
    filters, a linear layer of 50 features with ReLU, and the head; dropout of whole channels behind the second convolution and of
    features before the head, both of one half.

    21,840 parameters for grey images of 28 pixels and 20 filters. FedProto's experiment with different networks has 18, 20 and 22.

    Args:
        num_classes: outputs of the head.
        channels: of an image.
        image_size: its height and width, at least 16.
        filters: of the second convolution.
    """

    def __init__(
        self,
        num_classes: PositiveInt = 10,
        channels: PositiveInt = 3,
        image_size: PositiveInt = 32,
        filters: PositiveInt = 20,
    ) -> None:
        super().__init__(channels, image_size, 10, filters)
        self.channel_dropout = nn.Dropout2d()
        self.fc1 = nn.Linear(self.conv_features, 50)
        self.head = nn.Linear(50, num_classes)

    def encode(self, x: Tensor, cut: str = "features") -> Tensor:
        return relu(self.fc1(self.convolve(x, self.channel_dropout)))

    def classify(self, representation: Tensor, cut: str = "features") -> Tensor:
        return self.head(dropout(representation, training=self.training))
