"""The tests that every method of this package passes, for your own methods.

In a test file::

    import pytest
    from lightning_fed.testing import checks_of
    from my_lab import Ditto

    @pytest.mark.parametrize("check", checks_of(Ditto), ids=str)
    def test_ditto(check):
        check()

or, all at once, anywhere: ``check_method(Ditto)``.
"""

import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

if "pytest" in sys.modules:  # so that failed assertions show the compared values
    import pytest

    pytest.register_assert_rewrite("lightning_fed.testing.checks", "lightning_fed.testing.compare")

from lightning_fed.core.module import FederatedModule
from lightning_fed.data import FederatedDataModule
from lightning_fed.errors import FederationError
from lightning_fed.testing.checks import CHECKS, OF_ANY_NETWORK
from lightning_fed.testing.subject import Subject
from lightning_fed.testing.toys import CLASSES, Net, WideNet, momentum, new_data

__all__ = ["Check", "check_method", "checks_of"]


@dataclass(frozen=True, eq=False)
class Check:
    """A property of a method. Calling it raises :class:`AssertionError`, or the method's error, if the property does not hold."""

    property: Callable[[Subject, Path], None]
    subject: Subject

    def __call__(self) -> None:
        with tempfile.TemporaryDirectory(prefix="lightning_fed_check_") as folder:
            self.property(self.subject, Path(folder))

    def __str__(self) -> str:
        return self.property.__name__.replace("_", " ")


def checks_of(
    method: type[FederatedModule] | Subject, data: Callable[..., FederatedDataModule] | None = None, **options: Any
) -> Sequence[Check]:
    """The properties that a method must have, one check for each. Together they take a few seconds; they share their runs.

    Args:
        method: the class. It is created with the keywords ``backbone`` (a tiny network for images of 3×4×4 pixels, or a list of two
            if the class is heterogeneous), ``num_classes=4`` and ``optimizer`` (SGD with momentum).
        data: creates data that the method can train on, given ``num_clients`` and ``size``. None: tiny images.
        **options: further arguments of the method, or replacements of these.
    """
    if isinstance(method, Subject):
        subject = method
    else:
        network = [Net, WideNet] if method.heterogeneous else Net
        given = {"backbone": network, "num_classes": CLASSES, "optimizer": momentum} | options
        # With other data or networks, the network with batch norm for tiny images cannot be used.
        subject = Subject(partial(method, **given), data or new_data, data is None and "backbone" not in options)
    unfit = () if subject.any_network else OF_ANY_NETWORK
    return [Check(check, subject) for check in CHECKS if check not in unfit]


def check_method(
    method: type[FederatedModule] | Subject, data: Callable[..., FederatedDataModule] | None = None, **options: Any
) -> None:
    """Run all checks of :func:`checks_of`, which has the same arguments, and print a line for each.

    Raises:
        ExceptionGroup: with an exception for each failed check, which names the check.
    """
    failures: list[Exception] = []
    checks = checks_of(method, data, **options)
    for check in checks:
        try:
            check()
        except Exception as error:
            error.add_note(f"Check: {check}.")
            failures.append(error)
            print(f"FAILED {check}: {_said(error)}")
        else:
            print(f"passed {check}")
    if failures:
        name = method.__name__ if isinstance(method, type) else "the method"
        raise ExceptionGroup(f"{len(failures)} of {len(checks)} checks of {name} failed", failures)


def _said(error: Exception) -> str:
    """An error in a line; if neither a check nor the library raised it, with its type and location."""
    said = str(error).partition("\n")[0]  # pytest appends lines to an assertion's message
    if isinstance(error, AssertionError | FederationError) and said:
        return said
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {said} (line {frame.lineno} of {frame.filename})"
