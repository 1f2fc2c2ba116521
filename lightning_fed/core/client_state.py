"""What a server keeps for each client, and block-wise arithmetic on it."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightning_fed.tensors import State, unpack_bits

BLOCK = 2**23
"""Maximum number of values in memory at once: 64 MiB in float64. Results depend on it in their last bits."""


class ClientStates(Protocol):
    """A state for each client that has one, kept in memory as far as there is room: the run's
    :class:`~lightning_fed.storage.client_store.ClientStore`.
    """

    def __contains__(self, client: int) -> bool: ...

    def __iter__(self) -> Iterator[int]:
        """Ids of the clients that have a state, in order."""

    def get(self, client: int) -> State:
        """The state of a client. Raises :class:`KeyError` if it has none."""

    def part(self, client: int, name: str, start: int, stop: int) -> Tensor:
        """Values ``start`` to ``stop`` of a one-dimensional tensor of a client's state, without loading the others."""

    def put(self, client: int, state: State, round: int) -> None:
        """Replace the state of a client by its state after ``round``."""


class RoundState(ClientStates, Protocol):
    """Client states that exist only within a round, and in no checkpoint."""

    def clear(self) -> None:
        """Drop all states."""


def flatten(state: State) -> Tensor:
    """All values of a state, tensor by tensor, ``(d,)``."""
    return torch.cat([tensor.flatten() for tensor in state.values()])


def unflatten(vector: Tensor, like: State) -> State:
    """The inverse of :func:`flatten`: views where possible. Names, shapes and dtypes are those of ``like``."""
    parts = vector.split([tensor.numel() for tensor in like.values()])
    return {name: part.view(tensor.shape).to(tensor.dtype) for (name, tensor), part in zip(like.items(), parts, strict=True)}


class Vectors:
    """A vector of the same length for each of several clients, loaded in blocks of columns.

    Args:
        states: the client states that hold the vectors.
        name: name of the vector in each state.
        clients: ids of the clients, in order.
        length: length of each vector.
        default: vector of clients without a state.
    """

    def __init__(self, states: ClientStates, name: str, clients: Sequence[int], length: int, default: Tensor | None = None) -> None:
        self.states = states
        self.name = name
        self.clients = list(clients)
        self.length = length
        self.default = default

    def columns(self, start: int, stop: int) -> Tensor:
        """A block of columns, ``(clients, stop - start)``, in float64."""
        block = torch.empty(len(self.clients), stop - start, dtype=torch.float64)
        for row, client in zip(block, self.clients, strict=True):
            known = client in self.states or self.default is None
            row.copy_(self.states.part(client, self.name, start, stop) if known else self.default[start:stop])  # type: ignore[index]
        return block

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Start and end of each block."""
        return _blocks(self.length, len(self.clients))


def squared_distances(vectors: Vectors, rows: Sequence[int], about: Tensor | None = None) -> Tensor:
    """Squared Euclidean distances between some of the vectors and all of them, in float64; exactly 0 if all are equal.

    Args:
        vectors: n vectors.
        rows: indices of the vectors to compare.
        about: a vector near all the others, which is subtracted to lose fewer digits. None: the first vector.

    Returns:
        ``(len(rows), n)``.
    """
    total = torch.zeros(len(rows), len(vectors.clients), dtype=torch.float64)
    for start, stop in vectors.blocks():
        block = vectors.columns(start, stop)
        block -= block[:1].clone() if about is None else about[start:stop].double()  # near all models with a common origin
        norms = _squared_norms(block)
        total += norms[list(rows), None] + norms - 2 * (block[list(rows)] @ block.T)
    return total.clamp_(min=0)


def squared_norms(vectors: Vectors) -> Tensor:
    """Squared Euclidean norms of n vectors, ``(n,)`` in float64."""
    return torch.stack([_squared_norms(vectors.columns(start, stop)) for start, stop in vectors.blocks()]).sum(dim=0)


def cosines(vectors: Vectors, rows: Sequence[int]) -> Tensor:
    """Cosines of the angles between some of the vectors and all of them; see :func:`squared_distances`."""
    norms = squared_norms(vectors)
    return (norms[rows, None] + norms - squared_distances(vectors, rows)) / 2 / (norms[rows, None] * norms).sqrt()


def _squared_norms(block: Tensor) -> Tensor:
    return torch.einsum("ij,ij->i", block, block)  # needs no block for the squares


def at_a_time(length: int) -> int:
    """Number of vectors of this length to request from :func:`mixtures` at a time: 128 MiB of float32."""
    return max(1, 4 * BLOCK // length)


def each_mixture(vectors: Vectors, weights: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """The rows of :func:`mixtures`, computed as many at a time as fit into memory."""
    for some in weights.split(at_a_time(vectors.length)):
        yield from mixtures(vectors, some, dtype)


def mixtures(vectors: Vectors, weights: Tensor, dtype: torch.dtype, about: Tensor | None = None) -> Tensor:
    """Weighted sums of all vectors, computed in float64.

    Args:
        vectors: n vectors.
        weights: weights of m sums, ``(m, n)``, in float64.
        dtype: dtype of the sums.
        about: a vector that is subtracted from all vectors and added to the sums. If the weights of a sum add up to 1, this
            changes only the rounding: the sum of vectors that all equal it is exact.

    Returns:
        ``(m, length)``.
    """
    sums = torch.empty(len(weights), vectors.length, dtype=dtype)
    for start, stop in vectors.blocks():
        block = vectors.columns(start, stop)
        if about is None:
            sums[:, start:stop] = weights @ block
        else:
            center = about[start:stop].double()
            sums[:, start:stop] = weights @ block.sub_(center) + center
    return sums


def common_bits(states: ClientStates, name: str, clients: Sequence[int]) -> Tensor:
    """Number of bits that each two clients' masks (packed by :func:`.pack_bits`) have in common; the diagonal counts each mask's.

    Returns:
        Integers ``(n, n)``.
    """
    total = torch.zeros(len(clients), len(clients), dtype=torch.int64)
    length = states.get(clients[0])[name].numel() if clients else 0
    for start, stop in _blocks(length, 8 * len(clients)):
        masks = (unpack_bits(states.part(client, name, start, stop), 8 * (stop - start)) for client in clients)
        block = torch.stack([mask.float() for mask in masks])  # sums up to 2^24 are exact in float32
        total += (block @ block.T).long()
    return total


def _blocks(length: int, width: int) -> Iterator[tuple[int, int]]:
    size = max(1, BLOCK // max(1, width))
    return ((start, min(start + size, length)) for start in range(0, length, size))
