"""A continued run ends as one that was never stopped."""

from functools import partial
from pathlib import Path

import pytest
import torch
from tiny import Net, new_data, new_federation, new_method

from lightning_fed.data import IID, InMemory
from lightning_fed.engines import InProcess
from lightning_fed.errors import FederationError
from lightning_fed.federation.federation import Federation


def fit(method: str, rounds: int, run_dir: str, ckpt_path: Path | str | None = None) -> Federation:
    """Rounds in which half of the clients take part, with momentum, two batches a client at least."""
    federation = new_federation(rounds, run_dir, participation=0.5, evaluate_every=1, store_limit_mb=0.004)
    federation.fit(new_method(method, epochs=2), new_data(4, 120), ckpt_path)
    return federation


def test_a_run_folder_is_a_checkpoint_too(monkeypatch: pytest.MonkeyPatch) -> None:
    fit("PFedLoRA", 1, "runs")
    assert fit("PFedLoRA", 2, "runs", ckpt_path="runs/version_0").run.round == 2
    for rounds, folder, ckpt_path in ((3, "runs/version_0", "."), (4, "checkpoints", "round_000003"), (5, "round_000004", ".")):
        monkeypatch.chdir(folder)
        assert fit("PFedLoRA", rounds, "runs", ckpt_path).run.round == rounds


def test_the_folder_of_runs_may_have_the_name_of_checkpoints() -> None:
    fit("FedAvg", 1, "checkpoints")
    for rounds, ckpt_path in ((2, "last"), (3, "checkpoints/version_0")):
        continued = fit("FedAvg", rounds, "checkpoints", ckpt_path).run
        assert (continued.round, continued.folder) == (rounds, Path("checkpoints/version_0"))


def test_last_is_the_newest_run() -> None:
    fit("FedAvg", 1, "runs")
    fit("FedAvg", 2, "runs")
    assert fit("FedAvg", 3, "runs", ckpt_path="last").run.folder == Path("runs/version_1")


def test_last_without_a_run_starts_one() -> None:
    assert fit("FedAvg", 1, "runs", ckpt_path="last").run.folder == Path("runs/version_0")


def test_a_finished_run_is_left_as_it_is() -> None:
    fit("FedAvg", 2, "runs")
    before = {path: path.read_bytes() for path in Path("runs/version_0/checkpoints").rglob("*.*")}
    assert len(fit("FedAvg", 2, "runs", ckpt_path="last").run.history) == 2
    assert {path: path.read_bytes() for path in Path("runs/version_0/checkpoints").rglob("*.*")} == before


def test_last_is_the_newest_run_of_the_method() -> None:
    fit("FedAvg", 1, "runs")
    fit("Standalone", 1, "runs")
    assert fit("FedAvg", 2, "runs", ckpt_path="last").run.folder == Path("runs/version_0")
    assert fit("Standalone", 2, "runs", ckpt_path="last").run.folder == Path("runs/version_1")
    assert fit("FedPer", 1, "runs", ckpt_path="last").run.folder == Path("runs/version_2")


def test_a_run_without_a_checkpoint_does_not_hide_the_one_before() -> None:
    fit("FedAvg", 1, "runs")
    new_federation(1, "runs", checkpoint_every=0).fit(new_method("FedAvg"), new_data())
    assert fit("FedAvg", 2, "runs", ckpt_path="last").run.folder == Path("runs/version_0")


def test_a_run_that_finishes_no_round_leaves_nothing() -> None:
    method = new_method("FedAvg", optimizer=partial(torch.optim.SGD, lr=1e30))
    with pytest.raises(FederationError, match=r"diverged|not finite"):
        new_federation(3, "runs").fit(method, new_data())
    assert list(Path("runs").iterdir()) == []


def test_what_was_killed_before_its_first_round_is_named_and_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    fit("FedAvg", 1, "runs")
    new_federation(1, "runs", checkpoint_every=0).fit(new_method("FedAvg"), new_data())
    assert "No round was finished" not in capsys.readouterr().out
    Path("runs/version_2/checkpoints").mkdir(parents=True)
    Path("runs/version_2/events.out.tfevents.0").write_bytes(b"")
    assert fit("FedAvg", 2, "runs").run.folder == Path("runs/version_3")
    said = capsys.readouterr().out
    assert (
        "No round was finished in runs/version_2: a run was killed before that, or is still in its first. Starting a new run"
        in said
    )
    assert fit("FedAvg", 2, "runs", ckpt_path="runs/version_0").run.folder == Path("runs/version_0")
    assert "No round was finished" not in capsys.readouterr().out


