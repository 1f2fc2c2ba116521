"""What every method must keep, whatever it does: a new file in lightning_fed/methods is held to all of this."""

from functools import cache, partial

import pytest
from tiny import METHODS, data_for, new_method

import lightning_fed.methods
from lightning_fed.families.fine_tuning import FineTuning
from lightning_fed.testing import Check, checks_of
from lightning_fed.testing.checks import Subject

assert {"FedAvg", "PFedLoRA", "Standalone"} <= set(METHODS)


@cache
def checks(name: str) -> list[Check]:
    """Of one method; the run that they compare with is played once."""
    tunes = issubclass(getattr(lightning_fed.methods, name), FineTuning)  # a transformer, not any network
    return list(checks_of(Subject(partial(new_method, name), partial(data_for, name), any_network=not tunes)))


@pytest.mark.parametrize(("name", "check"), [(name, check) for name in METHODS for check in checks(name)], ids=str)
def test_every_method(name: str, check: Check) -> None:
    check()
