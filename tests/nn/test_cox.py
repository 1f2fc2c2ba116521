"""Cox's partial likelihood against its definition, summed in loops."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_fed.errors import FederationError
from lightning_fed.nn.cox import CoxLoss, Ties


def batch(size: int = 9, times: int = 4) -> tuple[Tensor, Tensor]:
    """Risks, and events and times of which several are the same."""
    generator = torch.Generator().manual_seed(size)
    event = torch.randint(0, 2, (size,), generator=generator)
    time = torch.randint(0, times, (size,), generator=generator)
    return torch.randn(size, dtype=torch.float64, generator=generator), torch.stack([event, time], dim=1).double()


def by_loops(risks: list[float], targets: list[list[float]], ties: Ties) -> float:
    total, seen = 0.0, dict.fromkeys([time for _, time in targets], 0)
    for i, (event, time) in enumerate(targets):
        if not event:
            continue
        if ties == "order":
            at_risk = sum(math.exp(risks[j]) for j, (_, t) in enumerate(targets) if t > time or (t == time and j <= i))
        else:
            at_risk = sum(math.exp(risks[j]) for j, (_, t) in enumerate(targets) if t >= time)
        if ties == "efron":
            dying = [math.exp(risks[j]) for j, (e, t) in enumerate(targets) if e and t == time]
            at_risk -= seen[time] / len(dying) * sum(dying)
            seen[time] += 1
        total += math.log(at_risk) - risks[i]
    return total / len(risks)


@pytest.mark.parametrize("ties", ["breslow", "efron", "order"])
@pytest.mark.parametrize("size", [1, 2, 9, 40])
def test_it_is_the_sum_over_risk_sets(ties: Ties, size: int) -> None:
    risks, targets = batch(size)
    assert CoxLoss(ties)(risks, targets).item() == pytest.approx(by_loops(risks.tolist(), targets.tolist(), ties))


@pytest.mark.parametrize("ties", ["breslow", "efron"])
def test_it_is_statsmodels_likelihood_and_score(ties: Ties) -> None:
    """With a coefficient for each example, its risk, the score is the gradient in the risks."""
    hazards = pytest.importorskip("statsmodels.duration.hazard_regression")
    risks, targets = batch(30)
    model = hazards.PHReg(targets[:, 1].numpy(), np.eye(30), status=targets[:, 0].numpy(), ties=ties)
    loss = CoxLoss(ties)(risks.requires_grad_(), targets)
    [gradient] = torch.autograd.grad(loss, risks)
    values = risks.detach().numpy()
    assert loss.item() * 30 == pytest.approx(-model.loglike(values))
    assert gradient.numpy() * 30 == pytest.approx(-model.score(values), abs=1e-7)


def test_without_ties_all_three_are_one() -> None:
    risks, targets = batch()
    targets[:, 1] = torch.randperm(len(targets)).double()
    assert len({round(CoxLoss(ties)(risks, targets).item(), 12) for ties in ("breslow", "efron", "order")}) == 1


@pytest.mark.parametrize("ties", ["breslow", "efron", "order"])
def test_only_differences_of_risks_matter(ties: Ties) -> None:
    risks, targets = batch()
    assert torch.allclose(CoxLoss(ties)(risks + 500, targets), CoxLoss(ties)(risks, targets))
    assert torch.isfinite(CoxLoss(ties)((risks * 1e4).float(), targets.float()))


@pytest.mark.parametrize("ties", ["breslow", "efron", "order"])
def test_who_has_no_competitor_has_no_gradient_at_all(ties: Ties) -> None:
    """Not a small one: the first step of Adam has the same size whatever the gradient is."""
    risks = torch.tensor([0.3, -1.7, 0.9, 2.2], requires_grad=True)
    only_the_last = torch.tensor([[0.0, 1], [0, 2], [0, 3], [1, 4]])
    loss = CoxLoss(ties)(risks, only_the_last)
    loss.backward()
    assert risks.grad is not None
    assert (loss.item(), risks.grad.tolist()) == (0.0, [0.0] * 4)


@pytest.mark.parametrize("ties", ["breslow", "efron", "order"])
def test_without_events_and_alone_all_is_exactly_zero(ties: Ties) -> None:
    for risks, targets in (
        (torch.randn(5), torch.tensor([[0.0, k] for k in range(5)])),
        (torch.randn(1), torch.tensor([[1.0, 3]])),
    ):
        risks.requires_grad_()
        loss = CoxLoss(ties)(risks, targets)
        loss.backward()
        assert risks.grad is not None
        assert loss.item() == 0
        assert not risks.grad.any()


def test_another_way_of_ties_is_refused() -> None:
    with pytest.raises(FederationError, match="give one of breslow, efron, order"):
        CoxLoss("exact")  # type: ignore[arg-type]
