"""Tensors by name, as buffers."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn


class BufferDict(nn.Module):
    """Copies of tensors, by name, as buffers, for a method's state in addition to its networks. They move with the module
    (device, precision), and no optimizer or phase changes them. Names may have dots, as in a state dict.

    Args:
        tensors: initial values; copied.
        persistent: whether they are entries of the state dict, which ``shared_names`` makes shared or private; otherwise
            they are in no state.
    """

    def __init__(self, tensors: Mapping[str, Tensor], persistent: bool = True) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(_spelt(name), tensor.detach().clone(), persistent)

    def __getitem__(self, name: str) -> Tensor:
        return self._buffers[_spelt(name)]  # type: ignore[return-value]

    def __contains__(self, name: str) -> bool:
        return _spelt(name) in self._buffers

    def __len__(self) -> int:
        return len(self._buffers)

    def __iter__(self) -> Iterator[str]:
        return (name.replace("/", ".") for name in self._buffers)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, self[name]) for name in self)

    def values(self) -> Iterator[Tensor]:
        return (self[name] for name in self)

    def counterparts(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters of a module that have these names, in the module's order."""
        return {name: parameter for name, parameter in module.named_parameters() if name in self}

    @torch.no_grad()
    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy values, in place, from any device. Raises :class:`KeyError` for an unknown name."""
        for name, tensor in tensors.items():
            self[name].copy_(tensor)


def _spelt(name: str) -> str:
    return name.replace(".", "/")  # a buffer's name must not have dots
