"""Partitions of examples among clients, as pure functions (labels, clients, seed) → lists of indices."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_fed.data.partition.pools import Indices, by_class, check_classes, checked_parts, cut, finish, table_stream
from lightning_fed.errors import require
from lightning_fed.options import PositiveInt


class Partitioner:
    """Divides a pool of labelled examples among clients.

    A new partition overrides :meth:`split`, rarely :meth:`for_test_pool`; avoid overriding :meth:`__call__` or :meth:`pools`.
    ``split`` draws what describes the clients (the *table*: classes, shares, probabilities) before anything that depends on the
    number of examples, so that two pools with the same classes get the same table from one seed.

    A *natural* partition, in which the data say which client an example belongs to, only overrides :meth:`holders`.
    """

    min_examples: int | None = None
    """For natural partitions: clients with fewer examples, or without training or test examples, are left out. None: no client is
    left out, and clients that cannot be trained or tested are refused.
    """

    @property
    def is_natural(self) -> bool:
        """Whether the data say which client an example belongs to."""
        return type(self).holders is not Partitioner.holders

    def leave_out(self, least: int) -> str:
        """How clients with fewer examples, or with no training or test example, are left out; for errors."""
        return f"set the partition's min_examples to {least}"

    def holders(self, column: Callable[[str], NDArray[Any]]) -> NDArray[Any] | None:
        """Each example's client in a natural partition: a name (string or number) per example, shape (N,). Each name is a client.
        Default: None, examples are dealt to ``num_clients`` clients.

        Args:
            column: returns a column of the data by name, one value per example; see :meth:`FederatedDataModule.column`.
        """
        return None

    def __call__(self, labels: NDArray[np.int64], num_clients: int, seed: int) -> list[Indices]:
        """The sorted indices of each client's examples.

        Args:
            labels: class of each example of the pool.
            num_clients: number of clients.
            seed: non-negative; the result is a function of the arguments.
        """
        parts = self.split(by_class(labels, num_clients, seed), num_clients, table_stream(seed))
        return finish(checked_parts(parts, num_clients, len(labels), type(self).__name__))

    def pools(
        self, train_labels: NDArray[np.int64], test_labels: NDArray[np.int64], num_clients: int, seed: int
    ) -> tuple[list[Indices], list[Indices]]:
        """Divide a train and a test pool of the same classes, so that clients are tested on the classes that they train on."""
        check_classes(train_labels, test_labels)
        return self(train_labels, num_clients, seed), self.for_test_pool()(test_labels, num_clients, seed)

    def for_test_pool(self) -> "Partitioner":
        """The partitioner for a separate test pool."""
        return self

    def split(self, members: list[Indices], num_clients: int, rng: np.random.Generator) -> list[Indices]:
        """The indices of each client, in any order. Default: a random deal.

        Args:
            members: for each class that has examples, their indices in random order.
            num_clients: number of clients.
            rng: stream for all draws. Its initial state does not depend on the pool.
        """
        return np.array_split(rng.permutation(np.concatenate(members)), num_clients)


@dataclass(frozen=True)
class IID(Partitioner):
    """Every client holds a random sample of the pool. Sizes differ by at most one, and no example is left out."""

    def pools(
        self, train_labels: NDArray[np.int64], test_labels: NDArray[np.int64], num_clients: int, seed: int
    ) -> tuple[list[Indices], list[Indices]]:
        """Divide a train and a test pool, whose classes may differ."""
        return self(train_labels, num_clients, seed), self(test_labels, num_clients, seed)


@dataclass(frozen=True)
class ClassesPerClient(Partitioner):
    r"""Every client holds the same number of classes (Shamsian et al., ICML 2021; also pFedLoRA, arXiv:2310.13283).

    A class is cut into nearly equal shares, one for each client that holds it. Clients take turns and choose the classes with most
    shares left, ties at random. Differences from the authors' code: no client gets a class twice, the numbers of shares of two
    classes differ by at most one, and no share or example is left out. With fewer picks than classes, some classes are not used.

    With ``deal="random"`` and ``jitter=False`` it is the quantity-based label imbalance of NIID-Bench (Li et al. 2022,
    arXiv:2102.02079).

    Args:
        classes: number of classes of each client, :math:`k`.
        jitter: whether the shares of a class are drawn from :math:`U(0.4, 0.6)` and normalized, as in the paper, or
            equal.
        deal: how clients get their classes: ``even``, as above, or ``random``: of :math:`C` classes client :math:`i` holds
            class :math:`i \bmod C` and :math:`k-1` others, drawn independently. Some classes then have more holders than others.
    """

    classes: PositiveInt
    jitter: bool = True
    deal: Literal["even", "random"] = "even"

    def __post_init__(self) -> None:
        require(self.classes >= 1, f"ClassesPerClient got classes={self.classes}: give a whole number from 1.")
        require(self.deal in ("even", "random"), f"ClassesPerClient got deal={self.deal!r}: give even or random.")

    def split(self, members: list[Indices], num_clients: int, rng: np.random.Generator) -> list[Indices]:
        parts: list[list[Indices]] = [[] for _ in range(num_clients)]
        for indices, holders in zip(members, self._holders(len(members), num_clients, rng), strict=True):
            if not len(holders):
                continue
            require(
                len(indices) >= len(holders),
                f"A class with {len(indices)} examples cannot be shared by the {len(holders)} clients that hold it: "
                f"lower num_clients (now {num_clients}) or `classes` (now {self.classes}).",
            )
            widths = rng.uniform(0.4, 0.6, len(holders)) if self.jitter else np.ones(len(holders))
            # However small its share is, a client does hold the class.
            for client, piece in zip(holders, cut(indices, widths / widths.sum(), at_least=1), strict=True):
                parts[client].append(piece)
        return [np.concatenate(pieces) for pieces in parts]

    def _holders(self, num_classes: int, num_clients: int, rng: np.random.Generator) -> list[Indices]:
        """The clients that hold each class.

        Taking the classes with most shares first keeps the numbers of remaining shares within one of each other. With :math:`r`
        remaining clients and :math:`kr` remaining shares, at least :math:`k` classes therefore have one, so that the deal cannot
        fail.
        """
        require(
            self.classes <= num_classes,
            f"ClassesPerClient got classes={self.classes}, but the data have {num_classes}: set `classes` to "
            f"at most {num_classes}.",
        )
        held = np.zeros((num_clients, num_classes), dtype=bool)
        if self.deal == "random":
            for client, row in enumerate(held):
                own = client % num_classes
                row[own] = True
                row[rng.choice(np.delete(np.arange(num_classes), own), self.classes - 1, replace=False)] = True
        else:
            each, extra = divmod(self.classes * num_clients, num_classes)
            left = np.full(num_classes, each)
            left[rng.permutation(num_classes)[:extra]] += 1
            for row in held:
                row[np.lexsort((rng.random(num_classes), -left))[: self.classes]] = True
                left -= row
        return [np.flatnonzero(column) for column in held.T]
