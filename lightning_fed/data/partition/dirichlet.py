"""Partitions whose class proportions are drawn from a Dirichlet distribution."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lightning_fed.data.partition.base import Partitioner
from lightning_fed.data.partition.pools import Indices, by_class, check_classes, cut, finish, table_stream
from lightning_fed.errors import FederationError, require
from lightning_fed.options import PositiveFloat, PositiveInt

MAX_DRAWS = 10
"""Number of tables that DirichletPerClass tries before it gives up."""


@dataclass(frozen=True)
class DirichletPerClient(Partitioner):
    r"""Every client holds the same number of examples, with class proportions drawn for it; clients may share examples.

    The protocol of FedCAC (Wu et al., ICCV 2023, arXiv:2309.11103; its code is the library Fling) and FedDecomp
    (arXiv:2406.19931): one :math:`Q_i \sim \mathrm{Dir}(\alpha \mathbf{1}_C)` per client, the same for both pools, and
    :math:`\lfloor nQ_{ij} + 1/2 \rfloor` examples of class :math:`j` until the client has its :math:`n`; the last class gets the
    remainder of rounding. A client draws without replacement, but every client draws from the whole pool, so that two clients may
    hold the same example: use it with ``split: official``. If a class has fewer examples than requested, the rest comes from the
    client's other classes, most likely ones first (Fling repeats examples instead).

    Args:
        alpha: concentration :math:`\alpha`; the smaller, the fewer classes a client has.
        samples: number of examples of each client in the train pool, :math:`n`.
        test_samples: number of examples of each client in the test pool.
    """

    alpha: PositiveFloat
    samples: PositiveInt = 500
    test_samples: PositiveInt = 100

    def __post_init__(self) -> None:
        _require_positive(self, "alpha", "samples", "test_samples")

    def for_test_pool(self) -> "DirichletPerClient":
        """The same proportions with ``test_samples`` examples per client."""
        return replace(self, samples=self.test_samples)

    def split(self, members: list[Indices], num_clients: int, rng: np.random.Generator) -> list[Indices]:
        sizes = np.array([len(indices) for indices in members])
        require(
            self.samples <= sizes.sum(),
            f"DirichletPerClient asks for {self.samples} examples per client from a pool of {sizes.sum()}: lower "
            "`samples` (for the test pool of an official split: `test_samples`) or give more data.",
        )
        proportions = _dirichlet(rng, self.alpha, num_clients, len(members))
        rounded = np.floor(self.samples * proportions + 0.5).astype(np.int64)
        counts = np.diff(np.minimum(np.cumsum(rounded, axis=1), self.samples), axis=1, prepend=0)
        counts[:, -1] += self.samples - counts.sum(axis=1)
        parts = []
        for row, likeliest_first in zip(counts, np.argsort(-proportions, axis=1, kind="stable"), strict=True):
            _move_overflow(row, sizes, likeliest_first)
            drawn = [rng.choice(members[j], row[j], replace=False, shuffle=False) for j in np.flatnonzero(row)]
            parts.append(np.concatenate(drawn))
        return parts


@dataclass(frozen=True)
class DirichletPerClass(Partitioner):
    r"""Every class is divided among the clients by proportions drawn for it; clients are disjoint and differ in size.

    The split of Yurochkin et al. (ICML 2019) and of most benchmarks since, often cited as the LDA split of Hsu et al.
    (arXiv:1909.06335): one :math:`\mathrm{Dir}(\alpha \mathbf{1}_N)` over the :math:`N` clients per class. It is redrawn while a
    client has too few examples, at most ten times. No example is left out.

    Args:
        alpha: concentration :math:`\alpha`; the smaller, the fewer clients hold a class.
        min_samples: minimum number of examples of each client (in a separate test pool: 1).
        balanced: whether a client that holds its even share of all examples, :math:`1/N`, gets nothing of the remaining classes, as
            in the code of Yurochkin et al. and in NIID-Bench (Li et al. 2022): sizes then differ less. If the other clients' shares
            of a class are all 0, they get equal parts of it.
    """

    alpha: PositiveFloat
    min_samples: PositiveInt = 1
    balanced: bool = False

    def __post_init__(self) -> None:
        _require_positive(self, "alpha", "min_samples")

    def split(self, members: list[Indices], num_clients: int, rng: np.random.Generator) -> list[Indices]:
        return self._divide([(members, self.min_samples)], num_clients, rng)[0]

    def pools(
        self, train_labels: NDArray[np.int64], test_labels: NDArray[np.int64], num_clients: int, seed: int
    ) -> tuple[list[Indices], list[Indices]]:
        """Divide both pools by the first table that suits both: a new table for one would give it other proportions."""
        check_classes(train_labels, test_labels)
        train, test = (by_class(labels, num_clients, seed) for labels in (train_labels, test_labels))
        divided = self._divide([(train, self.min_samples), (test, 1)], num_clients, table_stream(seed))
        return finish(divided[0]), finish(divided[1])

    def _divide(self, pools: list[tuple[list[Indices], int]], num_clients: int, rng: np.random.Generator) -> list[list[Indices]]:
        """Divide each pool, given with a client's minimum number of examples, by the first table that suits all."""
        fewest = num_clients
        for _ in range(MAX_DRAWS):
            table = _dirichlet(rng, self.alpha, len(pools[0][0]), num_clients)
            if self.balanced:  # a separate test pool is divided by the shares of the training pool
                table = _closed_when_full(table, pools[0][0])
            divided = [_by_table(members, table) for members, _ in pools]
            poor = {
                client
                for parts, (_, least) in zip(divided, pools, strict=True)
                for client, part in enumerate(parts)
                if len(part) < least
            }
            if not poor:
                return divided
            fewest = min(fewest, len(poor))
        raise FederationError(
            f"DirichletPerClass left at least {fewest} of {num_clients} clients with fewer than "
            f"min_samples={self.min_samples} examples (1 in a test pool) in each of {MAX_DRAWS} draws with "
            f"alpha={self.alpha:g}: raise `alpha`, lower num_clients or lower `min_samples`."
        )


