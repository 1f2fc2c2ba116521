"""The narrow base of every network that a method can train."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping

from torch import Tensor, nn

from lightning_fed.errors import FederationError


class Backbone(nn.Module, ABC):
    """A classifier that can be cut in two: an encoder and what follows it.

    Methods share one side of a cut, replace the head, or attach a branch to the representation at the cut. A subclass sets
    :attr:`head` and implements :meth:`encode` for the default cut ``"features"``, the input of the head.

    Some methods ask for more. A network that can be made narrower takes ``width`` (1: as it is) as an argument and multiplies
    all hidden numbers of channels by it. One that can be factorised names the layers in :attr:`factorisable`.

    Attributes:
        head: the classifier, ``Linear(feature_dim, num_classes)``.
    """

    head: nn.Linear

    export_prefix = ""
    """What names of tensors begin with here and not where an export is used: the way to a network of another library."""

    @property
    def factorisable(self) -> list[str]:
        """Names of the layers that low-rank versions of the network factorise. Default: none."""
        return []

    def last_layers(self, count: int) -> set[str]:
        """Names of the tensors in the last layers: modules with parameters, of sequences and lists those in them, so that a
        residual block is one. The head is the last.

        Args:
            count: how many, from 1 to all of them.

        Raises:
            FederationError: for more than there are, and for a network that does not end in its head.
        """
        if count == 1:
            return self.head_names()
        layers = list(_in_a_row(self, ""))
        if self.get_submodule(layers[-1]) is not self.head:
            raise FederationError(
                f"{type(self).__name__} does not end in its head, so that its last {count} layers cannot be told: give 1, the head."
            )
        if count > len(layers):
            raise FederationError(f"The last {count} layers of {type(self).__name__} were asked for, but it has {len(layers)}.")
        return {name for name in self.state_dict() if name.startswith(tuple(f"{layer}." for layer in layers[-count:]))}

    @property
    def cuts(self) -> Mapping[str, int]:
        """Where the network can be cut, and how wide the representation is there; front to back."""
        return {"features": self.head.in_features}

    def head_names(self) -> set[str]:
        """Names of the head's parameters, within the network."""
        own = {id(p) for p in self.head.parameters()}
        return {name for name, p in self.named_parameters() if id(p) in own}

    @abstractmethod
    def encode(self, x: Tensor, cut: str = "features") -> Tensor:
        """Representation ``(B, cuts[cut])`` of the images ``x`` ``(B, C, H, W)``."""

    def classify(self, representation: Tensor, cut: str = "features") -> Tensor:
        """Logits ``(B, num_classes)`` from the representation at ``cut``."""
        return self.head(representation)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(B, num_classes)``."""
        return self.classify(self.encode(x))


def _in_a_row(module: nn.Module, prefix: str) -> Iterator[str]:
    for name, child in module.named_children():
        if type(child) in (nn.Sequential, nn.ModuleList):
            yield from _in_a_row(child, f"{prefix}{name}.")
        elif any(True for _ in child.parameters()):
            yield f"{prefix}{name}"


def scaled(channels: int, width: float) -> int:
    """Channels of a layer in a network of a relative width, rounded, at least 1."""
    return max(1, round(width * channels))


BackboneFactory = Callable[[int], Backbone]
"""Builds a network for a number of classes; a ``Backbone`` class is one."""

# The list comes first: jsonargparse cannot serialise lists for a union in which it comes second.
Backbones = list[BackboneFactory] | BackboneFactory
"""One network for all clients, or several, of which client ``k`` gets entry ``k mod len(list)``."""
