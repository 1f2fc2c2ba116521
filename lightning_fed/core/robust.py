"""Robust aggregation rules: they combine a round's updates when some may be faulty or malicious."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_fed.core.client_state import RoundState, Vectors, flatten, mixtures, squared_distances, unflatten
from lightning_fed.options import NonNegativeInt, PositiveFloat, PositiveInt, require_from, require_positive
from lightning_fed.tensors import State

log = logging.getLogger(__name__)

VECTOR, REST = "vector", "rest"
"""The part of an update that a rule aggregates, and the rest, as one vector each."""


class Aggregation(ABC):
    """Combines a round's updates into one state, all with the same weight, because an attacker can claim any number of examples.

    The trainable part of each update becomes one vector. Buffers (batch-norm statistics, counters) have units of their own, which
    would dominate the parameters: the rule takes the median of each of their entries. Vectors are stored where the run keeps what
    arrives within a round: in memory up to its limit, then on disk.
    """

    @property
    def least(self) -> int:
        """Number of updates that the rule needs."""
        return 1

    @abstractmethod
    def merge(self, vectors: Vectors, start: Tensor) -> Tensor:
        """Merge n vectors into one, ``(d,)`` in float64.

        Args:
            vectors: the clients' vectors, in client order.
            start: the server's vector, ``(d,)``.
        """

    def arriving(self, vector: Tensor, start: Tensor) -> Tensor:
        """What is stored of an update's vector when it arrives. Default: all of it."""
        return vector

    def combine(self, updates: Iterable[tuple[State, float]], state: State, store: RoundState, buffers: Collection[str]) -> State:
        """A :data:`.Combine` that also gets a store for updates and the names of buffers. Empty if too few updates arrive."""
        store.clear()
        learned, others, clients = State(), State(), 0
        for clients, (update, _) in enumerate(updates, start=1):
            learned = {name: tensor for name, tensor in update.items() if tensor.is_floating_point() and name not in buffers}
            others = {name: tensor for name, tensor in update.items() if name not in learned}
            start = _vector({name: state[name] for name in learned})
            parts = {VECTOR: self.arriving(_vector(learned), start)}
            if others:
                parts[REST] = torch.cat([tensor.double().flatten() for tensor in others.values()])
            store.put(clients, parts, 0)
        if clients < self.least:
            if clients:
                log.warning(f"{type(self).__name__} got {clients} updates and needs {self.least}: the server stays as it was.")
            return {}
        everybody = range(1, clients + 1)
        merged = self.merge(Vectors(store, VECTOR, everybody, len(start)), start)
        combined = unflatten(merged, learned)
        if others:
            rest = Vectors(store, REST, everybody, sum(tensor.numel() for tensor in others.values()))
            combined |= unflatten(_lower_median(rest), others)
        store.clear()
        return combined


@dataclass(frozen=True)
class Median(Aggregation):
    """The median of each value (Yin et al. 2018); with an even number of updates, the mean of the two middle values."""

    def merge(self, vectors: Vectors, start: Tensor) -> Tensor:
        def middle(ordered: Tensor) -> Tensor:
            return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2

        return torch.cat([middle(_sorted(vectors, *block)) for block in vectors.blocks()])


@dataclass(frozen=True)
class TrimmedMean(Aggregation):
    """The mean of each value without its smallest and largest values (Yin et al. 2018).

    Args:
        cut: number of values to drop on either side: as many as there are attackers.
    """

    cut: NonNegativeInt = 1

    def __post_init__(self) -> None:
        require_from(0, cut=self.cut)

    @property
    def least(self) -> int:
        return 2 * self.cut + 1

    def merge(self, vectors: Vectors, start: Tensor) -> Tensor:
        last = len(vectors.clients) - self.cut
        return torch.cat([_sorted(vectors, *block)[self.cut : last].mean(dim=0) for block in vectors.blocks()])


@dataclass(frozen=True)
class MultiKrum(Aggregation):
    r"""The mean of the updates that are nearest to their neighbours (Blanchard et al. 2017).

    The score of an update is the sum of its squared distances to its :math:`n - f - 2` nearest neighbours. Ties go to the client
    with the lowest id.

    Args:
        attackers: :math:`f`, the assumed maximum number of attackers.
        keep: number of updates to average. None: :math:`n - f`.
    """

    attackers: NonNegativeInt = 1
    keep: PositiveInt | None = None

    def __post_init__(self) -> None:
        require_from(0, attackers=self.attackers)
        require_from(1, keep=self.keep)

    @property
    def least(self) -> int:
        """:math:`2f + 3`, the paper's condition."""
        return max(2 * self.attackers + 3, self.keep or 0)

    def merge(self, vectors: Vectors, start: Tensor) -> Tensor:
        count = len(vectors.clients)
        scores = krum_scores(squared_distances(vectors, range(count), about=start), self.attackers)
        best = np.argsort(scores.numpy(), kind="stable")[: self.keep or count - self.attackers]
        weights = torch.zeros(1, count, dtype=torch.float64)
        weights[0, best] = 1 / len(best)
        return mixtures(vectors, weights, torch.float64, about=start)[0]


