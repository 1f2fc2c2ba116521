"""What methods refuse when they are made: options that cannot be, and tasks for which they are not defined."""

import re
from typing import Any

import pytest
from tiny import data_for, new_federation, new_method

from lightning_fed.errors import FederationError

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("FML", {"alpha": -0.1}, "alpha is -0.1: give a weight in [0, 1]"),
    ("FML", {"beta": 1.1}, "beta is 1.1: give a weight in [0, 1]"),
    ("FML", {"alpha": float("nan")}, "alpha is nan: give a weight in [0, 1]"),
    *(("PFedLoRA", {"mu": mu}, "give a weight in [0, 1]") for mu in (-0.1, 1.1, float("nan"))),
    *(("FedHM", {"ratios": [1.0, ratio]}, "give rank ratios in (0, 1]") for ratio in (0, -0.5, 1.5, 8)),
    ("FedHM", {"ratios": []}, "FedHM got an empty list of sizes"),
    *(("HeteroFL", {"widths": [1.0, width]}, "give numbers in (0, 1]") for width in (0, -0.5, 1.5, 4)),
    *(("SplitMix", {"bases": 3, "budgets": [1, k]}, "give numbers of networks from 1 to bases, 3") for k in (0, -1, 4)),
    ("HeteroFL", {"assignment": "redrawn", "persistent": True}, "HeteroFL got persistent, but sizes are redrawn in each round"),
    ("FedRolex", {"persistent": True}, "FedRolex got persistent, but a client trains other channels in each round"),
    ("SplitMix", {"persistent": True}, "SplitMix got persistent, but a client trains other networks in each round"),
    *(
        (
            name,
            {"server_optimizer": 1},
            f"{name} got server_optimizer=1, but its server has one of its own: leave server_optimizer out",
        )
        for name in ("FedAdagrad", "FedAdam", "FedAvgM", "FedYogi", "PFedMe")
    ),
    ("FedDecomp", {"epochs": 5}, "FedDecomp got epochs=5, but it has lora_epochs and global_epochs: leave epochs out"),
    ("HETLoRA", {"r_min": 7, "r_max": 6}, "r_min is 7 and r_max 6"),
    *(("FedHMLoRA", {"ranks": ranks}, f"ranks is {ranks}: give at least one, and none below 1") for ranks in ([], [2, 0])),
    *(("SLoRA", {"density": share}, f"density is {share}: give the share") for share in (0.0, 1.5)),
    ("PFedGate", {"densities": []}, "densities is []: give at least one"),
    ("PFedGate", {"densities": [0.5, 1.5]}, "densities is [0.5, 1.5]: give at least one share in (0, 1]"),
    ("PFedGate", {"input_shape": (10,)}, "input_shape is [10]: give channels, height and width"),
    ("FedKD", {"energy_start": 0.0}, "energy_start is 0.0: give a share of the energy in (0, 1]"),
    ("FedKD", {"energy_end": 1.1}, "energy_end is 1.1: give a share of the energy in (0, 1]"),
    ("AdapterTuning", {"hidden": ()}, "AdapterTuning got an empty list of sizes"),
    ("PrefixTuning", {"hidden": (3, 5), "reparametrize": False}, "hidden is [3, 5] with reparametrize false"),
    ("DSFL", {"task": "regression"}, "DSFL got task 'regression', but it exchanges probabilities of classes"),
    ("FD", {"task": "regression"}, "FD got task 'regression', but its teachers are probabilities of classes"),
    ("FML", {"task": "regression"}, "FML got task 'regression', but its networks teach each other what probability each class has"),
    ("FedDF", {"task": "regression"}, "FedDF got task 'regression', but it distils probabilities of classes"),
    ("FedET", {"task": "regression"}, "FedET got task 'regression', but it distils probabilities of classes"),
    ("FedHM", {"task": "regression"}, "FedHM got task 'regression', but its mask of absent classes is one of a softmax"),
    ("FedKD", {"loss": abs}, "FedKD got the loss builtin_function_or_method, but it divides what its networks teach each other"),
    ("FedProto", {"task": "regression"}, "FedProto got task 'regression', but prototypes are those of classes"),
    ("FedRoD", {"task": "multilabel"}, "FedRoD got task 'multilabel', but its balanced softmax is a cross-entropy of classes"),
    ("PFedSD", {"task": "regression"}, "PFedSD got task 'regression', but it distils softmax probabilities"),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_what_cannot_be_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(FederationError, match=re.escape(message)):
        new_method(name, **options)


def test_without_the_mask_any_task_will_do() -> None:
    assert new_method("FedHM", task="regression", masked=False).task.name == "regression"


@pytest.mark.parametrize("name", ["DSFL", "FedAMP", "FedDyn", "FedHM", "FedKD", "HETLoRA"])
def test_a_weighting_that_is_not_the_servers_is_refused(name: str) -> None:
    with pytest.raises(FederationError, match=f"{name}'s server has weighting='uniform', but got weighting='examples'"):
        new_federation(1).dry_run(new_method(name, weighting="examples"), data_for(name))
