"""Attacks on a federation, for tests and benchmarks: what hostile clients send instead of what they learned."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import torch
from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, PositiveFloat
from torch import Tensor

from lightning_fed.core.client_state import flatten, unflatten
from lightning_fed.core.messages import ClientUpdate
from lightning_fed.data import FederatedDataModule
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.errors import require
from lightning_fed.seeding import ATTACK
from lightning_fed.tensors import State


@dataclass(frozen=True)
class Attack(ABC):
    """Some clients are hostile, the same in all rounds. They train as the method has it, and then send something else.

    Args:
        share: of the clients that may take part, drawn by the seed.
    """

    share: ClosedUnitInterval = 0.2

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
    """Sends another change of the model than was learned. Attackers know what the honest clients of their round send."""

    @abstractmethod
    def change(self, own: Tensor, honest: Tensor, count: int, stream: np.random.Generator) -> Tensor:
        """What one attacker sends, as a change, ``(d,)`` in float64.

        Args:
            own: the change that it learned.
            honest: those of the honest clients, ``(n, d)``.
            count: how many attackers there are in the round.
            stream: of the round.
        """

    def sent(
        self, updates: Iterable[ClientUpdate], attackers: Collection[int], start: State, stream: np.random.Generator
    ) -> Iterator[ClientUpdate]:
        cohort = list(updates)  # all of it: who is first may wait for what the last one sends
        attacked = [name for update in cohort[:1] for name, tensor in update.state.items() if tensor.is_floating_point()]
        for name in attacked:
            require(
                name in start and all(update.state[name].shape == start[name].shape for update in cohort),
                f"{type(self).__name__} is on changes of a model, and clients send {name!r}, which is another thing: choose a "
                "method whose server averages models.",
            )
        honest = [_change(update, start, attacked) for update in cohort if update.client not in attackers]
        others = torch.stack(honest) if honest else torch.zeros(0)
        count = len(cohort) - len(honest)
        for update in cohort:
            if update.client in attackers:
                own = _change(update, start, attacked)
                change = self.change(own, others if len(others) else own[None], count, stream)
                like = {name: update.state[name] for name in attacked}
                vector = flatten({name: start[name].double() for name in attacked}) + change
                update = replace(update, state=update.state | unflatten(vector, like))
            yield update


@dataclass(frozen=True)
class SignFlip(UpdateAttack):
    """Sends the change that it learned the other way round.

    Args:
        scale: and so many times as large.
    """

    scale: PositiveFloat = 1.0

    def change(self, own: Tensor, honest: Tensor, count: int, stream: np.random.Generator) -> Tensor:
        return -self.scale * own


@dataclass(frozen=True)
class GaussianNoise(UpdateAttack):
    """Sends noise.

    Args:
        std: its standard deviation, of each value.
    """

    std: PositiveFloat = 1.0

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

    def change(self, own: Tensor, honest: Tensor, count: int, stream: np.random.Generator) -> Tensor:
        return -self.tau * honest.mean(dim=0)


def little_is_enough(clients: int, attackers: int) -> float:
    """The paper's z; see :class:`LittleIsEnough`. A half of the clients or more may send what they like."""
    honest, supporters = clients - attackers, clients // 2 + 1 - attackers
    share = (honest - supporters) / honest
    return max(0.0, NormalDist().inv_cdf(share)) if 0 < share < 1 else 0.0


def _change(update: ClientUpdate, start: State, names: Sequence[str]) -> Tensor:
    return torch.cat([(update.state[name].double() - start[name].double()).flatten() for name in names])
