"""Attacks on a federation, for tests and benchmarks: what hostile clients send instead of what they learned."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import ClassVar

import numpy as np
import torch
from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, PositiveFloat
from torch import Tensor

from lightning_fed.core.client_state import flatten, unflatten
from lightning_fed.core.messages import ClientUpdate
from lightning_fed.data import FederatedDataModule
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.errors import require
from lightning_fed.options import require_positive
from lightning_fed.seeding import ATTACK
from lightning_fed.tensors import State


@dataclass(frozen=True)
class Attack(ABC):
    """Some clients are hostile, the same in all rounds. They train as the method has it, and then send something else.

    Args:
        share: of the clients that may take part, drawn by the seed.
    """

    share: ClosedUnitInterval = 0.2

    def __post_init__(self) -> None:
        require(0 <= self.share <= 1, f"Got share={self.share}: give a share of the clients, from 0 to 1.")

    def attackers(self, clients: Sequence[ClientInfo], seed: int) -> frozenset[int]:
        """Ids of the hostile clients: a function of the seed."""
        size = round(self.share * len(clients))
        require(
            0 < size < len(clients), f"attack.share is {self.share}, which is {size} of {len(clients)} clients: leave some of each."
        )
        drawn = np.random.default_rng([seed, ATTACK]).choice(len(clients), size, replace=False)
        return frozenset(clients[place].id for place in drawn)

    def poison(self, data: FederatedDataModule, attackers: Collection[int]) -> None:  # noqa: B027 - there may be nothing to do
        """Change what they train on. Default: nothing."""

    @abstractmethod
    def sent(
        self, updates: Iterable[ClientUpdate], attackers: Collection[int], start: State, stream: np.random.Generator
    ) -> Iterator[ClientUpdate]:
        """A round's updates as they are sent, in their order.

        Args:
            updates: what was learned.
            attackers: ids of the hostile clients.
            start: the server's state, from which all started.
            stream: of the round.
        """


@dataclass(frozen=True)
class LabelFlip(Attack):
    """Trains on wrong labels: :math:`C - 1 - y`."""

    def poison(self, data: FederatedDataModule, attackers: Collection[int]) -> None:
        data.flip_labels(attackers)

    def sent(
        self, updates: Iterable[ClientUpdate], attackers: Collection[int], start: State, stream: np.random.Generator
    ) -> Iterator[ClientUpdate]:
        """What was learned of them."""
        yield from updates


@dataclass(frozen=True)
class UpdateAttack(Attack):
    """Sends another change of the model than was learned."""

    knows_others: ClassVar[bool] = False
    """Whether attackers wait for what the honest clients of their round send."""

    @abstractmethod
    def change(self, own: Tensor, honest: Tensor, count: int, stream: np.random.Generator) -> Tensor:
        """What one attacker sends, as a change, ``(d,)`` in float64.

        Args:
            own: the change that it learned.
            honest: those of the honest clients, ``(n, d)``, if attackers know them, and if there are any; else its own.
            count: how many attackers there are in the round, if they know others.
            stream: of the round.
        """

    def sent(
        self, updates: Iterable[ClientUpdate], attackers: Collection[int], start: State, stream: np.random.Generator
    ) -> Iterator[ClientUpdate]:
        cohort = list(updates) if self.knows_others else updates  # who is first may wait for what the last one sends
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
        """The change of a client, ``(d,)`` in float64."""
        parts = []
        for name, tensor in update.state.items():
            if tensor.is_floating_point():
                require(
                    name in start and tensor.shape == start[name].shape,
                    f"{type(self).__name__} is on changes of a model, and clients send {name!r}, which is another thing: choose a "
                    "method whose server averages models.",
                )
                parts.append((tensor.double() - start[name].double()).flatten())
        return torch.cat(parts)


@dataclass(frozen=True)
class SignFlip(UpdateAttack):
    """Sends the change that it learned the other way round.

    Args:
        scale: and so many times as large.
    """

    scale: PositiveFloat = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(scale=self.scale)

    def change(self, own: Tensor, honest: Tensor, count: int, stream: np.random.Generator) -> Tensor:
        return -self.scale * own


@dataclass(frozen=True)
class GaussianNoise(UpdateAttack):
    """Sends noise.

    Args:
        std: its standard deviation, of each value.
    """

    std: PositiveFloat = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(std=self.std)

    def change(self, own: Tensor, honest: Tensor, count: int, stream: np.random.Generator) -> Tensor:
        return self.std * torch.from_numpy(stream.standard_normal(len(own)))


@dataclass(frozen=True)
class LittleIsEnough(UpdateAttack):
    r"""Sends :math:`\mu - z \sigma` of the honest changes, value by value, which is hidden among them (Baruch et al. 2019).

    Args:
        z: how far off; None: the paper's :math:`\Phi^{-1}((n - m - s) / (n - m))`, :math:`s = \lfloor n/2 + 1 \rfloor - m`, of n
            clients of which m are hostile, at least 0.
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
    r"""Sends :math:`-\tau \mu` of the honest changes, against where they go (Xie et al. 2020).

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
    """The paper's z; see :class:`LittleIsEnough`. A half of the clients or more may send what they like."""
    honest, supporters = clients - attackers, clients // 2 + 1 - attackers
    share = (honest - supporters) / honest
    return max(0.0, NormalDist().inv_cdf(share)) if 0 < share < 1 else 0.0
