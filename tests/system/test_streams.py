"""Output that nobody reads, or that has nowhere to go."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_fed.system.console import UnreadConsole
from lightning_fed.system.logs import LOGGER, lines_shown


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whoever read standard output has left, as ``| head`` does."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        os.close(reader)
        yield


@pytest.mark.usefixtures("left")
def test_a_message_without_a_reader_is_no_error() -> None:
    with lines_shown():
        for _ in range(3):
            logging.getLogger(f"{LOGGER.name}.run").info("Round 1")


@pytest.mark.usefixtures("left")
def test_a_table_without_a_reader_is_no_error() -> None:
    console = UnreadConsole()
    console.print("A table.")
    console.print("Another one.")


def test_a_full_disk_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w") as full, lines_shown():
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(OSError, match="No space"):
            LOGGER.info("Round 1")
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_no_error(closed: str) -> None:
    command = f"'{sys.executable}' -m lightning_fed fit --model.help PFedLoRA {closed}"
    assert subprocess.run(["sh", "-c", command], timeout=60, stdout=subprocess.DEVNULL).returncode == 0


def test_what_stands_for_a_closed_stream_is_there_for_other_programs() -> None:
    """Runs of a sweep wrote no log: the process that they are forked from had no standard output."""
    code = "from lightning_fed.system.streams import *; open_closed_streams(); assert all(map(os.get_inheritable, (1, 2)))"
    assert subprocess.run(["sh", "-c", f"'{sys.executable}' -c '{code}' >&- 2>&-"], timeout=60).returncode == 0
