"""The partition in which clients hold a few examples of a few classes."""

from dataclasses import dataclass, replace

import numpy as np

from lightning_fed.data.partition.base import Partitioner
from lightning_fed.data.partition.pools import Indices
from lightning_fed.errors import require
from lightning_fed.options import PositiveInt


@dataclass(frozen=True)
class NWayKShot(Partitioner):
    r"""A client :math:`i` holds :math:`k_i` examples of each of :math:`n_i` classes, few in all; most of the pool is not used.

    The protocol of FedProto (Tan et al., AAAI 2022, arXiv:2105.00243), in which clients differ in the number of classes, in the
    classes and in the number of examples: :math:`n_i` and :math:`k_i` are drawn uniformly, the classes without replacement. No two
    clients share an example. In a separate test pool every client has ``test_shots`` examples of each of its classes: use it with
    ``split: official``. (FedProto's code takes examples in the order of the files; this draws them.)

    Args:
        ways: minimum and maximum number of classes. FedProto's :math:`n = 3, 4, 5` are ``[2, 5]``, ``[2, 6]`` and
            ``[3, 7]``.
        shots: minimum and maximum number of examples per class of a client, in the training pool. FedProto's
            :math:`k = 100` is ``[99, 100]`` on MNIST.
        test_shots: number of examples per class of a client in a separate test pool.
    """

    ways: tuple[PositiveInt, PositiveInt]
    shots: tuple[PositiveInt, PositiveInt] = (100, 100)
    test_shots: PositiveInt = 40

    def __post_init__(self) -> None:
        for name, ends in {"ways": self.ways, "shots": self.shots}.items():
            fine = len(ends) == 2 and 1 <= ends[0] <= ends[1]
            require(fine, f"NWayKShot got {name}={list(ends)}: give the smallest and the largest number, from 1.")
        require(self.test_shots >= 1, f"NWayKShot got test_shots={self.test_shots}: give a whole number from 1.")

    def for_test_pool(self) -> "NWayKShot":
        """The same classes with ``test_shots`` examples each."""
        return replace(self, shots=(self.test_shots, self.test_shots))

    def split(self, members: list[Indices], num_clients: int, rng: np.random.Generator) -> list[Indices]:
        most = self.ways[1]
        require(
            most <= len(members),
            f"NWayKShot got ways={list(self.ways)}, but the data have {len(members)} classes: set it to at most that.",
        )
        ways = rng.integers(self.ways[0], most + 1, num_clients)
        classes = [rng.permutation(len(members))[:count] for count in ways]
        shots = rng.integers(self.shots[0], self.shots[1] + 1, num_clients)
        parts: list[list[Indices]] = [[] for _ in range(num_clients)]
        taken = np.zeros(len(members), dtype=np.int64)
        for part, held, count in zip(parts, classes, shots, strict=True):
            for label in held:
                part.append(members[label][taken[label] : taken[label] + count])
                taken[label] += count
        for asked, indices in zip(taken.tolist(), members, strict=True):
            require(
                asked <= len(indices),
                f"NWayKShot asks for {asked} examples of a class that has {len(indices)}: lower num_clients, `ways` or `shots` "
                "(for the test pool of an official split: `test_shots`), or give more data.",
            )
        return [np.concatenate(pieces) for pieces in parts]
