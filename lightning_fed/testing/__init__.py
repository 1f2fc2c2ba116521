"""The tests that every method of this package passes, for methods from elsewhere.

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

if "pytest" in sys.modules:  # so that it says what was compared
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
    """One property of one method: raises :class:`AssertionError`, or what the method raises, if it does not hold."""

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
    """What a method must keep, one check per property. Together they take a few seconds; runs are played once for all of them.

    Args:
        method: the class. It is made with the keywords ``backbone`` (a tiny network for images of 3×4×4 pixels, or a list of two
            where the class says that it is heterogeneous), ``num_classes=4`` and ``optimizer`` (SGD with momentum).
        data: makes data that the method can train on, given ``num_clients`` and ``size``; None: tiny images.
        **options: more arguments of the method, or others than these.
    """
    if isinstance(method, Subject):
        subject = method
    else:
        network = [Net, WideNet] if method.heterogeneous else Net
        given = {"backbone": network, "num_classes": CLASSES, "optimizer": momentum} | options
        # Where data or network are of another kind, the network with batch norm, for tiny images, cannot be had.
        subject = Subject(partial(method, **given), data or new_data, data is None and "backbone" not in options)
    unfit = () if subject.any_network else OF_ANY_NETWORK
    return [Check(check, subject) for check in CHECKS if check not in unfit]


def check_method(
    method: type[FederatedModule] | Subject, data: Callable[..., FederatedDataModule] | None = None, **options: Any
) -> None:
    """Check all that :func:`checks_of` lists, which has the same arguments, and print a line for each.

    Raises:
        ExceptionGroup: with an exception for each check that failed, which says which one it was.
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
    """What went wrong, in a line; of what neither a check nor the library says, also what kind of error it is and where it was."""
    said = str(error).partition("\n")[0]  # pytest adds lines to an assertion's
    if isinstance(error, AssertionError | FederationError) and said:
        return said
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {said} (line {frame.lineno} of {frame.filename})"
