"""A pretrained network that is in memory once, whoever uses it."""

import copy

from lightning_fed.models.pretrained import transformer_of
from lightning_fed.models.transformer import Transformer, TransformerFactory


class SharedTransformer:
    """Loads a network once and hands out copies that share all of its tensors but the head's.

    Args:
        factory: builds the network, or is one.
    """

    def __init__(self, factory: TransformerFactory) -> None:
        self._factory = factory
        self._network: Transformer | None = None

    def copy(self, num_classes: int) -> Transformer:
        """A network whose body is shared and frozen and whose head is its own and is not."""
        if self._network is None:
            self._network = transformer_of(self._factory, num_classes)
            heads = self._network.head_names()
            for name, parameter in self._network.named_parameters():
                parameter.requires_grad_(name in heads)
        shared = {id(parameter): parameter for parameter in self._network.parameters() if not parameter.requires_grad}
        return copy.deepcopy(self._network, memo=shared)
