"""The index of options, made once for all tests that look into it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_fed.cli.help import option_index as module
from lightning_fed.cli.help.option_index import OptionIndex


@pytest.fixture(scope="session")
def option_index() -> OptionIndex:
    """A new one."""
    from lightning_fed.cli.all_parsers import index

    return index()


@pytest.fixture
def kept_index(option_index: OptionIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a user's cache that has it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    module.write(option_index)
    return tmp_path / "cache" / "lightning-fed"
