"""Builds the networks of a method's clients."""

from collections.abc import Iterable
from math import lcm
from typing import Any, Self

from torch import nn

from lightning_fed.errors import FederationError
from lightning_fed.models.adapters import Adapters
from lightning_fed.models.backbone import Backbone, Backbones, Wrapped
from lightning_fed.models.frozen import FrozenBackbone
from lightning_fed.models.pretrained import backbone_of, with_weights
from lightning_fed.nn.learn_in_float32 import learn_in_float32
from lightning_fed.tensors import State


class Networks:
    """Builds networks; with adapters, on a frozen network that is in memory once.

    Args:
        backbone: factory of the clients' networks, one or a list; see :class:`.FederatedModule`.
        adapters: train these instead of the networks; None: train the whole networks.
        method: the class of the method, for errors.

    Raises:
        FederationError: for backbones or adapters that the method does not support.
    """

    def __init__(self, backbone: Backbones, adapters: Adapters | None, method: Any) -> None:
        self.factories: list[Any] = backbone if isinstance(backbone, list) else [backbone]
        if not self.factories:
            raise FederationError("backbone is an empty list: name at least one network.")
        if len(self.factories) > 1 and not method.heterogeneous:
            raise FederationError(
                f"{method.__name__} got {len(self.factories)} different backbones, but it averages their weights: give one "
                "backbone, or use a method for heterogeneous models (PFedLoRA, LGFedAvg, Standalone)."
            )
        if adapters and method.refuses_adapters:
            raise FederationError(
                f"{method.__name__} got adapters, but {method.refuses_adapters}: leave adapters out, or choose another method, "
                "such as FedAvg."
            )
        if adapters and len(ranks := adapters.ranks) != 1:
            if not ranks or not method.heterogeneous:
                raise FederationError(
                    f"adapters have r={ranks}, but {method.__name__} averages them: give one rank, or use a method that merges "
                    "different ones (FlexLoRA, FLoRA, HETLoRA) or for heterogeneous models (Standalone, LGFedAvg, FedProto)."
                )
            self.factories = [self.factories[k % len(self.factories)] for k in range(lcm(len(ranks), len(self.factories)))]
        self.adapters = adapters
        self.frozen: list[FrozenBackbone[Any]] = []
        self.add(self.factories)

    def add(self, factories: Iterable[Any]) -> None:
        """Let further networks, besides the clients', have adapters, if adapters are used."""
        if self.adapters:
            new = {id(given): given for given in factories if all(given is not frozen.given for frozen in self.frozen)}
            self.frozen += [FrozenBackbone(given, learning=self.adapters.modules_to_save or ()) for given in new.values()]

    def new(self, given: Any, num_classes: int, place: int = 0) -> Backbone:
        """A network with its own initial weights; with adapters, only those of the adapters and heads are its own.

        Args:
            given: its factory.
            num_classes: its outputs.
            place: index of the client's entry in ``factories`` and in the ranks.
        """
        network: Backbone
        if self.adapters is None:
            network = backbone_of(given, num_classes)
            learn_in_float32(network)  # before a method copies its values
        else:
            network = self.without_adapters(given, num_classes)
            self.adapters.add_to(network, place=place)
        return network

    def without_adapters(self, given: Any, num_classes: int) -> Any:
        """The frozen network, before anything is attached to it."""
        [frozen] = [frozen for frozen in self.frozen if frozen.given is given]
        return frozen.copy(num_classes)

    @property
    def num_outputs(self) -> int | None:
        """Number of outputs of an existing network; None for a factory."""
        given = self.factories[0]
        if not isinstance(given, nn.Module):
            return None
        return (given if isinstance(given, Backbone) else Wrapped(None, lambda: given)).num_outputs

    def load(self, num_classes: int) -> None:
        """Load, or draw, the frozen networks, if this has not been done."""
        for frozen in self.frozen:
            frozen.load(num_classes)

    def fresh(self, factories: list[Any] | None = None) -> Self:
        """A copy that loads or draws its networks anew, or has other networks for the clients."""
        copied = object.__new__(type(self))
        copied.factories, copied.adapters = factories or self.factories, self.adapters
        others = {id(old): new for old, new in zip(self.factories, copied.factories, strict=True)}
        copied.frozen = [frozen.fresh(others.get(id(frozen.given))) for frozen in self.frozen]
        return copied

    def with_weights(self, network: State, num_classes: int, what: str) -> Self:
        """A copy whose networks start from the given weights; see :meth:`.FederatedModule.with_initial_weights`."""
        make = self.frozen[0].make if self.frozen else backbone_of
        made = {id(given): with_weights(make(given, num_classes), network, what) for given in self.factories}
        return self.fresh([made[id(given)] for given in self.factories])
