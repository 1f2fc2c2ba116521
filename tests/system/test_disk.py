"""Disks that are full, read-only or gone: one line, and what was there before is still there."""

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from often import mostly_slow
from tensorboard.summary.writer.record_writer import RecordWriter
from tiny import assert_same_end, new_data, new_federation, new_method

from lightning_fed.callbacks import FederationCallback, RunView
from lightning_fed.callbacks.table import append_row, write_table
from lightning_fed.core.messages import ClientUpdate
from lightning_fed.errors import FederationError
from lightning_fed.federation.federation import Federation
from lightning_fed.storage.checkpoint import Checkpoints
from lightning_fed.storage.run_folder import load_checkpoint
from lightning_fed.system.disk import in_one_line, write_whole


def fit(run_dir: str, ckpt_path: Path | str | None = None, rounds: int = 3, **options: Any) -> Federation:
    """Clients keep a network, of which one is in memory at a time."""
    federation = new_federation(rounds, run_dir, participation=0.7, evaluate_every=0, store_limit_mb=1e-6, **options)
    federation.fit(new_method("PFedLoRA"), new_data(3, 90), ckpt_path)
    return federation


def average(rounds: int, run_dir: str, ckpt_path: str | None = None) -> None:
    """Nothing stays with a client; all are measured in each round."""
    federation = new_federation(rounds, run_dir, evaluate_every=1)
    federation.fit(new_method("FedAvg"), new_data(2, 40), ckpt_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a good disk."""
    folder = tmp_path_factory.mktemp("whole")
    fit(str(folder))
    return folder / "version_0"


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another one."""
    folder = tmp_path_factory.mktemp("averaged")
    average(3, str(folder))
    return folder / "version_0"


class Disk:
    """Refuses to write after so many calls, until it is let go."""

    CALLS = ("fsync", "mkdir", "rename", "replace", "write")

    def __init__(self, calls: int, code: int, patch: pytest.MonkeyPatch) -> None:
        self.left, self.code = calls, code
        for name in self.CALLS:
            patch.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left < 0:  # a path is told, an open file is not
                raise OSError(self.code, os.strerror(self.code), *(args[:1] if isinstance(args[0], str | Path) else ()))
            return function(*args, **kwargs)

        return counted


@pytest.mark.parametrize("code", mostly_slow([errno.ENOSPC, errno.EROFS], often={errno.ENOSPC}))
def test_a_disk_that_refuses_anywhere(code: int, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it does not any more, the run goes on and ends as one on a good disk."""
    refusals, calls, kept = 0, code % 7, 0  # another beginning for each
    while True:
        run = Path(f"run_{calls}")
        with monkeypatch.context() as patch:
            disk = Disk(calls, code, patch)
            try:
                fit(str(run))
            except FederationError as error:
                said = str(error)
            else:
                break
        assert disk.left < 0
        assert os.strerror(code) in said
        assert str(run) in said
        assert "\n" not in said
        refusals += 1
        if "is complete" in said:
            kept += 1
            checkpoint, problems = load_checkpoint(run / "version_0")
            assert (str(checkpoint.path) in said, problems) == (True, [])
        fit(str(run), ckpt_path="last")
        assert_same_end(max(run.iterdir()), whole)
        assert not list(run.glob("*/checkpoints/.*"))
        calls += 11
    assert refusals >= 4
    assert kept >= 2


class At(FederationCallback):
    """Does something after the first turn of a round."""

    def __init__(self, round: int, do: Callable[[], Any]) -> None:
        self.round, self.do = round, do

    def on_turn_end(self, run: RunView, update: ClientUpdate) -> None:
        if run.round == self.round:
            self.do()


def test_a_folder_that_disappears(whole: Path) -> None:
    with pytest.raises(FederationError, match=r"runs/version_0/.*No such file or directory\)?\. The run has no checkpoint"):
        fit("runs", callbacks=[At(2, lambda: shutil.rmtree("runs", ignore_errors=True))])
    assert fit("runs", ckpt_path="last").run.round == 3
    assert_same_end(Path("runs/version_0"), whole)


@pytest.mark.often(1)
@pytest.mark.parametrize("victim", ["clients", "checkpoints", "index"])
def test_a_file_where_a_folder_should_be(victim: str) -> None:
    def swap() -> None:
        path = Path("runs/version_0", victim)
        path.rename("aside") if not Path("aside").exists() else None
        path.write_text("mine")

    with pytest.raises(
        FederationError, match=r"runs/version_0/.*(Not a directory|File exists|Is a directory)\)?\. The run has no checkpoint"
    ):
        fit("runs", callbacks=[At(2, swap)])
    path = Path("runs/version_0", victim)
    path.unlink()
    Path("aside").rename(path)
    assert fit("runs", ckpt_path="last").run.round == 3


def test_other_errors_are_left_as_they_are() -> None:
    """Of networks, of pipes, and of files that are not the run's."""
    errors = [ConnectionRefusedError(errno.ECONNREFUSED, "refused"), BrokenPipeError(errno.EPIPE, "pipe"), OSError("of mine")]
    errors += [FileNotFoundError(errno.ENOENT, "mine", name) for name in ("data/image.png", "/data/image.png", "runs_2/x", b"x", 3)]
    for error in errors:
        with pytest.raises(OSError, match=r"refused|pipe|mine") as caught, in_one_line(str, Path("runs"), Path("/tmp/scratch")):
            raise error
        assert caught.value is error
    for name in ("runs/x", str(Path("runs/version_0/x").absolute()), b"/tmp/scratch/x"):
        with pytest.raises(FederationError, match="x: mine"), in_one_line(str, Path("runs"), Path("/tmp/scratch")):
            raise FileNotFoundError(errno.ENOENT, "mine", name)


def test_a_disk_that_is_full_in_the_first_round_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(FederationError, match=r"No space left on device.* The run has no checkpoint: free disk space"):
            fit("runs")
    assert list(Path("runs").iterdir()) == []


def test_of_a_folder_that_vanishes_one_line_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    """TensorBoard writes in a thread, whose traceback nobody would catch."""
    vanish = At(2, lambda: shutil.rmtree("runs", ignore_errors=True))
    federation = new_federation(3, "runs", logger=True, callbacks=[vanish])
    with pytest.raises(FederationError, match="runs/version_0: No such file or directory"):
        federation.fit(new_method("FedAvg"), new_data(2, 40))
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(("round", "left"), [(0, "The run has no checkpoint"), (2, "The checkpoint .* is complete")])
def test_of_a_disk_that_is_full_while_tensorboard_writes_one_line_is_said(
    round: int, left: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its thread keeps the error, and the next call of the logger raises it; before the first round, this is a callback's."""

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    fill = At(round, lambda: monkeypatch.setattr(RecordWriter, "write", full))
    if not round:
        fill.do()
    federation = new_federation(4, "runs", logger=True, callbacks=[fill])
    with pytest.raises(FederationError, match=rf"^runs/version_0.*: No space left on device\. {left}"):
        federation.fit(new_method("FedAvg"), new_data(2, 40))
    assert "Traceback" not in capfd.readouterr().err


# ------------------------------------------------------------------------------------------------- what is in the way


def put_there(path: Path, kind: str) -> None:
    """Something of somebody's."""
    Path("mine").mkdir(exist_ok=True)
    Path("mine/notes.txt").write_text("mine")
    if kind == "link":
        path.symlink_to(Path("mine").absolute(), target_is_directory=True)
    elif kind == "folder":
        path.mkdir()
        (path / "notes.txt").write_text("mine")
    else:
        path.write_text("mine")


@pytest.mark.often(4)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("checkpoints/round_000003", "file"),
        ("checkpoints/round_000003", "link"),
        ("checkpoints/.new", "link"),
        ("checkpoints/.old", "link"),
        ("checkpoints/.new", "file"),
        ("metrics.csv", "folder"),
    ],
)
def test_what_is_in_the_way_stops_no_continuation(name: str, kind: str, averaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    average(2, "runs")
    path = Path("runs/version_0", name)
    path.unlink(missing_ok=True)
    put_there(path, kind)
    capsys.readouterr()
    average(3, "runs", "last")
    said = capsys.readouterr().out
    assert_same_end(Path("runs/version_0"), averaged)
    assert Path("mine/notes.txt").read_text() == "mine"
    if not path.name.startswith("."):  # those are names of ours
        aside = path.with_name(f"{path.name}.other1")
        assert f"{path} is in the way and does not belong to this run: it has been renamed to {aside.name}." in said
        assert aside.read_text() == "mine" if kind == "file" else (aside / "notes.txt").read_text() == "mine"
    if "round" in name:
        assert f"{path} is not a folder, and so not a checkpoint. Continuing from round 2." in said
    assert len(Path("runs/version_0/metrics.csv").read_text().splitlines()) == 4


def test_a_table_that_somebody_moves_away_is_written_again() -> None:
    new_federation(3, "runs", callbacks=[At(2, lambda: Path("runs/version_0/metrics.csv").unlink(missing_ok=True))]).fit(
        new_method("FedAvg"), new_data(2, 40)
    )
    assert len(Path("runs/version_0/metrics.csv").read_text().splitlines()) == 4


def test_a_full_disk_leaves_the_tables_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    path, row = Path("table.csv"), {"round": 1, "value": 0.5}
    write_table(path, [row])
    before, write = path.read_bytes(), os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))  # as a disk does on which there is no more
        with pytest.raises(OSError, match=r"No space left on device: 'table\.csv'"):
            append_row(path, row, ["round", "value"])
    assert path.read_bytes() == before
    append_row(path, row, ["round", "value"])
    assert path.read_text().splitlines() == ["round,value", "1,0.5", "1,0.5"]


