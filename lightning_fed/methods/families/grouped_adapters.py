"""Clients in groups that are averaged separately, and fine-tuning in which clients with adapters of equal size form a group."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import nn

from lightning_fed.core import Broadcast, ClientInfo, ClientUpdate, FederationError, Server, State, WeightedMean
from lightning_fed.methods.families.adapter_module import AdapterModule, default_adam
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


class GroupServer(Server):
    """Keeps a state for each group of clients, and averages their updates. A group without a participant in a round keeps its
    state.

    Args:
        states: the initial states by group: a number, which is sent as the :attr:`~.Broadcast.model_size`.
        groups: each client's group, by id.
        weighting: how updates are weighted within a group; see :class:`lightning_fed.core.server.Server`.
        names: of the groups' models in metrics.
        exported: the group whose model is exported if no client is named.
    """

    def __init__(
        self,
        states: Mapping[int, State],
        groups: Mapping[int, int],
        weighting: Literal["examples", "uniform"],
        names: Mapping[int, str],
        exported: int,
    ) -> None:
        super().__init__({}, weighting)
        self.groups = groups
        self.names = names
        self.exported = exported
        self.states = dict(sorted(states.items()))
        self._hold(self.states)

    def _hold(self, states: dict[int, State]) -> None:
        self.states = states
        self.state = states[self.exported]

    def broadcast(self, client: ClientInfo) -> Broadcast:
        group = self.groups[client.id]
        return Broadcast(self.states[group], group)

    def global_models(self) -> dict[str, Broadcast]:
        return {self.names[group]: Broadcast(state, group) for group, state in self.states.items()}

    def aggregate(self, updates: Iterable[ClientUpdate]) -> dict[str, float]:
        """Merge a round's updates, each with those of its group; see :meth:`lightning_fed.core.server.Server.aggregate`."""
        means: dict[int, WeightedMean] = defaultdict(WeightedMean)
        for update in updates:
            means[self.groups[update.client]].add(update.state, self.weight(update))
        self._hold(self.states | {group: mean.result() for group, mean in means.items()})
        return {}

    def state_dict(self) -> State:
        """All states, under ``<group>/<name>``."""
        return {f"{group}/{name}": tensor for group, state in self.states.items() for name, tensor in state.items()}

    def load_state_dict(self, state: State) -> None:
        self._hold({group: {name: state[f"{group}/{name}"] for name in own} for group, own in self.states.items()})
