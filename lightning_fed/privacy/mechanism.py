"""What differential privacy of clients and that of examples have in common."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from jsonargparse.typing import PositiveFloat

from lightning_fed.core.server import Privacy
from lightning_fed.errors import require
from lightning_fed.options import Fraction, require_positive


class Mechanism(Privacy):
    """A :class:`.Privacy` whose cost is known."""

    @abstractmethod
    def epsilon(self, rounds: int) -> float:
        """ε of the first ``rounds`` rounds; infinite without noise."""

    @abstractmethod
    def forecast(self, values: int, rounds: int) -> str:
        """What to expect of a run, in one line.

        Args:
            values: how many numbers the server's state has.
            rounds: how many there will be.
        """


@dataclass(frozen=True, kw_only=True)
class DifferentialPrivacy(ABC):
    """What is to be private, and at which cost.

    Args:
        delta: δ.
        epsilon: ε; or give ``noise_multiplier``.
        noise_multiplier: z.
    """

    delta: Fraction
    epsilon: PositiveFloat | None = None
    noise_multiplier: float | None = None

    @abstractmethod
    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        require(0 < self.delta < 1, f"Got delta={self.delta}: give a number above 0 and below 1.")
        require(
            (self.epsilon is None) != (self.noise_multiplier is None),
            f"Got epsilon={self.epsilon} and noise_multiplier={self.noise_multiplier}: give one of them.",
        )
        require_positive(epsilon=self.epsilon)
        require_positive(or_zero=True, noise_multiplier=self.noise_multiplier)
