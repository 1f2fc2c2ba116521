"""Residual networks: the shallow ones of FedCAC and FedDecomp (Wu et al. 2023, 2024), and those of FedHM (Yao et al. 2021)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet

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
        self.to(memory_format=torch.channels_last)  # convolutions follow their weights: a step takes 0.7 to 0.9 times as long

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


class SmallImageResNet(Backbone):
    """torchvision's ResNet with a stem for small images: a 3×3 convolution of stride 1 and no pooling.

    Args:
        num_classes: outputs of the head.
        blocks: basic blocks in each of the four stages.
        full_rank: leading blocks that low-rank versions leave as they are.
    """

    def __init__(self, num_classes: int, blocks: Sequence[int], full_rank: int) -> None:
        super().__init__()
        trunk = ResNet(BasicBlock, list(blocks), num_classes)
        conv = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        self.stem = nn.Sequential(conv, nn.BatchNorm2d(64), nn.ReLU())
        self.stages = nn.Sequential(trunk.layer1, trunk.layer2, trunk.layer3, trunk.layer4)
        self.head = trunk.fc
        self._low_rank_blocks = [f"stages.{stage}.{k}" for stage, count in enumerate(blocks) for k in range(count)][full_rank:]
        self.to(memory_format=torch.channels_last)

    @property
    def factorisable(self) -> list[str]:
        """Names of the 3×3 convolutions that FedHM factorises: those behind the leading blocks. Never the stem, a shortcut or the
        head.
        """
        return [f"{block}.{conv}" for block in self._low_rank_blocks for conv in ("conv1", "conv2")]

    def encode(self, x: Tensor, cut: str = "features") -> Tensor:
        return self.stages(self.stem(x)).mean(dim=(2, 3))


class ResNet18(SmallImageResNet):
    """ResNet-18 for small images: 11,173,962 parameters for 10 classes."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__(num_classes, blocks=(2, 2, 2, 2), full_rank=1)


class ResNet34(SmallImageResNet):
    """ResNet-34 for small images: 21,328,292 parameters for 100 classes."""

    def __init__(self, num_classes: int = 100) -> None:
        super().__init__(num_classes, blocks=(3, 4, 6, 3), full_rank=7)
