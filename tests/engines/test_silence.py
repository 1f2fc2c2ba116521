"""What a run silences while it lasts, and what other runs do to that."""

import logging
import warnings

from lightning_fed.engines.silence import quiet_lightning


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
