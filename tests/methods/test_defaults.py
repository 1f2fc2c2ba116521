"""Defaults that a method's page takes from its paper. Some of public code make another method of it (mu 0, beta 0)."""

from typing import Any

import pytest
from tiny import CLASSES, Net

import lightning_fed.methods
from lightning_fed.core import FineTuning, ServerSGD


@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        ("APFL", {"initial_alpha": 0.5}),
        ("PFedMe", {"lam": 15.0, "inner_steps": 5, "server_optimizer": ServerSGD(1.0), "weighting": "uniform"}),
        ("PerFedAvg", {"hessian": "exact", "batches_per_step": 2, "steps": 20, "weighting": "uniform"}),
        ("FedBABU", {"fine_tuning": FineTuning(epochs=5)}),
        ("FedALA", {"mixed_layers": 1, "weight_lr": 1.0, "weight_epochs": 1, "first_weight_epochs": 11}),
        ("MOON", {"mu": 5.0, "temperature": 0.5, "cut": "features"}),
        ("FedDyn", {"alpha": 0.1, "weighting": "uniform"}),
        ("FedNova", {"mu": 0.0, "weighting": "examples"}),
        ("Floco", {"corners": 10, "tau": 250, "rho": 0.1}),
        ("FedAS", {"alignment_lr": 0.01, "alignment_epochs": 1, "by_fisher": True}),
    ],
)
def test_defaults_are_the_papers(name: str, defaults: dict[str, Any]) -> None:
    method = getattr(lightning_fed.methods, name)(Net, CLASSES)
    assert {option: getattr(method, option) for option in defaults} == defaults
