"""Folders of runs."""

from pathlib import Path

from lightning_fed.system.folders import numbered


def test_runs_are_in_the_order_of_their_numbers() -> None:
    names = ["version_10", "version_9", "version_9_copy", "version_", "12", "my_version_3"]
    assert list(numbered(map(Path, names)).items()) == [(Path("version_9"), 9), (Path("version_10"), 10)]