def _by_table(members: list[Indices], table: NDArray[np.float64]) -> list[Indices]:
    pieces = [cut(indices, shares) for indices, shares in zip(members, table, strict=True)]
    return [np.concatenate(of_client) for of_client in zip(*pieces, strict=True)]


def _closed_when_full(table: NDArray[np.float64], members: list[Indices]) -> NDArray[np.float64]:
    """The shares of each class, without those of clients that earlier classes have filled. The table has one row per class and one
    column per client.
    """
    clients = table.shape[1]
    held, even, shares = np.zeros(clients, dtype=np.int64), sum(map(len, members)) / clients, np.zeros_like(table)
    for label, indices in enumerate(members):
        wanted = table[label] * (held < even)
        wanted = wanted if wanted.any() else (held < even).astype(float)
        shares[label] = wanted / wanted.sum()
        held += [len(piece) for piece in cut(indices, shares[label])]
    return shares


def _move_overflow(counts: Indices, sizes: Indices, order: Indices) -> None:
    """If more is requested of a class than it has, request the rest from the other classes, in the given order."""
    over = int(np.maximum(counts - sizes, 0).sum())
    np.minimum(counts, sizes, out=counts)
    for label in order:
        if not over:
            return
        moved = min(over, int(sizes[label] - counts[label]))
        counts[label] += moved
        over -= moved


def _dirichlet(rng: np.random.Generator, alpha: float, rows: int, columns: int) -> NDArray[np.float64]:
    """Rows of probabilities. NumPy prevents underflow for a small alpha; a huge one overflows."""
    table = rng.dirichlet(np.full(columns, alpha), size=rows)
    require(
        np.allclose(table.sum(axis=1), 1),
        f"Dirichlet proportions overflow with alpha={alpha:g}: lower `alpha` or use IID.",
    )
    return table


def _require_positive(partition: Partitioner, *names: str) -> None:
    for name in names:
        value = getattr(partition, name)
        require(value > 0, f"{type(partition).__name__} got {name}={value}: give a number above 0.")
