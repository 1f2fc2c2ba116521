"""Commands that end by themselves: refused in a line, or with what they print."""

from collections.abc import Callable
from typing import Any

import pytest

from lightning_fed.__main__ import main


def refused(capsys: pytest.CaptureFixture[str], *args: str, start: Callable[[], Any] | None = None, silent: bool = False) -> str:
    """What is said of a command that cannot be: one line on standard error, exit code 2.

    Args:
        capsys: pytest's.
        *args: the command.
        start: starts another one.
        silent: nothing else is printed.
    """
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        start() if start else main(list(args))
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert said.err.startswith("lightning-fed: error: ")
    assert said.err.count("\n") == 1
    assert not silent or said.out == ""
    return said.err


def printed(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """What a command prints that then ends, such as a help, without an error."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(list(args))
    assert ended.value.code == 0
    return capsys.readouterr().out
