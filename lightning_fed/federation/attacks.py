"""Simulated attacks, for tests and benchmarks: what malicious clients send instead of their updates."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_fed.core.client_state import flatten, unflatten
from lightning_fed.core.messages import ClientUpdate
from lightning_fed.data import FederatedDataModule
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.errors import require
from lightning_fed.options import ClosedUnitInterval, NonNegativeFloat, PositiveFloat, require_positive
from lightning_fed.seeding import ATTACK
from lightning_fed.tensors import State


@dataclass(frozen=True)
class Attack(ABC):
    """Some clients are attackers, the same in all rounds. They train as usual and then send something else.

    Args:
        share: share of the eligible clients that are attackers, drawn by the seed.
    """

    share: ClosedUnitInterval = 0.2

    def __post_init__(self) -> None:
        require(0 <= self.share <= 1, f"Got share={self.share}: give a share of the clients, from 0 to 1.")

    def attackers(self, clients: Sequence[ClientInfo], seed: int) -> frozenset[int]:
        """Ids of the attackers: a function of the seed."""
        size = round(self.share * len(clients))
        require(
            0 < size < len(clients), f"attack.share is {self.share}, which is {size} of {len(clients)} clients: leave some of each."
        )
        drawn = np.random.default_rng([seed, ATTACK]).choice(len(clients), size, replace=False)
        return frozenset(clients[place].id for place in drawn)

    def poison(self, data: FederatedDataModule, attackers: Collection[int]) -> None:  # noqa: B027 - there may be nothing to do
        """Change the attackers' training data. Default: nothing."""

    @abstractmethod
    def sent(
        self, updates: Iterable[ClientUpdate], attackers: Collection[int], start: State, stream: np.random.Generator
    ) -> Iterator[ClientUpdate]:
        """A round's updates as they are sent, in the same order.

        Args:
            updates: the honestly trained updates.
            attackers: ids of the attackers.
            start: the server's state, from which all clients started.
            stream: the round's random stream.
        """


@dataclass(frozen=True)
class LabelFlip(Attack):
    """Trains on wrong labels, :math:`C - 1 - y`, and has the label counts of these."""

    def poison(self, data: FederatedDataModule, attackers: Collection[int]) -> None:
        data.flip_labels(attackers)

    def sent(
        self, updates: Iterable[ClientUpdate], attackers: Collection[int], start: State, stream: np.random.Generator
    ) -> Iterator[ClientUpdate]:
        """The updates, unchanged: the attackers trained on flipped labels."""
        yield from updates


@dataclass(frozen=True)
class UpdateAttack(Attack):
    """Sends another change of the model than the trained one."""

    knows_others: ClassVar[bool] = False
    """Whether attackers see the updates of the honest clients of the round."""

    @abstractmethod
    def change(self, own: Tensor, honest: Tensor, count: int, stream: np.random.Generator) -> Tensor:
        """What one attacker sends, as a change of the model, ``(d,)`` in float64.

        Args:
            own: its own trained change.
            honest: changes of the honest clients, ``(n, d)``, if attackers see them and there are any; else its own.
            count: number of attackers in the round, if they see the others.
            stream: the round's random stream.
        """

    def sent(
        self, updates: Iterable[ClientUpdate], attackers: Collection[int], start: State, stream: np.random.Generator
    ) -> Iterator[ClientUpdate]:
        cohort = list(updates) if self.knows_others else updates  # the first attacker may need the last update
        honest = [self._learned(update, start) for update in cohort if update.client not in attackers] if self.knows_others else []
        others = torch.stack(honest) if honest else None
        count = sum(update.client in attackers for update in cohort) if self.knows_others else 0
        for update in cohort:
            if update.client in attackers:
                own = self._learned(update, start)
                change = self.change(own, own[None] if others is None else others, count, stream)
                like = {name: tensor for name, tensor in update.state.items() if tensor.is_floating_point()}
                hostile = unflatten(flatten({name: start[name].double() for name in like}) + change, like)
                require(
                    all(bool(torch.isfinite(tensor).all()) for tensor in hostile.values()),
                    f"{self} sends numbers that are too large for {flatten(like).dtype}: choose a smaller one.",
                )
                update = replace(update, state=update.state | hostile)
            yield update

    def _learned(self, update: ClientUpdate, start: State) -> Tensor:
        """A client's change of the model, ``(d,)`` in float64."""
        parts = []
        for name, tensor in update.state.items():
            if tensor.is_floating_point():
                require(
                    name in start and tensor.shape == start[name].shape,
                    f"{type(self).__name__} attacks changes of a model, but clients send {name!r}, which is not part of it: "
                    "choose a method whose server averages models.",
                )
                parts.append((tensor.double() - start[name].double()).flatten())
        require(len(parts) > 0, f"{type(self).__name__} attacks changes of a model, but clients send none: choose another method.")
        return torch.cat(parts)


@dataclass(frozen=True)
class SignFlip(UpdateAttack):
    """Sends the trained change with the opposite sign.

    Args:
        scale: factor of the change.
    """

    scale: PositiveFloat = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(scale=self.scale)

    def change(self, own: Tensor, honest: Tensor, count: int, stream: np.random.Generator) -> Tensor:
        return -self.scale * own


@dataclass(frozen=True)
class GaussianNoise(UpdateAttack):
    """Sends Gaussian noise as the change.

    Args:
        std: standard deviation of each value.
    """

    std: PositiveFloat = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(std=self.std)

    def change(self, own: Tensor, honest: Tensor, count: int, stream: np.random.Generator) -> Tensor:
        return self.std * torch.from_numpy(stream.standard_normal(len(own)))


@dataclass(frozen=True)
class LittleIsEnough(UpdateAttack):
    r"""Sends :math:`\mu - z \sigma` of the honest changes, value by value, which is hard to detect (Baruch et al. 2019).

    Args:
        z: number of standard deviations. None: the paper's :math:`\Phi^{-1}((n - m - s) / (n - m))`, at least 0, with
            :math:`s = \lfloor n/2 + 1 \rfloor - m`, n clients and m attackers.
    """

    z: NonNegativeFloat | None = None
    knows_others = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(or_zero=True, z=self.z)

    def change(self, own: Tensor, honest: Tensor, count: int, stream: np.random.Generator) -> Tensor:
        z = little_is_enough(len(honest) + count, count) if self.z is None else self.z
        return honest.mean(dim=0) - z * honest.std(dim=0, correction=min(1, len(honest) - 1))


@dataclass(frozen=True)
class InnerProduct(UpdateAttack):
    r"""Sends :math:`-\tau \mu` of the honest changes, opposite to their mean (Xie et al. 2020).

    Args:
        tau: :math:`\tau`.
    """

    tau: PositiveFloat = 1.0
    knows_others = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(tau=self.tau)

    def change(self, own: Tensor, honest: Tensor, count: int, stream: np.random.Generator) -> Tensor:
        return -self.tau * honest.mean(dim=0)


def little_is_enough(clients: int, attackers: int) -> float:
    """The paper's z; see :class:`LittleIsEnough`. 0 if the attackers are a majority."""
    honest, supporters = clients - attackers, clients // 2 + 1 - attackers
    share = (honest - supporters) / honest
    return max(0.0, NormalDist().inv_cdf(share)) if 0 < share < 1 else 0.0
