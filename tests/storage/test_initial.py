"""Runs that begin with the network of another one."""

import re
from pathlib import Path

import pytest
import torch
from tiny import Net, WideNet, distance, new_data, new_federation, new_method, new_trainer, same, sgd

from lightning_fed.core.module import FederatedModule
from lightning_fed.data import IID
from lightning_fed.errors import FederationError
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import FML, Ditto, FedAvg, LGFedAvg, SplitMix, Standalone
from lightning_fed.methods.families.adapter_module import AdapterModule
from lightning_fed.storage.client_store import write_state
from lightning_fed.storage.run_folder import load_checkpoint
from lightning_fed.tensors import State


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    """A run of FedAvg with two clients, and what its server has."""
    run_dir = tmp_path_factory.mktemp("fedavg")
    federation = new_federation(2, run_dir, trainer=new_trainer)
    federation.fit(FedAvg(Net, 4, optimizer=sgd), new_data(2))
    return run_dir / "version_0", federation.run.server.state_dict()


def played(model: FederatedModule, init_from: Path | None, **options: object) -> Federation:
    federation = new_federation(1, init_from=init_from, **options)
    federation.fit(model, new_data(2))
    return federation


@pytest.mark.parametrize("method", [LGFedAvg, Standalone, FedAvg, Ditto, FML])
def test_everything_starts_exactly_there(trained: tuple[Path, State], method: type[FederatedModule]) -> None:
    folder, network = trained
    # Nobody trains, and the mean of two equal states is that state.
    federation = played(method(Net, 4, epochs=0), folder)
    for client in (0, 1):
        state = federation.client_module(client).state_dict()
        assert same({name: tensor for name, tensor in state.items() if name.startswith("backbone.")}, network)
        personal = {name.replace("personal.", "backbone."): t for name, t in state.items() if name.startswith("personal.")}
        assert not personal or same(personal, network)
        shared = {name.replace("shared.", "backbone."): t for name, t in state.items() if name.startswith("shared.")}
        assert not shared or same(shared, network)
    fresh = played(method(Net, 4, epochs=0), None)
    assert distance(fresh.client_module(0).state_dict(), federation.client_module(0).state_dict()) > 0.1


def test_it_goes_on_as_the_other_run_would_have(trained: tuple[Path, State]) -> None:
    folder, _ = trained
    begun = new_federation(1, init_from=folder, seed=5)
    begun.fit(FedAvg(Net, 4, optimizer=sgd), new_data(2))
    model = FedAvg(Net, 4, optimizer=sgd)
    model.configure_model()
    model.load_shared_state(trained[1])
    continued = new_federation(1, seed=5)
    continued.fit(model, new_data(2))  # whose networks exist already
    assert same(begun.run.server.state_dict(), continued.run.server.state_dict())


def test_clients_that_never_took_part_start_there_too(trained: tuple[Path, State]) -> None:
    federation = new_federation(1, init_from=trained[0], participation=0.5)
    federation.fit(LGFedAvg(Net, 4, optimizer=sgd), new_data(2))
    [idle] = {0, 1} - federation.run.last_rounds.keys()
    state = federation.client_module(idle).state_dict()
    private = {name for name in state if not name.startswith("backbone.head.")}
    assert same({name: state[name] for name in private}, {name: trained[1][name] for name in private})
    assert not torch.equal(state["backbone.head.weight"], trained[1]["backbone.head.weight"])


def test_a_continued_run_starts_there_too(trained: tuple[Path, State], tmp_path: Path) -> None:
    def fit(rounds: int, run_dir: str, ckpt_path: str | None = None) -> State:
        federation = new_federation(rounds, tmp_path / run_dir, init_from=trained[0], participation=0.5)
        federation.fit(LGFedAvg(Net, 4, optimizer=sgd), new_data(2), ckpt_path)
        return federation.client_module(0).state_dict() | {"other": federation.client_module(1).state_dict()["backbone.fc1.weight"]}

    whole = fit(2, "whole")
    fit(1, "stopped")
    assert same(fit(2, "stopped", "last"), whole)


