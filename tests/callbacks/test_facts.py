"""What a run says of itself for those who read its tables."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import CLASSES, new_data, new_federation, new_method
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy

from lightning_fed.core import FineTuning


class ZeroOne(MulticlassAccuracy):
    """The share of wrong answers."""

    higher_is_better = False

    def __init__(self) -> None:
        super().__init__(CLASSES, average="micro")

    def compute(self) -> Tensor:
        return 1 - super().compute()


@pytest.mark.parametrize(
    ("method", "options", "monitor", "training", "fine_tuning"),
    [
        (
            "FedAvg",
            {"epochs": 2, "metrics": {"zero_one": ZeroOne()}},
            "after/test_accuracy/mean",
            [{"phase": "local", "epochs": 2}],
            [],
        ),
        (
            *("FedAvgFT", {"fine_tuning": FineTuning(epochs=3, when="last")}, "after/test_accuracy/mean"),
            [{"phase": "local", "epochs": 1}],
            [{"phase": "fine_tune", "epochs": 3}],
        ),
        (
            *("FedDecomp", {}, "after/test_accuracy/mean"),
            *([{"phase": "low_rank", "epochs": 2}, {"phase": "full_rank", "epochs": 3}], []),
        ),
        ("HeteroFL", {}, "global/test_accuracy", [{"phase": "local", "epochs": 1}], []),
    ],
)
def test_headline_and_phases(method: str, options: Any, monitor: str, training: Any, fine_tuning: Any) -> None:
    federation, data = new_federation(1, run_dir="runs"), new_data(partition_seed=3)
    history = federation.fit(new_method(method, **options), data)
    facts = json.loads(Path("runs/version_0/run.json").read_text())
    played = {"method": method, "seed": 0, "partition_seed": 3, "data": data.fingerprint(), "natural_clients": False, "rounds": 1}
    measured = {
        "clients": data.num_clients,
        "evaluate_every": federation.run.evaluate_every,
        "monitor": monitor,
        "higher_is_better": True,
        "lower_is_better": list(options.get("metrics", ())),
    }
    when = "last" if fine_tuning else "always"
    work = {"training": training, "fine_tuning": fine_tuning, "fine_tuning_when": when}
    assert facts == played | measured | work | {"finished": True}
    assert monitor in history[-1]
