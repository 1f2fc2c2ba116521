"""What a run silences while it lasts, and what other runs do to that."""

import logging
import threading
import warnings

import pytest

from lightning_fed.engines.silence import no_second_traceback, quiet_lightning


def test_of_runs_that_overlap_the_last_one_lets_lightning_speak_again() -> None:
    logger, filters = logging.getLogger("lightning.pytorch"), list(warnings.filters)
    level = logger.level
    first, second = quiet_lightning(), quiet_lightning()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert logger.level == logging.WARNING
    assert warnings.filters != filters
    second.__exit__(None, None, None)
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
