"""What loops in plain PyTorch have in common that are held against rounds of a federation."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fed.data import InMemory
from lightning_fed.seeding import TURN, derive_seed, seeded


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


def stripped(state: Mapping[str, Tensor], prefix: str = "backbone.") -> dict[str, Tensor]:
    """The tensors whose names begin so, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def mean_of(networks: Sequence[nn.Module]) -> dict[str, Tensor]:
    """The mean of their tensors, everybody counting the same."""
    states = [network.state_dict() for network in networks]
    return {name: (sum(state[name].double() for state in states) / len(states)).to(t.dtype) for name, t in states[0].items()}  # type: ignore[union-attr]


def fixed(network: Callable[[int], nn.Module]) -> Callable[[int], nn.Module]:
    """The network with the same initial weights for everybody."""

    def build(num_classes: int) -> nn.Module:
        with seeded(17):
            return network(num_classes)

    return build