@pytest.mark.parametrize("where", ["checkpoint", "best", "file"])
def test_where_it_can_come_from(trained: tuple[Path, State], tmp_path: Path, where: str) -> None:
    folder, network = trained
    if where == "file":  # as export writes it
        path = tmp_path / "model.safetensors"
        write_state(path, {name.removeprefix("backbone."): tensor for name, tensor in network.items()})
    else:
        path = folder / "best" if where == "best" else folder / "checkpoints" / "round_000001"
    state = played(FedAvg(Net, 4, epochs=0), path).run.server.state_dict()
    assert same(state, network if where == "file" else load_checkpoint(path)[0].server)


def test_another_split_of_the_data_is_told(trained: tuple[Path, State], capsys: pytest.CaptureFixture[str]) -> None:
    played(FedAvg(Net, 4, epochs=0), trained[0])
    assert capsys.readouterr().out == ""
    new_federation(1, init_from=trained[0]).fit(FedAvg(Net, 4, epochs=0), new_data(2, partition=IID()))
    told = capsys.readouterr().out
    assert "has other data, clients, or another split: it may have been trained on examples that this run tests on" in told
    for run_dir, init_from in (("runs", None), (None, "runs/version_0")):  # the same clients take no part in either
        new_federation(1, run_dir, unseen=[0], init_from=init_from).fit(FedAvg(Net, 4, epochs=0), new_data(2))
    assert capsys.readouterr().out == ""


class TestRefused:
    def test_another_network(self, trained: tuple[Path, State]) -> None:
        said = f"The network of init_from={trained[0]} has 'fc1.weight' of shape (5, 48), expected (7, 48). Give weights of a Wide"
        with pytest.raises(FederationError, match=re.escape(said)):
            played(FedAvg(WideNet, 4), trained[0])

    def test_a_part_of_a_network(self, tmp_path: Path) -> None:
        new_federation(1, tmp_path).fit(new_method("FedPer"), new_data(2))
        with pytest.raises(FederationError, match=r"The network of .* lacks 'head.bias' and 1 more tensor\."):
            played(FedAvg(Net, 4), tmp_path / "version_0")

    def test_none_at_all(self, tmp_path: Path) -> None:
        new_federation(1, tmp_path).fit(Standalone(Net, 4), new_data(2))
        with pytest.raises(FederationError, match=r"the server of Standalone in .* has no network to start from: give a run"):
            played(FedAvg(Net, 4), tmp_path / "version_0")

    def test_what_is_no_file_of_tensors(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        for content in (None, b"no tensors"):
            if content:
                path.write_bytes(content)
            with pytest.raises(FederationError, match="init_from: could not read"):
                played(FedAvg(Net, 4), path)
        with pytest.raises(FederationError, match="init_from: No checkpoint at"):
            played(FedAvg(Net, 4), tmp_path)

    @pytest.mark.parametrize("name", ["HeteroFL", "FedRolex"])
    def test_one_width_for_many(self, trained: tuple[Path, State], name: str) -> None:
        with pytest.raises(FederationError, match=f"has one width, but clients of {name} have several: leave init_from out"):
            played(new_method(name), trained[0])

    def test_one_network_for_many(self, trained: tuple[Path, State]) -> None:
        with pytest.raises(
            FederationError, match="SplitMix trains networks that start from different weights: leave init_from out"
        ):
            played(SplitMix(Net, bases=2, budgets=[2, 1], num_classes=4), trained[0])


def test_networks_that_are_shared_in_memory_start_there_too(tmp_path: Path) -> None:
    tuned = new_method("HOMLoRA")
    assert isinstance(tuned, AdapterModule)
    tuned.configure_model()
    body = {
        name: tensor + 1 for name, tensor in new_method("HOMLoRA").networks.frozen[0].copy(tuned.num_classes).state_dict().items()
    }
    begun = tuned.with_initial_weights(body)
    begun.configure_model()
    found = begun.networks.frozen[0].copy(tuned.num_classes).state_dict()
    assert same(found, body)
