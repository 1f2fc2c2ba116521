"""What stays on disk of a finished run."""

import gc
from pathlib import Path

import pytest
from tiny import Stop, final_checkpoint, new_data, new_federation, new_method, same

from lightning_fed.errors import FederationError
from lightning_fed.federation.federation import Federation
from lightning_fed.storage.checkpoint import Keep

FOLDER = Path("runs/version_0")


def fit(keep: Keep, rounds: int = 3, method: str = "PFedLoRA", ckpt_path: str | None = None, **options: object) -> Federation:
    federation = new_federation(rounds, "runs", keep=keep, participation=0.5, **{"evaluate_every": 1} | options)
    federation.fit(new_method(method), new_data(4, 80), ckpt_path)
    return federation


def names(folder: str) -> set[str]:
    return {path.name for path in (FOLDER / folder).glob("*")}


def test_all_is_what_a_run_has_before_its_end() -> None:
    fit("all")
    assert {"round_000002", "round_000003"} <= names("checkpoints")
    assert len(names("clients")) >= 4


@pytest.mark.parametrize("method", ["PFedLoRA", "FedAMP"])  # clients have states, or the server has some for them
def test_the_last_one_is_as_it_was_and_has_all_it_needs(method: str) -> None:
    federation = fit("last", method=method)
    assert names("checkpoints") == {"round_000003"}
    round, _, history, server, clients = final_checkpoint(FOLDER)
    assert (round, len(history)) == (3, 3)
    assert same(server, federation.run.server.state_dict())
    assert all(same(state, federation.run.store.get(client)) for client, state in clients.items())
    checkpoint, _ = federation.run.checkpoints.latest()  # type: ignore[union-attr]
    assert names("clients") == {record["file"] for record in (*checkpoint.clients.values(), *checkpoint.client_state.values())}
    before = federation.test(new_method(method), new_data(4, 80))
    assert before["after/test_accuracy/mean"] == history[-1]["after/test_accuracy/mean"]


def test_a_run_goes_on_from_the_last_one_as_if_all_had_been_kept() -> None:
    fit("last", rounds=2)
    fit("last", rounds=4, ckpt_path="last")
    FOLDER.parent.rename("kept")
    fit("all", rounds=4)
    one, other = final_checkpoint(Path("kept/version_0")), final_checkpoint(FOLDER)
    assert one[:3] == other[:3]
    assert same(one[3], other[3])
    assert names("checkpoints") > {"round_000004"}


def test_of_none_the_tables_stay() -> None:
    federation = fit("none")
    assert {path.name for path in FOLDER.iterdir()} == {".lock", "clients.csv", "metrics.csv", "run.json"}
    assert federation.client_module(0) is not None  # in memory still
    with pytest.raises(FederationError, match=r"There is no checkpoint of PFedLoRA in runs: .* unless keep is none"):
        federation.test(new_method("PFedLoRA"), new_data(4, 80))


@pytest.mark.often(1)
@pytest.mark.parametrize("method", ["PFedLoRA", "FedAMP"])
def test_of_none_what_is_on_disk_only_can_be_asked_for_as_long_as_the_run_is_there(method: str) -> None:
    federation = fit("none", method=method, store_limit_mb=1e-6)
    assert names("checkpoints") == names("index") == names("history") == set()
    assert names("clients")
    expected = fit("all", method=method).run
    for client in expected.store:
        ours, theirs = (one.client_module(client).state_dict() for one in (federation, expected))
        assert same(ours, theirs)
    del federation
    gc.collect()
    assert not (FOLDER / "clients").exists()


def test_a_run_that_is_not_finished_keeps_what_it_goes_on_from() -> None:
    with pytest.raises(KeyboardInterrupt):
        fit("none", callbacks=[Stop(2)])
    assert names("checkpoints") == {"round_000001"}
    assert len(fit("none", ckpt_path="last").run.history) == 3
    assert names("checkpoints") == names("clients") == set()


@pytest.mark.parametrize("keep", ["all", "last"])
def test_without_checkpoints_there_is_nothing_to_keep(keep: Keep) -> None:
    federation = fit(keep, checkpoint_every=0, store_limit_mb=1e-6)
    assert names("checkpoints") == set()
    assert names("clients")
    del federation
    gc.collect()
    assert not (FOLDER / "clients").exists()


def test_of_a_run_that_fails_before_its_first_checkpoint_the_tables_stay() -> None:
    with pytest.raises(KeyboardInterrupt):
        fit("all", checkpoint_every=3, store_limit_mb=1e-6, callbacks=[Stop(2)])
    gc.collect()
    assert {path.name for path in FOLDER.iterdir()} == {".lock", "clients.csv", "metrics.csv", "run.json"}


def test_a_run_can_be_asked_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit("all")
    federation = fit("all", rounds=4, ckpt_path="last", store_limit_mb=1e-6)
    expected, _ = (federation.client_module(client).state_dict() for client in (0, 1))  # only the last one is in memory
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert same(federation.client_module(0).state_dict(), expected)


def test_of_none_later_rounds_keep_their_files_as_long_as_they_have_checkpoints() -> None:
    fit("all", rounds=4)
    fit("none", rounds=3, ckpt_path="runs/version_0/checkpoints/round_000003")
    gc.collect()
    assert names("checkpoints") == {"round_000004"}
    assert fit("all", rounds=5, ckpt_path="last").run.round == 5


def test_what_goes_with_the_run_is_its_own_wherever_one_is_by_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = fit("none", store_limit_mb=1e-6)
    there, elsewhere = FOLDER.absolute() / "clients", tmp_path / "elsewhere"
    (elsewhere / FOLDER / "clients").mkdir(parents=True)
    monkeypatch.chdir(elsewhere)
    del federation
    gc.collect()
    assert not there.exists()
    assert (FOLDER / "clients").exists()