def test_a_full_disk_leaves_the_facts_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("facts/run.json")
    path.parent.mkdir()
    write_whole(path, "before")
    with monkeypatch.context() as patch:
        Disk(0, errno.ENOSPC, patch)
        with pytest.raises(OSError, match="No space left on device"):
            write_whole(path, "after")
    assert [(file.name, file.read_text()) for file in path.parent.iterdir()] == [("run.json", "before")]


def test_files_of_killed_writers_are_removed_when_nobody_can_still_write_them() -> None:
    path, now = Path("cells.csv"), time.time()
    for name, age in (("here.1", 3700), ("elsewhere.1", 3700), ("elsewhere.2", 3500)):
        Path(f".cells.csv.{name}").touch()
        os.utime(f".cells.csv.{name}", (now - age, now - age))
    Path(".cell.json.here.1").touch()
    os.utime(".cell.json.here.1", (0, 0))
    write_whole(path, "all of it")
    assert {file.name for file in Path().iterdir()} == {"cells.csv", ".cells.csv.elsewhere.2", ".cell.json.here.1"}


def test_facts_that_a_kill_leaves_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    folder, replace = Path("runs/version_0"), os.replace

    def killed(source: Path, target: Path) -> None:
        if target == folder / "run.json" and target.exists():  # the last time
            raise StoppedError
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(StoppedError):
            average(1, "runs")
    assert [path.name for path in folder.glob(".*json*")] == [".run.json"]  # as another process will call it
    average(2, "runs", ckpt_path="last")
    assert not list(folder.glob(".*json*"))


