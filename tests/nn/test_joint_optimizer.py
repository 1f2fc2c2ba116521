"""Optimizers that step together."""

import copy
from functools import partial

import pytest
import torch
from tiny import new_trainer
from torch import Tensor, nn

from lightning_fed.core.phase import Phase
from lightning_fed.core.phased_module import PhasedModule
from lightning_fed.engines.turn_loop import QUIET
from lightning_fed.errors import FederationError
from lightning_fed.nn import jointly

sgd, adam = partial(torch.optim.SGD, lr=0.1, momentum=0.9), partial(torch.optim.AdamW, lr=0.01)


def networks() -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(3)
    return nn.Linear(3, 2), nn.Linear(2, 1)


def step(optimizers: list[torch.optim.Optimizer], *parts: nn.Linear) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    x = torch.arange(12.0).view(4, 3)
    for part in parts:
        x = part(x)
    x.square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()


def values(*parts: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for part in parts for p in part.parameters()]


def joint(*parts: nn.Linear) -> torch.optim.Optimizer:
    first, second = (list(part.parameters()) for part in parts)
    return jointly((sgd, first), (adam, second))([*first, *second])


def test_each_steps_in_its_own_way() -> None:
    ours, theirs = networks(), networks()
    together, apart = [joint(*ours)], [sgd(theirs[0].parameters()), adam(theirs[1].parameters())]
    for _ in range(3):
        step(together, *ours)
        step(apart, *theirs)
    assert all(map(torch.equal, values(*ours), values(*theirs)))


def test_a_state_goes_on_where_it_was() -> None:
    ours = networks()
    optimizer = joint(*ours)
    step([optimizer], *ours)
    kept, theirs = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(ours)
    other = joint(*theirs)
    other.load_state_dict(kept)
    step([optimizer], *ours)
    step([other], *theirs)
    assert all(map(torch.equal, values(*ours), values(*theirs)))


def test_schedules_reach_every_group() -> None:
    ours = networks()
    optimizer = joint(*ours)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    step([optimizer], *ours)
    schedule.step()
    before = values(ours[0])
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.005]
    optimizer.state.clear()  # momentum, as at the start of a phase
    step([optimizer], *ours)
    for was, parameter in zip(before, ours[0].parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.detach(), was - 0.05 * parameter.grad)


def test_parameters_that_nobody_or_two_were_given_are_refused() -> None:
    first, second = (list(part.parameters()) for part in networks())
    with pytest.raises(FederationError, match=r"trains 4 tensors, its optimizers were given 2: give jointly\(\) each parameter"):
        jointly((sgd, first))([*first, *second])
    with pytest.raises(FederationError, match="trains 2 tensors, its optimizers were given 4"):
        jointly((sgd, first), (adam, first))(first)


def test_a_closure_is_called_once() -> None:
    ours = networks()
    calls = []

    def closure() -> float:
        calls.append(1)
        return 2.0

    assert joint(*ours).step(closure) == 2.0
    assert calls == [1]


def test_a_module_clips_the_gradients_of_each_on_their_own() -> None:
    """So that a network steps as it would alone, whatever the other one's gradients are."""
    norms = []

    class Twins(PhasedModule):
        def __init__(self) -> None:
            super().__init__(gradient_clip=0.5)
            self.parts = nn.ModuleList(networks())

        def phases(self) -> list[Phase]:
            first, second = (list(part.parameters()) for part in self.parts)
            return [Phase("both", [*first, *second], self.loss, jointly((sgd, first), (adam, second)), epochs=1)]

        def loss(self, batch: list[Tensor]) -> Tensor:
            [x] = batch
            return 100 * self.parts[0](x).square().mean() + 0.001 * self.parts[1](x[:, :2]).square().mean()

        def client_step(self, batch: list[Tensor]) -> Tensor:
            loss = super().client_step(batch)
            norms.append([torch.nn.utils.get_total_norm([p.grad for p in part.parameters()]).item() for part in self.parts])
            return loss

    x = torch.arange(12.0).view(4, 3)
    alone = Twins()
    grads = torch.autograd.grad(alone.loss([x]), list(alone.parts[1].parameters()))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=4)
    new_trainer(**QUIET, max_epochs=1, limit_val_batches=0).fit(Twins(), loader)
    [(first, second)] = norms
    assert first == pytest.approx(0.5, rel=1e-4)
    assert second == pytest.approx(torch.nn.utils.get_total_norm(grads).item())
    assert second < 0.4
