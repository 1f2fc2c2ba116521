"""Fine-tuning in which clients with adapters of equal size form a group that is averaged separately."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import nn

from lightning_fed.core import ClientInfo, FederationError, Server
from lightning_fed.methods.families.adapter_module import AdapterModule, default_adam
from lightning_fed.methods.families.group_server import GroupServer
from lightning_fed.models.transformer import TransformerFactory
from lightning_fed.options import NonNegativeInt, PositiveInt


class GroupTuning(AdapterModule):
    """Base of adapter, prompt and prefix tuning of vision transformers. A method overrides :meth:`attach`, which puts
    parameters of :meth:`size` on every block.

    Tensors of different size have no mean. Clients of equal size form a group, and each group is a separate federation: all trained
    tensors, the head included, are averaged within the group, weighted by training examples (FedAvg). Clients of a group start
    from the same tensors. Adam is fresh in each round.

    ``size_<size>/…`` is each group's model on the test data of all clients, ``after/…`` each client's model on its own test data.
    Monitored: accuracy of the latter. With one size there is one model: it is called ``global``, and its accuracy on the test data
    of all clients is the monitored metric.

    Args:
        backbone: builds the network, given the number of classes: ``VisionTransformer``.
        sizes: client ``k`` has entry ``k mod len(list)``.
        num_classes: number of classes; None: as many as the data have.
        optimizer: optimizer of all trained tensors. Default: Adam, lr 2e-3.
        steps: optimizer steps per round; None: ``epochs`` epochs.
        **kwargs: see :class:`lightning_fed.methods.families.adapter_module.AdapterModule`.
    """

    weighting = "examples"

    def __init__(
        self,
        backbone: TransformerFactory,
        sizes: Sequence[int],
        num_classes: PositiveInt | None = None,
        optimizer: OptimizerCallable = default_adam,
        steps: NonNegativeInt | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, num_classes, optimizer=optimizer, steps=steps, **kwargs)
        if not sizes:
            raise FederationError(f"{type(self).__name__} got an empty list of sizes (hidden, ranks): give at least one.")
        self.sizes = list(sizes)
        if len(set(sizes)) == 1:
            self.monitor_model = "global"

    def size(self) -> int:
        """The client's size; a module without one, such as a model that no server has sent, has the largest."""
        return max(self.sizes) if self.model_size is None else int(self.model_size)

    def blocks(self, *parts: str) -> list[nn.Module]:
        """The network's blocks, first to last.

        Raises:
            FederationError: for a network without such blocks.
        """
        body = self.backbone.network.base_model
        names = {name for name, _ in body.named_modules()}
        for name in ("layers", *(f"layers.0.{part}" for part in parts)):
            if name not in names:
                raise FederationError(
                    f"{type(self).__name__} needs a network with {name!r}, which {type(body).__name__} lacks: give a "
                    "VisionTransformer whose model_type is vit, of transformers 5.9 or later."
                )
        return list(body.get_submodule("layers").children())

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        """A server with a mean for each size. This module's tensors are those of its size; the others are drawn from the running
        random stream.
        """
        seed, states = torch.initial_seed(), {self.size(): self.shared_state()}
        for size in set(self.sizes) - states.keys():
            states[size] = self.for_client(replace(clients[0], model_size=size), seed).shared_state()
        groups = {client.id: self.sizes[client.id % len(self.sizes)] for client in clients}
        names = {size: "global" if len(states) == 1 else f"size_{size}" for size in states}
        return GroupServer(states, groups, self.weighting, names, exported=max(states))