# ------------------------------------------------------------------------------------------------ from an older checkpoint


class StoppedError(Exception):
    pass


def stop() -> None:
    raise StoppedError


def test_later_checkpoints_stay_until_there_is_a_new_one(whole: Path) -> None:
    shutil.copytree(whole, "runs/version_0")
    run, chosen = Path("runs/version_0"), Path("runs/version_0/checkpoints/round_000002")
    with pytest.raises(StoppedError):
        fit("runs", chosen, callbacks=[At(3, stop)])
    assert [path.name for path in Checkpoints(run).paths()] == ["round_000002", "round_000003"]
    assert_same_end(run, whole)  # as if nobody had tried
    assert fit("runs", "last").run.round == 3
    assert_same_end(run, whole)
    fit("runs", chosen, 4)
    fit("longer", rounds=4)
    assert_same_end(run, Path("longer/version_0"))


def test_a_run_that_goes_on_otherwise_leaves_nothing_of_what_it_had_been() -> None:
    """Again and again from an older checkpoint, with other settings, and once without getting anywhere."""
    fit("runs", rounds=4)
    run = Path("runs/version_0")
    for seed, rounds in enumerate((4, 6, 7)):
        federation = new_federation(rounds, "runs", participation=1.0, evaluate_every=0)
        older = Checkpoints(run).paths()[0]
        shutil.copytree(run, "twin/version_0", dirs_exist_ok=True)
        if seed == 1:
            with pytest.raises(StoppedError):
                fit("runs", older, rounds=7, callbacks=[At(Checkpoints(run).load(older).manifest.round + 1, stop)])
        federation.fit(new_method("PFedLoRA", epochs=seed + 1), new_data(3, 90), older)
        new_federation(rounds, "twin", participation=1.0, evaluate_every=0).fit(
            new_method("PFedLoRA", epochs=seed + 1), new_data(3, 90), Path("twin") / older.relative_to("runs")
        )
        assert_same_end(run, Path("twin/version_0"))
        loaded = [Checkpoints(run).load(path) for path in Checkpoints(run).paths()]
        assert [one.manifest.round for one in loaded][-1] == rounds
        files = {path.name for path in (run / "clients").iterdir()}
        assert files == {record["file"] for one in loaded for record in one.clients.values()}
        shutil.rmtree("twin")
