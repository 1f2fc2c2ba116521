"""The shallow residual networks of FedCAC and FedDecomp (Wu et al. 2023, 2024)."""

from collections.abc import Sequence

from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock

from lightning_fed.models.backbone import Backbone


class ShallowResNet(Backbone):
    """ImageNet's stem, then stages of one residual block each: not the CIFAR family of 6n + 2 layers.

    The stem is a 7×7 convolution of stride 2 and 3×3 max-pooling of stride 2, so that a 32×32 image reaches the first block as
    8×8. Convolutions have no bias and Kaiming-normal (fan out) weights; the last batch norm of a block is not zeroed.

    Args:
        num_classes: outputs of the head.
        widths: channels of each stage; every stage but the first halves the resolution.
    """

    def __init__(self, num_classes: int, widths: Sequence[int]) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, kernel_size=7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
        )
        inputs = [64, *widths[:-1]]
        self.stages = nn.Sequential(
            *(_stage(i, o, stride=1 if k == 0 else 2) for k, (i, o) in enumerate(zip(inputs, widths, strict=True)))
        )
        self.head = nn.Linear(widths[-1], num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def encode(self, x: Tensor, cut: str = "features") -> Tensor:
        return self.stages(self.stem(x)).mean(dim=(2, 3))


def _stage(in_channels: int, out_channels: int, stride: int) -> BasicBlock:
    shortcut = None
    if stride != 1 or in_channels != out_channels:
        shortcut = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, kernel_size=1, stride=stride, bias=False), nn.BatchNorm2d(out_channels)
        )
    return BasicBlock(in_channels, out_channels, stride, shortcut)


class ResNet8(ShallowResNet):
    """ResNet-8: stages of 64, 128 and 256 channels; 1,235,274 parameters for 10 classes."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__(num_classes, widths=(64, 128, 256))


class ResNet10(ShallowResNet):
    """ResNet-10: stages of 64, 128, 256 and 512 channels; 4,957,092 parameters for 100 classes."""

    def __init__(self, num_classes: int = 100) -> None:
        super().__init__(num_classes, widths=(64, 128, 256, 512))
