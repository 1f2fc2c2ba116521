"""What differential privacy of clients and that of examples have in common."""

from abc import abstractmethod

from lightning_fed.core.server import Privacy
from lightning_fed.errors import require
from lightning_fed.options import require_positive


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


def check_budget(delta: float, epsilon: float | None, noise_multiplier: float | None) -> None:
    """Refuse what is no privacy budget: exactly one of ``epsilon`` and ``noise_multiplier`` is given."""
    require(0 < delta < 1, f"Got delta={delta}: give a number above 0 and below 1.")
    require(
        (epsilon is None) != (noise_multiplier is None),
        f"Got epsilon={epsilon} and noise_multiplier={noise_multiplier}: give one of them.",
    )
    require_positive(epsilon=epsilon)
    require_positive(or_zero=True, noise_multiplier=noise_multiplier)
