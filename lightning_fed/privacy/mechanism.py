"""What client-level and example-level differential privacy have in common."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from lightning_fed.core.server import Privacy
from lightning_fed.errors import require
from lightning_fed.options import Fraction, PositiveFloat, require_positive


class Mechanism(Privacy):
    """A :class:`.Privacy` part of a server with a known ε."""

    @abstractmethod
    def epsilon(self, rounds: int) -> float:
        """ε of the first ``rounds`` rounds; infinite without noise."""

    @abstractmethod
    def forecast(self, values: int, rounds: int) -> str:
        """One line about what to expect of a run.

        Args:
            values: number of values in the server's state.
            rounds: number of rounds.
        """


@dataclass(frozen=True, kw_only=True)
class DifferentialPrivacy(ABC):
    """The privacy guarantee that a run is asked for.

    Args:
        delta: δ.
        epsilon: ε; or give ``noise_multiplier``.
        noise_multiplier: z, the standard deviation of the noise over the clip norm.
    """

    delta: Fraction
    epsilon: PositiveFloat | None = None
    noise_multiplier: float | None = None

    @abstractmethod
    def __post_init__(self) -> None:
        """Check the values."""
        require(0 < self.delta < 1, f"Got delta={self.delta}: give a number above 0 and below 1.")
        require(
            (self.epsilon is None) != (self.noise_multiplier is None),
            f"Got epsilon={self.epsilon} and noise_multiplier={self.noise_multiplier}: give one of them.",
        )
        require_positive(epsilon=self.epsilon)
        require_positive(or_zero=True, noise_multiplier=self.noise_multiplier)
