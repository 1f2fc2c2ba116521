"""A run's folder has one writer, and what a killed process left goes."""

import gc
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tiny import assert_same_end, new_data, new_federation, new_method

import lightning_fed.storage.owner
from lightning_fed.callbacks import FederationCallback, RunView
from lightning_fed.core.messages import ClientUpdate
from lightning_fed.errors import FederationError
from lightning_fed.storage.owner import only_writer, temporary_folder

HOLD = """
import time
from pathlib import Path
from lightning_fed.storage.owner import only_writer, temporary_folder
with {}:
    {}
"""


@contextmanager
def other_process(context: str, then: str = "time.sleep(60)") -> Iterator[None]:
    """Another process that enters a context, and is killed in it at the end of the block, if it has not left it."""
    program = HOLD.format(context, f"print('held', flush=True); {then}")
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield
        finally:
            process.kill()


def fit(rounds: int, run_dir: str = "runs", ckpt_path: str | None = None, **options: object) -> None:
    new_federation(rounds, run_dir, evaluate_every=1, **options).fit(new_method("PFedLoRA"), new_data(2, 40), ckpt_path)


def test_the_second_process_gets_one_line_and_the_first_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightning_fed.storage.owner, "PATIENCE", 0.1)
    fit(2)
    files = {path: path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()}
    with other_process("only_writer(Path('runs/version_0'))"):
        for ckpt_path in ("last", "runs/version_0", "runs/version_0/checkpoints/round_000002"):
            with pytest.raises(FederationError, match=r"Another process is writing to .*runs/version_0, .* one writer") as caught:
                fit(3, ckpt_path=ckpt_path)
            assert "\n" not in str(caught.value)
        new_federation(1, "runs").test(new_method("PFedLoRA"), new_data(2, 40))  # who only reads may
        assert {path: path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()} == files
    fit(3, ckpt_path="last")
    fit(3, "whole")
    assert_same_end(Path("runs/version_0"), Path("whole/version_0"))


class Second(FederationCallback):
    """Continues the run while it is played."""

    def __init__(self) -> None:
        self.message = ""

    def on_turn_end(self, run: RunView, update: ClientUpdate) -> None:
        if run.round == 2 and not self.message:
            with pytest.raises(FederationError) as caught:
                fit(3, ckpt_path="last")
            self.message = str(caught.value)


def test_a_new_run_has_one_writer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightning_fed.storage.owner, "PATIENCE", 0.1)
    second = Second()
    fit(3, callbacks=[second])
    assert "has one writer" in second.message
    fit(3, "whole")
    assert_same_end(Path("runs/version_0"), Path("whole/version_0"))


def test_who_waits_gets_the_folder_when_the_other_ends() -> None:
    Path("run").mkdir()
    with other_process("only_writer(Path('run'))", "time.sleep(0.5)"):
        begun = time.monotonic()
        with only_writer(Path("run")):
            assert time.monotonic() - begun > 0.1


def test_a_folder_that_nothing_can_be_written_to_is_refused() -> None:
    with pytest.raises(FederationError, match=r"The folder of the run, no, is not writable"), only_writer(Path("no")):
        pass


def test_states_of_a_killed_process_go_and_those_of_a_living_one_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "lightning_fed_states_of_mine").mkdir()  # without a lock
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.lock").touch()
    (tmp_path / "lightning_fed_states_link").symlink_to("run", target_is_directory=True)
    foreign = set(tmp_path.iterdir())
    hold = ("temporary_folder() as folder", "(folder / 'state').touch(); time.sleep(60)")
    with other_process(*hold):
        with other_process(*hold):
            assert len(set(tmp_path.iterdir()) - foreign) == 2
        with temporary_folder() as ours:
            assert len(set(tmp_path.iterdir()) - foreign) == 2  # who was killed has none any more
            assert ours in tmp_path.iterdir()
        [left] = set(tmp_path.iterdir()) - foreign
    federation = new_federation(1, None, store_limit_mb=1e-6)
    for _ in range(2):
        federation.fit(new_method("PFedLoRA"), new_data(2, 40))
    assert not left.exists()
    assert federation.client_module(0) is not None
    gc.collect()
    assert len(set(tmp_path.iterdir()) - foreign) == 1  # that of the newest run
    assert foreign < set(tmp_path.iterdir())
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
