"""Residual networks: the shallow ones of FedCAC and FedDecomp (Wu et al. 2023, 2024), those of FedHM (Yao et al. 2021), and He et
al.'s thin ones for CIFAR.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock

from lightning_fed.errors import FederationError
from lightning_fed.models.backbone import Backbone, scaled
from lightning_fed.options import PositiveFloat, PositiveInt

Norm = Literal["batch", "group"]


def group_norm(channels: int) -> nn.GroupNorm:
    """Group norm with gcd(32, channels) groups, which Opacus uses in place of batch norm."""
    return nn.GroupNorm(math.gcd(32, channels), channels)


NORMS: dict[Norm, Callable[[int], nn.Module]] = {"batch": nn.BatchNorm2d, "group": group_norm}
"""Layers that normalize so many channels."""


class ShallowResNet(Backbone):
    """ImageNet's stem, then stages of one residual block each: not the CIFAR family of 6n + 2 layers.

    The stem is a 7×7 convolution of stride 2 and 3×3 max-pooling of stride 2, so that a 32×32 image reaches the first block as
    8×8. Convolutions have no bias and Kaiming-normal (fan out) weights; the last batch norm of a block is not zeroed.

    Args:
        num_classes: outputs of the head.
        stages: channels of each stage; every stage but the first halves the resolution.
        width: factor of all numbers of channels.
        norm: ``batch``, or ``group``, which has no statistics, as differential privacy requires of shared layers.
    """

    def __init__(self, num_classes: int, stages: Sequence[int], width: float, norm: Norm = "batch") -> None:
        super().__init__()
        widths = [scaled(channels, width) for channels in stages]
        first = scaled(64, width)
        self.stem = nn.Sequential(
            nn.Conv2d(3, first, kernel_size=7, stride=2, padding=3, bias=False),
            NORMS[norm](first),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
        )
        inputs = [first, *widths[:-1]]
        self.stages = nn.Sequential(
            *(_block(i, o, stride=1 if k == 0 else 2, norm=norm) for k, (i, o) in enumerate(zip(inputs, widths, strict=True)))
        )
        self.head = nn.Linear(widths[-1], num_classes)
        _initialize(self)

    @property
    def factorizable(self) -> list[str]:
        """Names of the 3×3 convolutions of all blocks but the first."""
        return [f"stages.{stage}.{conv}" for stage in range(1, len(self.stages)) for conv in ("conv1", "conv2")]

    def encode(self, x: Tensor, cut: str = "features") -> Tensor:
        return self.stages(self.stem(x)).mean(dim=(2, 3))


class ResNet8(ShallowResNet):
    """ResNet-8: stages of 64, 128 and 256 channels; 1,235,274 parameters for 10 classes."""

    def __init__(self, num_classes: PositiveInt = 10, width: PositiveFloat = 1.0, norm: Norm = "batch") -> None:
        super().__init__(num_classes, stages=(64, 128, 256), width=width, norm=norm)


class ResNet10(ShallowResNet):
    """ResNet-10: stages of 64, 128, 256 and 512 channels; 4,957,092 parameters for 100 classes."""

    def __init__(self, num_classes: PositiveInt = 100, width: PositiveFloat = 1.0, norm: Norm = "batch") -> None:
        super().__init__(num_classes, stages=(64, 128, 256, 512), width=width, norm=norm)


class SmallImageResNet(Backbone):
    """He et al.'s network of basic blocks with a stem for small images: a 3×3 convolution of stride 1 and no pooling.

    Convolutions have no bias and Kaiming-normal (fan out) weights; the last batch norm of a block is not zeroed.

    Args:
        num_classes: outputs of the head.
        blocks: basic blocks in each of the stages.
        full_rank: number of leading blocks that low-rank versions do not factorize.
        width: factor of all numbers of channels.
        norm: ``batch``, or ``group``, which has no statistics, as differential privacy requires of shared layers.
        stages: channels of each stage; the stem has those of the first, and every stage but the first halves the resolution.
    """

    def __init__(
        self,
        num_classes: int,
        blocks: Sequence[int],
        full_rank: int,
        width: float,
        norm: Norm = "batch",
        stages: Sequence[int] = (64, 128, 256, 512),
    ) -> None:
        super().__init__()
        widths = [scaled(channels, width) for channels in stages]
        conv = nn.Conv2d(3, widths[0], kernel_size=3, padding=1, bias=False)
        self.stem = nn.Sequential(conv, NORMS[norm](widths[0]), nn.ReLU())
        built, inputs = [], widths[0]
        for stage, (outputs, count) in enumerate(zip(widths, blocks, strict=True)):
            first = _block(inputs, outputs, stride=2 if stage else 1, norm=norm)
            built.append(nn.Sequential(first, *(_block(outputs, outputs, stride=1, norm=norm) for _ in range(count - 1))))
            inputs = outputs
        self.stages = nn.Sequential(*built)
        self.head = nn.Linear(widths[-1], num_classes)
        self._low_rank_blocks = [f"stages.{stage}.{k}" for stage, count in enumerate(blocks) for k in range(count)][full_rank:]
        _initialize(self)

    @property
    def factorizable(self) -> list[str]:
        """Names of the 3×3 convolutions after the leading blocks, without the stem, shortcuts and the head."""
        return [f"{block}.{conv}" for block in self._low_rank_blocks for conv in ("conv1", "conv2")]

    def encode(self, x: Tensor, cut: str = "features") -> Tensor:
        return self.stages(self.stem(x)).mean(dim=(2, 3))


class ResNet18(SmallImageResNet):
    """ResNet-18 for small images: 11,173,962 parameters for 10 classes."""

    def __init__(self, num_classes: PositiveInt = 10, width: PositiveFloat = 1.0, norm: Norm = "batch") -> None:
        super().__init__(num_classes, blocks=(2, 2, 2, 2), full_rank=1, width=width, norm=norm)


class ResNet34(SmallImageResNet):
    """ResNet-34 for small images: 21,328,292 parameters for 100 classes."""

    def __init__(self, num_classes: PositiveInt = 100, width: PositiveFloat = 1.0, norm: Norm = "batch") -> None:
        super().__init__(num_classes, blocks=(3, 4, 6, 3), full_rank=7, width=width, norm=norm)


class CIFARResNet(SmallImageResNet):
    """He et al.'s thin networks for CIFAR: 6n + 2 layers in three stages of 16, 32 and 64 channels. For 10 classes 78,042
    parameters at depth 8, and 272,474 at depth 20.

    If the resolution changes, the shortcut is a 1×1 convolution (their option B); their experiments on CIFAR have shortcuts
    without parameters (option A).

    Args:
        num_classes: outputs of the head.
        depth: 6n + 2; the paper: 20, 32, 44, 56 and 110.
        width: factor of all numbers of channels.
        norm: ``batch``, or ``group``, which has no statistics, as differential privacy requires of shared layers.
    """

    def __init__(
        self, num_classes: PositiveInt = 10, depth: PositiveInt = 20, width: PositiveFloat = 1.0, norm: Norm = "batch"
    ) -> None:
        count, rest = divmod(depth - 2, 6)
        if rest or count < 1:
            raise FederationError(f"depth is {depth}: give 6n + 2, such as 8, 14 or 20.")
        super().__init__(num_classes, blocks=(count,) * 3, full_rank=1, width=width, norm=norm, stages=(16, 32, 64))


def _block(in_channels: int, out_channels: int, stride: int, norm: Norm) -> BasicBlock:
    shortcut = None
    if stride != 1 or in_channels != out_channels:
        shortcut = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, kernel_size=1, stride=stride, bias=False), NORMS[norm](out_channels)
        )
    return BasicBlock(in_channels, out_channels, stride, shortcut, norm_layer=NORMS[norm])


def _initialize(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    # Convolutions follow the memory format of their weights: channels-last, a step takes 0.7 to 0.9 times as long. Very narrow
    # shortcuts are left out: on CPUs with AVX-512, oneDNN (3.13, in torch 2.15) writes out of bounds in the weight gradient of
    # 1×1 convolutions of stride 2 with fewer than 16 input channels on large images.
    shortcuts = [layer for layer in network.modules() if isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1)]
    if all(layer.in_channels >= 16 for layer in shortcuts):
        network.to(memory_format=torch.channels_last)
