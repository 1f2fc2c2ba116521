"""The parameters of a network cut into blocks, and a gate that selects blocks."""

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_fed.nn.norms import SwitchNorm2d

Tensors = dict[str, Tensor]


class Blocks:
    r"""Every trainable parameter, flattened, in contiguous blocks of ``ceil(size / count)`` values; the last one may be smaller.

    Args:
        network: the network with the parameters.
        count: largest number of blocks per parameter.

    Attributes:
        names: of the parameters.
        sizes: values of each block, in the order of the parameters.
        first: indices of the first block of each parameter.
        groups: indices of the other blocks, those of linear layers and those of all other layers.
    """

    def __init__(self, network: nn.Module, count: int) -> None:
        linear = {id(p) for layer in network.modules() if isinstance(layer, nn.Linear) for p in layer.parameters(recurse=False)}
        self.count = count
        self.sizes: list[int] = []
        self.first: list[int] = []
        self.groups: tuple[list[int], list[int]] = ([], [])
        self._length: dict[str, int] = {}
        self._place: dict[str, slice] = {}
        learning = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
        self.names = list(learning)
        for name, parameter in learning.items():
            length = -(-parameter.numel() // min(count, parameter.numel()))
            begin = len(self.sizes)
            self.sizes += [min(length, parameter.numel() - start) for start in range(0, parameter.numel(), length)]
            self.first.append(begin)
            self.groups[id(parameter) not in linear].extend(range(begin + 1, len(self.sizes)))
            self._length[name], self._place[name] = length, slice(begin, len(self.sizes))

    def __len__(self) -> int:
        return len(self.sizes)

    def least(self, density: float) -> float:
        r"""The planned share that is always kept: :math:`s_{min} = \min(\max(1/B, 0.1), s)`."""
        return min(max(1 / self.count, 0.1), density)

    def keep(self, importance: Tensor, density: float) -> Tensor:
        r"""Select the blocks to keep: with a density of 1 all. Otherwise the first one of each parameter, so that no layer is cut
        off; and separately of linear layers and of all others, in the order of importance (in tenths; among equals the earlier
        one), each block that still fits into :math:`(s - s_{min})` times their size.

        Args:
            importance: of each block, in [0, 1], ``(L,)``.
            density: s, in (0, 1].

        Returns:
            Booleans ``(L,)``, on the CPU.
        """
        kept = torch.ones(len(self), dtype=torch.bool)
        if density == 1:
            return kept
        wide = torch.promote_types(importance.dtype, torch.float32)
        tenths = (importance.detach().to(wide) * 10).round().tolist()
        for group in self.groups:
            room = round((density - self.least(density)) * sum(self.sizes[block] for block in group))
            for block in sorted(group, key=lambda block: -tenths[block]):
                if self.sizes[block] <= room:
                    room -= self.sizes[block]
                else:
                    kept[block] = False
        return kept

    def scaled(self, parameters: Mapping[str, Tensor], by: Tensor) -> dict[str, Tensor]:
        """Parameters with each block multiplied by a number.

        Args:
            parameters: of the network, by name.
            by: ``(L,)``.
        """
        return {name: parameter * self.spread(name, by, parameter.shape) for name, parameter in parameters.items()}

    def spread(self, name: str, values: Tensor, shape: torch.Size) -> Tensor:
        """Expand a value per block to one per entry of a parameter.

        Args:
            name: of the parameter.
            values: of all blocks, ``(L,)``.
            shape: of the parameter.
        """
        own = values[self._place[name]]
        return own.unsqueeze(1).expand(-1, self._length[name]).flatten()[: shape.numel()].view(shape)

    def moved(self, parameters: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> Tensor:
        """Blocks with a changed entry: booleans ``(L,)``, on the CPU."""
        found = []
        for name in self.names:
            differs = (parameters[name] != before[name]).flatten()
            found += [block.any() for block in differs.split(self._length[name])]
        return torch.stack(found).cpu()

    def cut(self, parameters: Tensors, keep: Tensor) -> Tensors:
        """The concatenated values of the kept blocks of each parameter."""
        return {name: tensor.flatten()[self.spread(name, keep, tensor.shape).flatten()] for name, tensor in parameters.items()}

    def filled(self, parts: Tensors, keep: Tensor, rest: Tensors) -> Tensors:
        """The inverse of :meth:`cut`: parameters, with the blocks that were not kept taken from others."""
        whole = {}
        for name, part in parts.items():
            flat = rest[name].flatten().clone()
            flat[self.spread(name, keep, rest[name].shape).flatten()] = part
            whole[name] = flat.view(rest[name].shape)
        return whole

    def parts(self, parameters: Tensors, keep: Tensor) -> Tensors:
        """Tensors, on the meta device, of the shapes that :meth:`cut` gives."""
        sizes = torch.tensor(self.sizes) * keep
        counts = {name: int(sizes[self._place[name]].sum()) for name in parameters}
        return {name: torch.empty(counts[name], dtype=tensor.dtype, device="meta") for name, tensor in parameters.items()}


class Gate(nn.Module):
    """Computes the importance and scale of a network's blocks from a batch of images.

    Args:
        shape: channels, height and width of the images.
        blocks: number of blocks.
        separate_scale: whether scales have their own branch, which starts as a copy of the other one.
    """

    def __init__(self, shape: Sequence[int], blocks: int, separate_scale: bool) -> None:
        super().__init__()
        self.norm = SwitchNorm2d(shape[0])
        pixels = torch.Size(shape).numel()
        self.importance = nn.Sequential(nn.Flatten(), nn.Linear(pixels, blocks), nn.BatchNorm1d(blocks))
        self.scale = copy.deepcopy(self.importance) if separate_scale else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Importance and scale of each block, ``(L,)``, in (0, 1): means over the batch."""
        x = self.norm(x)
        importance = self.importance(x).sigmoid().mean(dim=0)
        return importance, importance if self.scale is None else self.scale(x).sigmoid().mean(dim=0)
