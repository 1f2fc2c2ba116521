"""What the default tests try of a cross product; the rest is slow."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

OFTEN = {"FedAvg", "PFedLoRA", "FedHM", "FedDecomp", "PF2LoRA", "HETLoRA", "SCAFFOLD", "FedAMP", "DSFL"}
"""Methods that are tried with all that is common to all: networks and sizes of one's own, statistics, moments, payloads that vary,
what a server keeps for each client or learns itself.
"""


def mostly_slow(cases: Iterable[Any], often: Collection[Any]) -> list[Any]:
    """All cases, one argument or a tuple of arguments each, of which those that are not tried often are marked slow."""
    cases = list(cases)
    assert set(often) <= set(cases), "something is to be tried often that is no case"
    return [pytest.param(*_arguments(case), marks=() if case in often else pytest.mark.slow) for case in cases]


def _arguments(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