def test_another_path_is_refused() -> None:
    with pytest.raises(FederationError, match="No checkpoint at nowhere: give the folder of a run"):
        fit("FedAvg", 1, "runs", ckpt_path="nowhere")


@pytest.mark.parametrize(
    ("method", "seed", "clients", "message"),
    [
        ("Standalone", 0, 4, "was made with method = 'FedAvg', this run has 'Standalone'"),
        ("FedAvg", 1, 4, "was made with seed = 0, this run has 1"),
        ("FedAvg", 0, 3, "was made with clients = 4, this run has 3"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(method: str, seed: int, clients: int, message: str) -> None:
    new_federation(1, "runs").fit(new_method("FedAvg"), new_data(4))
    federation = new_federation(2, "runs", seed=seed)
    with pytest.raises(FederationError, match=message):
        federation.fit(new_method(method, backbone=Net), new_data(clients), ckpt_path="runs/version_0")


@pytest.mark.parametrize("changed", ["split", "inputs"])
def test_a_checkpoint_of_other_data_is_refused(changed: str) -> None:
    def data(seed: int = 0, more: float = 0.0) -> InMemory:
        images = torch.rand(40, 3, 4, 4, generator=torch.Generator().manual_seed(0)) + more
        return InMemory(images, torch.arange(40) % 4, num_clients=2, partition=IID(), seed=seed)

    new_federation(1, "runs").fit(new_method("FedAvg"), data())
    other = data(seed=1) if changed == "split" else data(more=0.1)
    with pytest.raises(FederationError, match=r"was made with data = .*: use the .* of that run, or fit a new run"):
        new_federation(2, "runs").fit(new_method("FedAvg"), other, ckpt_path="last")


def test_a_checkpoint_of_another_network_is_refused() -> None:
    new_federation(1, "runs").fit(new_method("FedAvg"), new_data())
    with pytest.raises(FederationError, match=r"server state of checkpoint .* has 'backbone.fc1.weight' of shape"):
        new_federation(2, "runs").fit(new_method("FedAvg", backbone=lambda c: Net(c, hidden=9)), new_data(), ckpt_path="last")


def test_a_checkpoint_made_with_other_threads_gives_a_warning_line(capsys: pytest.CaptureFixture[str]) -> None:
    new_federation(1, "runs", engine=InProcess(threads=2)).fit(new_method("FedAvg"), new_data())
    new_federation(2, "runs", engine=InProcess(threads=2)).fit(new_method("FedAvg"), new_data(), ckpt_path="last")
    assert "torch threads" not in capsys.readouterr().out
    federation = new_federation(3, "runs", engine=InProcess())
    federation.fit(new_method("FedAvg"), new_data(), ckpt_path="last")
    [line] = [line for line in capsys.readouterr().out.splitlines() if "torch threads" in line]
    assert line.startswith("Checkpoint runs/version_0/checkpoints/round_000002 was made with 2 torch threads, this run has 1: ")
    assert federation.run.round == 3


def test_what_a_checkpoint_knows_of_threads_is_those_of_the_run_that_made_it(capsys: pytest.CaptureFixture[str]) -> None:
    new_federation(1, "runs", engine=InProcess(threads=2)).fit(new_method("FedAvg"), new_data())
    new_federation(2, "runs").fit(new_method("FedAvg"), new_data(), ckpt_path="last")
    assert "torch threads" in capsys.readouterr().out
    new_federation(3, "runs").fit(new_method("FedAvg"), new_data(), ckpt_path="last")
    assert "torch threads" not in capsys.readouterr().out


def test_a_chosen_checkpoint_is_continued_where_it_is() -> None:
    fit("FedAvg", 2, "runs")
    run = fit("FedAvg", 2, "elsewhere", "runs/version_0/checkpoints/round_000001").run
    assert run.folder == Path("runs/version_0").absolute()
    assert not Path("elsewhere").exists()
