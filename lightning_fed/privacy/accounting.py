"""The privacy cost ε of rounds, or of steps of DP-SGD, by Google's dp-accounting.

Poisson sampling is accounted by privacy loss distributions, for adding or removing a client; their grids only overestimate. With
full participation there is a closed form.
"""

import math
from functools import cache
from typing import Any

from lightning_fed.errors import FederationError, require

LONG = 500
"""Rounds from which on the grid of the privacy losses is finer: on a coarse one what it errs, upwards alone, adds up."""

SMALLEST_MULTIPLIER, LARGEST_MULTIPLIER = 0.05, 4096.0
"""Between which z is looked for."""


@cache
def _library() -> Any:
    try:
        import dp_accounting
        from dp_accounting import pld  # noqa: F401 - so that dp_accounting.pld is there
    except ImportError as error:
        raise FederationError(
            f"federation.privacy needs dp-accounting, which cannot be imported ({error}): pip install 'lightning-fed[privacy]'."
        ) from error
    return dp_accounting


def _event(rate: float, multiplier: float, rounds: int) -> Any:
    library = _library()
    return library.SelfComposedDpEvent(library.PoissonSampledDpEvent(rate, library.GaussianDpEvent(multiplier)), rounds)


def _accountant(rounds: int) -> Any:
    return _library().pld.PLDAccountant(value_discretization_interval=1e-4 if rounds > LONG else 1e-3)


@cache
def epsilon(rate: float, multiplier: float, rounds: int, delta: float) -> float:
    """The ε of a number of rounds, or of steps.

    Args:
        rate: probability with which a client takes part in a round, or an example in a step, independently; 1: all do.
        multiplier: z, the noise's standard deviation over the clip norm; 0: no noise, and ε is infinite.
        rounds: number of rounds, or steps; 0 cost nothing.
        delta: δ.
    """
    if rounds == 0 or multiplier == 0:
        return 0.0 if rounds == 0 else math.inf
    if rate == 1:
        return float(_library().get_epsilon_gaussian(multiplier / math.sqrt(rounds), delta))
    return float(_accountant(rounds).compose(_event(rate, multiplier, rounds)).get_epsilon(delta))


def noise_multiplier(rate: float, target: float, rounds: int, delta: float) -> float:
    """The smallest z, to 1e-3 and rounded up, with which the rounds cost at most ε."""
    if rate == 1:
        found = float(_library().get_sigma_gaussian(target, delta)) * math.sqrt(rounds)
    else:
        library, upper = _library(), 1.0
        while epsilon(rate, upper, rounds, delta) > target:
            upper *= 2
            require(
                upper <= LARGEST_MULTIPLIER,
                f"No noise was found with which {rounds} rounds or steps cost ε = {target:g} at δ = {delta:g}: give more.",
            )
        lower = upper / 2
        while lower > SMALLEST_MULTIPLIER and epsilon(rate, lower, rounds, delta) <= target:
            lower, upper = lower / 2, lower
        if lower <= SMALLEST_MULTIPLIER:
            return upper
        found = library.calibrate_dp_mechanism(
            lambda: _accountant(rounds),
            lambda multiplier: _event(rate, multiplier, rounds),
            target,
            delta,
            library.ExplicitBracketInterval(lower, upper),
            tol=1e-4,
        )
    rounded = math.ceil(found * 1000) / 1000
    return rounded if epsilon(rate, rounded, rounds, delta) <= target else rounded + 1e-3