def krum_scores(distances: Tensor, attackers: int) -> Tensor:
    """Each update's sum of squared distances to its nearest neighbours, ``(n,)``.

    Args:
        distances: pairwise squared distances, ``(n, n)``.
        attackers: assumed maximum number of attackers.
    """
    neighbours = len(distances) - attackers - 2
    apart = distances.clone().fill_diagonal_(torch.inf)  # by position: equal updates have distance 0, too
    return apart.sort(dim=1).values[:, :neighbours].sum(dim=1)


class Krum(MultiKrum):
    """The single update that is nearest to its neighbours; see :class:`MultiKrum`.

    Args:
        attackers: assumed maximum number of attackers.
    """

    def __init__(self, attackers: NonNegativeInt = 1) -> None:
        super().__init__(attackers, keep=1)


@dataclass(frozen=True)
class GeometricMedian(Aggregation):
    """The point with the smallest sum of distances to all updates: RFA (Pillutla et al. 2022), by Weiszfeld's algorithm until it
    converges. It needs only the distances between updates.

    Args:
        steps: maximum number of steps.
    """

    steps: PositiveInt = 1000

    def __post_init__(self) -> None:
        require_from(1, steps=self.steps)

    def merge(self, vectors: Vectors, start: Tensor) -> Tensor:
        weights = weiszfeld(squared_distances(vectors, range(len(vectors.clients)), about=start), self.steps)
        return mixtures(vectors, weights[None], torch.float64, about=start)[0]


def weiszfeld(distances: Tensor, steps: int) -> Tensor:
    r"""The weights of n points in their geometric median, ``(n,)``.

    The squared distance of a mixture :math:`z = \sum_j w_j x_j` to :math:`x_i` is
    :math:`\sum_j w_j D_{ij} - \frac{1}{2} \sum_{jk} w_j w_k D_{jk}`.

    Args:
        distances: pairwise squared distances :math:`D`, ``(n, n)``.
        steps: maximum number of steps.
    """
    weights = torch.full((len(distances),), 1 / len(distances), dtype=torch.float64)
    nearest = 1e-12 * distances.max().sqrt()  # for points that lie on the median
    if nearest == 0:
        return weights
    for _ in range(steps):
        squared = distances @ weights - 0.5 * weights @ distances @ weights
        closeness = 1 / squared.clamp(min=0).sqrt().clamp(min=nearest)
        before, weights = weights, closeness / closeness.sum()
        if (weights - before).abs().max() < 1e-14:
            break
    return weights


@dataclass(frozen=True)
class ClippedMean(Aggregation):
    """The mean of the clients' changes, each scaled down to a maximum norm.

    Args:
        clip: maximum Euclidean norm of a change.
    """

    clip: PositiveFloat

    def __post_init__(self) -> None:
        require_positive(clip=self.clip)

    def arriving(self, vector: Tensor, start: Tensor) -> Tensor:
        change = vector.double() - start.double()
        norm = float(torch.linalg.vector_norm(change))
        return start + (change * min(1.0, self.clip / norm) if norm else change).to(vector.dtype)

    def merge(self, vectors: Vectors, start: Tensor) -> Tensor:
        count = len(vectors.clients)
        return mixtures(vectors, torch.full((1, count), 1 / count, dtype=torch.float64), torch.float64, about=start)[0]


def _vector(state: State) -> Tensor:
    """All values as one vector, in float32 or the wider dtype."""
    flat = flatten(state) if state else torch.zeros(0)
    return flat.to(torch.promote_types(flat.dtype, torch.float32))


def _sorted(vectors: Vectors, start: int, stop: int) -> Tensor:
    return torch.from_numpy(np.sort(vectors.columns(start, stop).numpy(), axis=0))  # several times as fast as torch's


def _lower_median(vectors: Vectors) -> Tensor:
    """The lower median of each value, which is one that a client sent: counters stay integers."""
    return torch.cat([_sorted(vectors, *block)[(len(vectors.clients) - 1) // 2] for block in vectors.blocks()])
