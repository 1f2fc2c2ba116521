"""What a run silences while it lasts."""

import logging
import threading
import warnings

import pytest

from lightning_fed.engines.silence import no_second_traceback, quiet_lightning


def test_lightning_is_silent_within_and_speaks_again() -> None:
    logger, filters = logging.getLogger("lightning.pytorch"), list(warnings.filters)
    level = logger.level
    with quiet_lightning():
        assert logger.level == logging.WARNING
        assert warnings.filters != filters
    assert logger.level == level
    assert warnings.filters == filters


class Keeping(threading.Thread):
    """Fails, and keeps the exception for whoever it works for, or not."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.keeps = keeps
        self.exception: Exception | None = None

    def run(self) -> None:
        try:
            1 / 0  # noqa: B018
        except ZeroDivisionError as error:
            self.exception = error if self.keeps else None
            raise


@pytest.mark.parametrize("keeps", [False, True])
def test_a_thread_that_keeps_its_exception_prints_none(keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", before := lambda args: printed.append(args.exc_type))
    with no_second_traceback():
        thread = Keeping(keeps)
        thread.start()
        thread.join()
    assert printed == ([] if keeps else [ZeroDivisionError])
    assert threading.excepthook is before
