"""A run killed at any moment, continued, ends as one that was never killed."""

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tiny import assert_same_end, new_data, new_federation, new_method

from lightning_fed.__main__ import main
from lightning_fed.engines.worker import Worker
from lightning_fed.methods import PFedLoRA
from lightning_fed.module import FederatedModule

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


def fit(run_dir: str, ckpt_path: str | None = None) -> None:
    """Three rounds, two of three clients in each, measured at the end."""
    federation = new_federation(3, run_dir, participation=0.7, evaluate_every=0)
    federation.fit(new_method("PFedLoRA"), new_data(3), ckpt_path)


class Countdown:
    """Passes calls on until the n-th, at which the process kills itself."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                if function is os.fsync:
                    tear(args[0])
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return counted


def tear(descriptor: int) -> None:
    """Until it is synced, half of a file may be missing."""
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode):
        os.ftruncate(descriptor, status.st_size // 2)


def watch(*places: tuple[Any, str]) -> Callable[[int], None]:
    """Arm the functions named: the n-th call of any of them kills the process."""

    def arm(calls: int) -> None:
        countdown = Countdown(calls)
        for owner, name in places:
            setattr(owner, name, countdown.before(getattr(owner, name)))

    return arm


WRITING = watch((os, "fsync"), (Path, "rename"), (Path, "unlink"), (Path, "mkdir"), (shutil, "rmtree"))
TRAINING = watch((Worker, "take"), (FederatedModule, "client_step"), (PFedLoRA, "shared_state"))


def dies(arm: Callable[[int], None], calls: int, run_dir: str) -> bool:
    """Run :func:`fit` in a fork; whether it was killed before it ended. A fork need not import anything again."""
    child = os.fork()
    if child == 0:
        run_armed(arm, calls, run_dir)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def run_armed(arm: Callable[[int], None], calls: int, run_dir: str) -> NoReturn:
    try:
        arm(calls)
        fit(run_dir)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


@pytest.mark.parametrize(
    ("arm", "first", "step"),
    [
        pytest.param(WRITING, 1, 5, id="writing"),
        pytest.param(TRAINING, 1, 11, id="training"),
        *(pytest.param(WRITING, first, 5, id=f"writing from {first}", marks=pytest.mark.slow) for first in range(2, 6)),
    ],
)
def test_killed_anywhere_and_continued(arm: Callable[[int], None], first: int, step: int) -> None:
    fit("whole")
    kills = 0
    while dies(arm, first + kills * step, f"run_{kills}"):
        fit(f"run_{kills}", ckpt_path="last")
        newest = max(Path(f"run_{kills}").iterdir())  # killed before its first checkpoint, a run is started anew
        assert_same_end(newest, Path("whole/version_0"))
        kills += 1
    assert kills >= 5  # the run was not over before it began


CONFIG = """
data:
  class_path: Digits
  init_args: {num_clients: 3, image_size: 32}
model:
  class_path: PFedLoRA
  init_args: {backbone: [CNN5, CNN3]}
federation: {rounds: 4, progress: false, logger: false}
trainer: {accelerator: cpu}
"""


@pytest.mark.slow
def test_the_command_killed_and_continued() -> None:
    Path("config.yaml").write_text(CONFIG)
    main(["fit", "--config", "config.yaml", "--federation.run_dir", "whole"])
    command = [sys.executable, "-m", "lightning_fed", "fit", "--config", "config.yaml", "--federation.run_dir", "killed"]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})  # sums depend on the number of threads
    while not Path("killed/version_0/checkpoints/round_000002").exists():
        assert process.poll() is None
        time.sleep(0.001)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    main(["fit", "--config", "config.yaml", "--federation.run_dir", "killed", "--ckpt_path", "last"])
    assert_same_end(Path("killed/version_0"), Path("whole/version_0"))
