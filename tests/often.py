"""What the default tests try of a cross product; the rest is slow."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

OFTEN = {"FedAvg", "PFedLoRA", "FedHM", "FedDecomp", "PF2LoRA", "HETLoRA", "SCAFFOLD", "FedAMP", "DSFL"}
"""Methods that are tried with all that is common to all: networks and sizes of one's own, statistics, moments, payloads that vary,
what a server keeps for each client or learns itself.
"""

FEW = {"FedAvg", "PFedLoRA", "FedHM", "SCAFFOLD", "DSFL"}
"""Of these, those with which the core's own ways are tried: what is private, in phases, in sizes, kept with moments, public."""

OF_THE_CORE = {
    "a partly frozen network with batch norm is trained",
    "a clients share is bounded or privacy is refused",
    "a robust rule combines what is sent or is refused",
    "a round may have any number of clients",
    "an examples share is bounded or privacy is refused",
    "an unseen client is personalized and leaves no trace",
    "an interrupted run continues as if nothing had happened",
    "another order memory and measuring change nothing",
    "another seed gives other numbers",
    "steps cost as much without values",
    "the last checkpoint is measured as the run was",
    "who never took part has nothing stored",
}
"""Checks of what is the core's affair more than a method's: each with OFTEN, by their names."""


def mostly_slow(cases: Iterable[Any], often: Collection[Any]) -> list[Any]:
    """All cases, one argument or a tuple of arguments each, of which those that are not tried often are marked slow."""
    cases = list(cases)
    assert set(often) <= set(cases), "something is to be tried often that is no case"
    return [pytest.param(*_arguments(case), marks=() if case in often else pytest.mark.slow) for case in cases]


def _arguments(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
