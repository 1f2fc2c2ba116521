"""What loops in plain PyTorch have in common that are held against rounds of a federation."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from lightning_fed.core.module import FederatedModule
from lightning_fed.data import InMemory
from lightning_fed.seeding import INITIAL, TURN, derive_seed, seeded
from lightning_fed.tensors import State


def batches(data: InMemory, client: int, round: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches that a client's turn sees."""
    client_data = data.client(client)
    client_data.order_seed = derive_seed(0, TURN, round, client)
    loader = client_data.train_dataloader()
    loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
    yield from loader


def turn_of(data: InMemory, client: int, round: int, epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of all epochs of a client's turn."""
    for epoch in range(epochs):
        yield from batches(data, client, round, epoch)


def step(optimizer: Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def learn(network: nn.Module, seen: Iterable[Any], optimizer: Callable[[Any], Optimizer]) -> None:
    """Train a network on batches, with an optimizer that is new."""
    own = optimizer(network.parameters())
    for x, y in seen:
        step(own, cross_entropy(network(x), y))


def loss_at(network: nn.Module, values: State, batch: Any) -> Tensor:
    """Cross-entropy with these values in the places of the network's own."""
    inputs, labels = batch
    return cross_entropy(functional_call(network, values, (inputs,)), labels)


def grads(loss: Tensor, point: State, graph: bool = False) -> State:
    return dict(zip(point, torch.autograd.grad(loss, list(point.values()), create_graph=graph), strict=True))


def gradient_of(module: FederatedModule, batch: Any) -> State:
    """As ``compute_gradients`` leaves it."""
    names = {id(p): name for name, p in module.named_parameters()}
    module.manual_backward = lambda loss: loss.backward()  # type: ignore[method-assign]  # there is no Trainer
    module.compute_gradients(batch)
    return {names[id(p)]: p.grad.clone() for p in module.phase.parameters if p.grad is not None}


def stripped(state: Mapping[str, Tensor], prefix: str = "backbone.") -> dict[str, Tensor]:
    """The tensors whose names begin so, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def mean_of(networks: Sequence[nn.Module]) -> dict[str, Tensor]:
    """The mean of their tensors, everybody counting the same."""
    states = [network.state_dict() for network in networks]
    return {name: (sum(state[name].double() for state in states) / len(states)).to(t.dtype) for name, t in states[0].items()}  # type: ignore[union-attr]


def drawn(method: FederatedModule) -> Any:
    """A method, built as a run with seed 0 builds it."""
    with seeded(0, INITIAL):
        method.configure_model()
    return method


def fixed(network: Callable[[int], nn.Module]) -> Callable[[int], nn.Module]:
    """The network with the same initial weights for everybody."""

    def build(num_classes: int) -> nn.Module:
        with seeded(17):
            return network(num_classes)

    return build
