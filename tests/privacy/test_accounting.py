"""What rounds cost: numbers that others have published or computed."""

import math

import pytest

from lightning_fed.errors import FederationError
from lightning_fed.privacy.accounting import epsilon, noise_multiplier

pytest.importorskip("dp_accounting")


@pytest.mark.parametrize(
    ("rate", "multiplier", "rounds", "delta", "expected"),
    [
        (1e-3, 1, 1000, 1e5**-1.1, 0.167),  # McMahan et al. 2018, Table 1's setting
        (1e-3, 1, 10_000, 1e6**-1.1, 0.600),
        (0.01, 4, 10_000, 1e-5, 0.947),  # Abadi et al. 2016, Figure 2's setting
        (0.04, 1.5, 2250, 1e-5, 6.769),
        (120 / 3383, 1.2, 100, 1e-5, 1.7075),  # TensorFlow Federated's tutorial
        (0.1, 1, 100, 1e-3, 4.7844),
        (250 / 60_000, 1.3, 3600, 1e-5, 0.853),
        (0.05, 1, 100, 1e-4, 2.870),
        (0.2, 0.5, 3, 0.15594, 1.0),  # dp-accounting's own test
    ],
)
def test_poisson_cohorts(rate: float, multiplier: float, rounds: int, delta: float, expected: float) -> None:
    assert epsilon(rate, multiplier, rounds, delta) == pytest.approx(expected, abs=1.1e-3)


@pytest.mark.parametrize(
    ("multiplier", "rounds", "delta", "expected"),
    [(1, 1, 1e-5, 4.377178), (2, 1, 1e-5, 1.993091), (5, 10, 1e-5, 2.594383), (1, 100, 1e-4, 86.34)],
)
def test_everybody_in_each_round(multiplier: float, rounds: int, delta: float, expected: float) -> None:
    """The closed form of a Gaussian mechanism with z/√T."""
    assert epsilon(1, multiplier, rounds, delta) == pytest.approx(expected, abs=2e-3 if expected > 50 else 1e-6)


def test_nothing_costs_nothing_and_no_noise_costs_everything() -> None:
    assert epsilon(0.1, 1.0, 0, 1e-3) == 0
    assert epsilon(0.1, 0.0, 3, 1e-3) == math.inf


@pytest.mark.parametrize(
    ("rate", "target", "rounds", "delta", "expected"),
    [(0.1, 8, 100, 1e-3, 0.778), (0.05, 2, 100, 1e-4, 1.204), (1, 8, 100, 1e-3, 4.800)],
)
def test_the_noise_of_an_epsilon_is_enough_and_hardly_more(
    rate: float, target: float, rounds: int, delta: float, expected: float
) -> None:
    found = noise_multiplier(rate, target, rounds, delta)
    assert found == pytest.approx(expected, abs=1.1e-3)
    assert epsilon(rate, found, rounds, delta) <= target
    assert epsilon(rate, found - 2e-3, rounds, delta) > target


def test_an_epsilon_that_no_noise_gives_is_refused() -> None:
    with pytest.raises(FederationError, match="No noise was found with which 1 rounds or steps cost ε = 1e-09 at"):
        noise_multiplier(0.5, 1e-9, 1, 1e-12)


@pytest.mark.slow  # of little noise the losses are many
def test_a_generous_epsilon_gets_the_smallest_noise() -> None:
    found = noise_multiplier(0.01, 100, 1, 1e-3)
    assert 0.05 <= found <= 0.25
    assert epsilon(0.01, found, 1, 1e-3) <= 100
