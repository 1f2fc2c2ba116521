"""How servers of processes are started."""

import os
import sys
import tempfile
from pathlib import Path

import pytest

from lightning_fed.errors import FederationError
from lightning_fed.system import children
from lightning_fed.system.children import SAFE, forget_safe_path, safe_path, started_in_folder


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process was not started in the working directory."""
    monkeypatch.delenv(SAFE, raising=False)
    monkeypatch.setattr(sys, "path", [str(Path(os.__file__).parent), *sys.path])


def test_what_starts_there_leaves_out_the_folder_and_its_children_do_not() -> None:
    with safe_path():
        assert os.environ[SAFE]
        forget_safe_path()
        assert SAFE not in os.environ
    assert SAFE not in os.environ


def test_the_users_own_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SAFE, "1")
    with safe_path():
        forget_safe_path()
    assert os.environ[SAFE] == "1"


@pytest.mark.parametrize("first", ["", os.curdir])
def test_a_program_of_the_folder_keeps_it(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``python -m`` the folder may be where everything is."""
    assert not started_in_folder()
    monkeypatch.setattr(sys, "path", [first, *sys.path])
    assert started_in_folder()
    with safe_path():
        assert SAFE not in os.environ


def test_a_long_path_for_temporary_files_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/" + children.ROOM * "x")
    with pytest.raises(FederationError, match=rf"path of {children.ROOM + 1} bytes .* set TMPDIR to one of at most"), safe_path():
        pass
