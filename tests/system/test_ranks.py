"""A federation is one process, whatever started it."""

import os
from functools import partial

import lightning as L
import pytest
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_fed.cli import sweep
from lightning_fed.cli.trainer import build_trainer
from lightning_fed.errors import FederationError
from lightning_fed.methods import FedAvg
from lightning_fed.system.ranks import VARIABLES
from lightning_fed.testing.toys import Net, new_data, new_federation


class Own(LightningEnvironment):
    """Somebody's."""


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four tasks, with which Lightning by itself builds no Trainer; this is the second one."""
    for name, value in {"NTASKS": "4", "JOB_NAME": "study", "JOB_ID": "5", "PROCID": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    with pytest.raises(RuntimeError, match="--ntasks=4"):
        L.Trainer(accelerator="cpu", devices=1)


def test_the_tasks_of_a_job_are_not_the_trainers() -> None:
    settings = {"accelerator": "cpu", "devices": 1}
    assert type(build_trainer(settings)._accelerator_connector.cluster_environment) is LightningEnvironment
    half = build_trainer(settings | {"plugins": MixedPrecision("bf16-mixed", "cpu")})
    assert isinstance(half.precision_plugin, MixedPrecision)
    assert type(half._accelerator_connector.cluster_environment) is LightningEnvironment
    assert type(build_trainer(settings | {"plugins": [Own()]})._accelerator_connector.cluster_environment) is Own
    for trainer in (None, partial(L.Trainer, devices=1, plugins=[Own()]), partial(L.Trainer, devices=1)):
        assert len(new_federation(1, trainer=trainer).fit(FedAvg(Net()), new_data(2))) == 1


@pytest.mark.parametrize(("variable", "said"), [("RANK", "RANK=1"), ("SLURM_PROCID", "SLURM_PROCID=1")])
def test_a_rank_besides_the_first_is_refused(variable: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    with pytest.raises(FederationError, match=rf"rank 1 of several \({said}\), .* start it once, with one task"):
        new_federation(1).fit(FedAvg(Net()), new_data(2))


def test_a_sweep_and_its_runs_are_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "1")
    sweep.run(["sweep", "--config", "quickstart", "--dry_run"])
    assert not {*VARIABLES} & os.environ.keys()
