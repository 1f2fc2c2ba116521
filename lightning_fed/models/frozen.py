"""A network that is in memory once for all its users."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Generic, Self, TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_fed.errors import FederationError
from lightning_fed.models.adapters import inside, named
from lightning_fed.models.backbone import Backbone
from lightning_fed.models.factory import name_of
from lightning_fed.models.pretrained import backbone_of
from lightning_fed.models.transformer import Transformer
from lightning_fed.nn.learn_in_float32 import learn_in_float32

Network = TypeVar("Network", bound=Backbone | Transformer)
Module = TypeVar("Module", bound=nn.Module)


class FrozenBackbone(Generic[Network]):
    """Loads a network once and returns copies that share all its parameters except the trainable ones: those of the head and
    of further layers. Frozen batch norm keeps its statistics, too: its layers are marked ``is_frozen``.

    Args:
        given: builds the network, or is one.
        make: builds a network from ``given`` and a number of classes.
        learning: names, or endings of names, of further trainable layers.
    """

    def __init__(self, given: Any, make: Callable[[Any, int], Any] = backbone_of, learning: Sequence[str] = ()) -> None:
        self.given, self.make, self.learning = given, make, learning
        self._network: Network | None = None

    def load(self, num_classes: int) -> Network:
        """The network itself, built at the first call.

        Raises:
            FederationError: if there is no such layer, or a trainable layer shares its weights with a frozen one.
        """
        if self._network is None:
            self._network = self.make(self.given, num_classes)
            learning = self._learning_names(self._network)
            for name, parameter in self._network.named_parameters():
                parameter.requires_grad_(name in learning)
            learn_in_float32(self._network)
            for layer in self._network.modules():
                if isinstance(layer, _BatchNorm) and not any(p.requires_grad for p in layer.parameters()):
                    layer.is_frozen = True  # type: ignore[assignment]
        return self._network

    def copy(self, num_classes: int) -> Network:
        """A network with the shared, frozen body and its own trainable head."""
        return copy_learning(self.load(num_classes))

    def fresh(self, given: Any = None) -> Self:
        """A new object that loads or draws its network again, or one for another given network."""
        return type(self)(self.given if given is None else given, self.make, self.learning)

    def _learning_names(self, network: Network) -> set[str]:
        learning = network.head_names() if isinstance(network, Transformer) else network.task_names()
        own = {id(p) for layer in named(inside(network), self.learning).values() for p in layer.parameters()}
        names = [name for name, p in network.named_parameters(remove_duplicate=False) if id(p) in own]
        layers = {name.rpartition(".")[0] for name in names}
        saved = tuple(f".{ending}" for ending in self.learning)
        if tied := [layer for layer in sorted(layers) if not _within(layer, saved)]:
            raise FederationError(
                f"modules_to_save has {' and '.join(self.learning)}, which shares weights with {tied[0]} of {name_of(network)}, "
                "so that both would be trained: leave it out."
            )
        return learning | set(names)


def copy_learning(network: Module) -> Module:
    """A copy that shares with the network all parameters that require no gradients."""
    frozen: dict[int, Any] = {id(parameter): parameter for parameter in network.parameters() if not parameter.requires_grad}
    return copy.deepcopy(network, memo=frozen)


def _within(layer: str, endings: tuple[str, ...]) -> bool:
    """Whether the name of a layer, or of a module that contains it, has this ending."""
    parts = layer.split(".")
    return any(f".{'.'.join(parts[:end])}".endswith(endings) for end in range(1, len(parts) + 1))


def is_frozen(layer: nn.Module) -> bool:
    """Whether a layer's statistics are frozen with its weights."""
    return getattr(layer, "is_frozen", False)
