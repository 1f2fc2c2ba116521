"""Yes or no, and times to an event: metrics against their definitions, and federations that learn them."""

import math
from typing import Any

import pytest
import torch
from tiny import new_federation
from torch import Tensor

from lightning_fed.core import FederatedModule
from lightning_fed.data import IID, InMemory
from lightning_fed.data.batches import INPUT, TARGETS
from lightning_fed.errors import FederationError
from lightning_fed.methods import FedAvg
from lightning_fed.models import MLP, LinearModel
from lightning_fed.tasks import AUROC, ConcordanceIndex


class Patients(InMemory):
    """Three numbers each, the first of which says how it ends."""

    num_labels = 2
    predicts_labels = False

    def __init__(self, problem: Any, size: int = 60) -> None:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(size, 3, generator=generator)
        sick = (x[:, 0] > 0).long()
        time = (100 * (-x[:, 0]).exp()).round()
        event = (torch.rand(size, generator=generator) < 0.7).float()
        targets = torch.stack([event, time], dim=1) if problem == "survival" else sick.float()
        super().__init__({INPUT: x, TARGETS: targets}, sick, 1, num_clients=2, partition=IID(), batch_size=8, test_share=0.3)
        self.problem = problem


def in_pairs(risks: list[float], targets: list[list[float]]) -> float:
    right = pairs = 0.0
    for i, (event, time) in enumerate(targets):
        for j, (other, later) in enumerate(targets):
            if event and (time < later or (time == later and not other)):
                pairs += 1
                right += 1 if risks[i] > risks[j] else 0.5 if risks[i] == risks[j] else 0
    return right / pairs if pairs else math.nan


def c_index(risks: Tensor, targets: Tensor, batch: int = 7) -> float:
    metric = ConcordanceIndex()
    for part in zip(risks.split(batch), targets.split(batch), strict=True):
        metric.update(*part)
    return metric.compute().item()


def test_the_c_index_is_the_share_of_pairs_not_a_mean_over_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    risks = torch.randint(0, 9, (50,), generator=generator).float()
    targets = torch.stack(
        [torch.randint(0, 2, (50,), generator=generator), torch.randint(0, 12, (50,), generator=generator)], 1
    ).float()
    expected = in_pairs(risks.tolist(), targets.tolist())
    assert c_index(risks, targets) == pytest.approx(expected)
    monkeypatch.setattr("lightning_fed.tasks.metrics.PAIRS_AT_ONCE", 1)
    assert c_index(risks, targets) == pytest.approx(expected)


def test_turned_risks_turn_it_and_equal_ones_are_a_half() -> None:
    risks, targets = torch.randn(20), torch.stack([torch.ones(20), torch.randperm(20).float()], 1)
    assert c_index(-risks, targets) == pytest.approx(1 - c_index(risks, targets))
    assert c_index(torch.zeros(20), targets) == 0.5
    assert c_index(-targets[:, 1], targets) == 1


@pytest.mark.parametrize("targets", [[[0, 1], [0, 2]], [[1, 2], [0, 1]], [[1, 1], [1, 1]]])
def test_without_a_pair_it_is_no_number(targets: list[list[float]]) -> None:
    """Nobody has an event; the only one with an event was seen longest; two events at one time."""
    assert math.isnan(c_index(torch.tensor([0.1, 0.2]), torch.tensor(targets).float()))


def test_of_one_class_the_area_under_the_curve_is_no_number() -> None:
    metric = AUROC()
    metric.update(torch.tensor([0.2, 0.7]), torch.tensor([1, 1]))
    assert math.isnan(metric.compute())
    metric.update(torch.tensor([0.5]), torch.tensor([0]))
    assert metric.compute() == 0.5


@pytest.mark.often(1)
@pytest.mark.parametrize(("problem", "metric", "least"), [("binary", "accuracy", 0.85), ("survival", "c_index", 0.85)])
def test_a_federation_learns_it(problem: Any, metric: str, least: float) -> None:
    federation = new_federation(15)
    history = federation.fit(FedAvg(of_three, optimizer=quick), Patients(problem))
    assert history[-1][f"after/test_{metric}/mean"] > least
    assert federation.run.metric == metric


def test_other_metrics_of_yes_or_no() -> None:
    for metric in ("f1", "auroc"):
        history = new_federation(6).fit(FedAvg(of_three, optimizer=quick, metric=metric), Patients("binary"))
        assert 0.5 < history[-1][f"after/test_{metric}/mean"] <= 1


def of_three(num_classes: int) -> LinearModel:
    return LinearModel(num_classes, 3)


def quick(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3)


def test_one_label_of_several_is_refused_in_a_line() -> None:
    model = FedAvg(lambda num_classes: MLP(num_classes, 3), task="multilabel")
    with pytest.raises(FederationError, match="task is 'multilabel', but there is one label: give task 'binary'"):
        new_federation(1).fit(model, Patients("multilabel"))


def test_targets_of_another_shape_are_refused_in_a_line() -> None:
    model: FederatedModule = FedAvg(lambda num_classes: MLP(num_classes, 3), task="survival")
    with pytest.raises(FederationError, match="a risk per example is expected"):
        new_federation(1).fit(model, Patients("binary"))
