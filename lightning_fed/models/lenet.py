"""LeNet-5 as the benchmarks of federated learning have it."""

from jsonargparse.typing import PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu

from lightning_fed.errors import FederationError, require
from lightning_fed.models.backbone import Backbone, scaled


class LeNet5(Backbone):
    """Two 5×5 convolutions of 6 and 16 filters, each with 2×2 max-pooling and ReLU, then linear layers of 120 and 84 features with
    ReLU, and the head; input ``(B, channels, image_size, image_size)``.

    62,006 parameters for colour images of 32 pixels, 44,426 for grey ones of 28. LeNet-5 (LeCun et al. 1998) had sigmoids and
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
        super().__init__()
        require(image_size >= 16, f"LeNet5 got image_size={image_size}: two convolutions and poolings need 16 pixels at least.")
        conv1, conv2, fc1, fc2 = (scaled(size, width) for size in (6, 16, 120, 84))
        pixels = ((image_size - 4) // 2 - 4) // 2
        self.image_shape = (channels, image_size, image_size)
        self.conv1 = nn.Conv2d(channels, conv1, kernel_size=5)
        self.conv2 = nn.Conv2d(conv1, conv2, kernel_size=5)
        self.fc1 = nn.Linear(conv2 * pixels**2, fc1)
        self.fc2 = nn.Linear(fc1, fc2)
        self.head = nn.Linear(fc2, num_classes)

    def encode(self, x: Tensor, cut: str = "features") -> Tensor:
        if x.shape[1:] != self.image_shape:
            raise FederationError(
                f"LeNet5 got images of shape {tuple(x.shape[1:])}, it is built for {self.image_shape}: set channels and image_size, "
                "of the data or of the network, so that they agree."
            )
        # ReLU after pooling: the same values and gradients as before it, of a quarter as many numbers.
        x = relu(max_pool2d(self.conv1(x), 2))  # (B, 6, 12, 12) of 28 pixels
        x = relu(max_pool2d(self.conv2(x), 2)).flatten(1)  # (B, 16 · 4 · 4)
        return relu(self.fc2(relu(self.fc1(x))))
