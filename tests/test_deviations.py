"""The page on public code names a test for each deviation: it fails where the deviation is played in place of the method."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "bench"))
from deviations import DEVIATIONS  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize("place", range(len(DEVIATIONS)), ids=lambda place: f"{DEVIATIONS[place].ours.__name__}-{place}")
def test_a_deviation_fails_the_test_that_is_named_for_it(place: int) -> None:
    file, _, name = DEVIATIONS[place].test.partition("::")
    [path] = (ROOT / "tests").rglob(file)
    folders = [ROOT, ROOT / "bench", ROOT / "tests"]
    environment = os.environ | {"DEVIATION": str(place), "PYTHONPATH": os.pathsep.join(map(str, folders))}
    options = ["-q", "-p", "deviating", "-p", "no:cacheprovider", "-m", "slow or not slow"]
    command = [sys.executable, "-m", "pytest", *options, f"{path}::{name}"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout
    assert "FAILED" in run.stdout
    assert "deviating.py" not in run.stdout  # it is the test that fails
