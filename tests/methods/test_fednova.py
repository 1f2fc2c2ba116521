"""FedNova against its paper."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from tiny import CLASSES, INFO, Net, NoisyNet, Recording, momentum, new_data, same, sgd
from tiny_loops import fixed, step, stripped, turn_of
from tiny_rounds import Bowls, UniformFedAvg, fit
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR

from lightning_fed.core import FederationError, FineTuning, Phase, ServerSGD
from lightning_fed.data import IID
from lightning_fed.methods import FedAvg, FedNova, FedProx
from lightning_fed.methods.fednova import STEPS, normalized_mean, total_weight
from lightning_fed.tensors import State, count_bytes, count_floats

RHO, DECAY = 0.9, 0.07


def model_of(state: State) -> State:
    return {name: tensor for name, tensor in state.items() if name != STEPS}


# -------------------------------------------------------------------------------------------------------------- formulas


@pytest.mark.parametrize("options", [{}, {"momentum": RHO}, {"momentum": RHO, "nesterov": True}, {"decay": DECAY}])
def test_the_weight_of_steps_is_what_they_add_up_to(options: Any) -> None:
    """Steps of PyTorch's SGD on gradients of 1: what they change by, in units of the rate."""
    rate, weight = 0.5, torch.zeros((), requires_grad=True)
    optimizer = torch.optim.SGD([weight], rate, options.get("momentum", 0), nesterov=options.get("nesterov", False))
    for steps in range(1, 40):
        weight.grad = 1 + options.get("decay", 0) / rate * weight.detach()
        optimizer.step()
        assert total_weight(steps, **options) == pytest.approx(-weight.item() / rate, rel=1e-5)
    assert total_weight(0, **options) == 0


def by_formula(state: Tensor, sent: list[Tensor], counts: list[int], weights: list[float]) -> Tensor:
    """As the paper has it, in double precision."""
    p = [count / sum(counts) for count in counts]
    effective = sum(share * a for share, a in zip(p, weights, strict=True))
    steps = sum(share * (state.double() - theta.double()) / a for share, theta, a in zip(p, sent, weights, strict=True))
    return state.double() - effective * steps


def test_the_step_is_the_papers_and_its_coefficients_add_up_to_one() -> None:
    """Equal models stay where they are: public code that leaves the complement on w out scales them by three here."""
    names, steps, counts = ["w"], [10, 100], [30, 30]
    state = {"w": torch.randn(5), STEPS: torch.tensor(0)}
    sent = [torch.randn(5) for _ in steps]
    updates = [({"w": w, STEPS: torch.tensor(n)}, count) for w, n, count in zip(sent, steps, counts, strict=True)]
    found = normalized_mean(updates, state, names, float)["w"]
    torch.testing.assert_close(found.double(), by_formula(state["w"], sent, counts, [10.0, 100.0]), rtol=1e-5, atol=1e-5)
    still = normalized_mean([({**update, "w": state["w"]}, count) for update, count in updates], state, names, float)
    assert torch.equal(still["w"], state["w"])
    naive = sum(0.5 * 55.0 / n for n in steps)  # the coefficients without the complement
    assert naive == pytest.approx(3.025)


def test_who_took_no_step_moves_nothing_and_counts() -> None:
    """Its p_k is in the effective number of steps, where its steps are 0."""
    state = {"w": torch.zeros(1), STEPS: torch.tensor(0)}
    updates = [({"w": torch.tensor([x]), STEPS: torch.tensor(n)}, 1) for x, n in ((-8.0, 4), (5.0, 0))]
    assert normalized_mean(updates, state, ["w"], float)["w"].item() == pytest.approx(-2.0)  # 4/2 steps of -8/4, half of them
    still = normalized_mean(updates[1:], state, ["w"], float)
    assert same(still, state)
    assert normalized_mean([], state, ["w"], float) == {}
    with pytest.raises(FederationError, match="-1 steps were taken, expected 0 or more"):
        normalized_mean([({"w": state["w"], STEPS: torch.tensor(-1)}, 1)], state, ["w"], float)


# --------------------------------------------------------------------------------------------------------------- rounds


@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_where_all_take_as_many_steps_it_is_fedavg_bit_for_bit(mu: float) -> None:
    ours = fit(FedNova(NoisyNet, CLASSES, mu, optimizer=sgd, steps=3), rounds=3)
    theirs = fit(FedProx(NoisyNet, CLASSES, mu, optimizer=sgd, steps=3), rounds=3)
    assert same(model_of(ours.run.server.state_dict()), theirs.run.server.state_dict())


@pytest.mark.parametrize("optimizer", [sgd, momentum], ids=["plain", "momentum"])
def test_rounds_are_those_of_a_plain_loop(optimizer: Any) -> None:
    """Clients have different numbers of batches."""
    data = new_data(3, 120)
    found = fit(FedNova(fixed(Net), CLASSES, optimizer=optimizer, epochs=2), data, rounds=2).run.server.state_dict()
    network = fixed(Net)(CLASSES)
    rho = optimizer.keywords.get("momentum", 0)
    for round in (1, 2):
        sent, weights = [], []
        for client in range(3):
            own, steps = copy.deepcopy(network), 0
            stepper = optimizer(own.parameters())
            for x, y in turn_of(data, client, round, 2):
                step(stepper, cross_entropy(own(x), y))
                steps += 1
            sent.append(own.state_dict())
            weights.append(sum(sum(rho**k for k in range(j)) for j in range(1, steps + 1)))
        assert len(set(weights)) > 1
        counts = [info.num_train for info in data.clients]
        moved = {name: by_formula(t, [s[name] for s in sent], counts, weights) for name, t in network.state_dict().items()}
        network.load_state_dict(moved)
    torch.testing.assert_close(stripped(found), network.state_dict(), rtol=1e-4, atol=1e-6)


def test_statistics_of_batch_norm_are_averaged_as_in_fedavg() -> None:
    ours, theirs = (fit(method(NoisyNet, CLASSES, optimizer=sgd)).run.server.state_dict() for method in (FedNova, FedAvg))
    parameters = {name for name, _ in FedAvg(NoisyNet, CLASSES).for_client(INFO).named_parameters()}
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs.keys() - parameters)
    assert not any(torch.equal(ours[name], theirs[name]) for name in parameters)


TAUS = (1, 10)


class UnequalBowls(Bowls):
    """Which take 1 and 10 steps."""

    local_phase: Any

    def phases(self) -> list[Phase]:
        return [self.local_phase("local", list(self.backbone.parameters()), self.client_loss, epochs=None, steps=TAUS[self.which])]


class BowlNova(UnequalBowls, FedNova):
    weighting = "uniform"


class BowlFedAvg(UnequalBowls, UniformFedAvg):
    pass


@pytest.mark.slow
def test_unlike_fedavg_it_finds_the_optimum_of_the_mean() -> None:
    """FedAvg goes where the client with more steps wants to be. What is left of FedNova's bias goes with the rate."""
    rate, data = 0.02, new_data(2, 40, batch_size=4, partition=IID())
    optimum = Bowls.optimum()
    ends = []
    for method, units in ((BowlNova, TAUS), (BowlFedAvg, (1, 1))):
        pulls = [(1 - (1 - rate * h) ** tau) / unit for h, tau, unit in zip(Bowls.curvatures, TAUS, units, strict=True)]
        ends.append(sum(pull * w for pull, w in zip(pulls, Bowls.optima, strict=True)) / sum(pulls))
        run = fit(method(Net, CLASSES, optimizer=partial(torch.optim.SGD, lr=rate)), data, rounds=40).run
        assert run.server.state["backbone.head.bias"][0].item() == pytest.approx(ends[-1], abs=0.01)
    assert abs(ends[0] - optimum) < 0.25 < 0.6 < abs(ends[1] - optimum)


def test_a_server_optimizer_steps_to_where_it_would_go() -> None:
    whole, half = (fit(FedNova(Net, CLASSES, optimizer=sgd, server_optimizer=o)) for o in (None, ServerSGD(0.5)))
    engine = Recording()
    fit(FedNova(Net, CLASSES, optimizer=sgd, epochs=0), engine=engine)
    start = engine.turns[0].broadcast.state
    for name, tensor in model_of(whole.run.server.state_dict()).items():
        torch.testing.assert_close(half.run.server.state[name], torch.lerp(start[name], tensor, 0.5))


def test_one_number_travels_besides() -> None:
    ours, plain = (
        FedNova(Net, CLASSES, optimizer=sgd).for_client(INFO).update_state(),
        FedAvg(Net, CLASSES).for_client(INFO).update_state(),
    )
    assert ours.keys() - plain.keys() == {STEPS}
    assert (count_floats(ours), count_bytes(ours)) == (count_floats(plain), count_bytes(plain) + 8)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"optimizer": torch.optim.Adam}, "Adam,"),
        ({"optimizer": partial(sgd, momentum=0.9, dampening=0.1)}, "dampening=0.1"),
        ({"optimizer": momentum, "mu": 0.1}, "momentum together with mu"),
        ({"persistent": True}, "persistent"),
        ({"lr_scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=1), "lr_interval": "step"}, "lr_scheduler with"),
    ],
)
def test_steps_of_unknown_weight_are_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(FederationError, match=f"FedNova got {what}.* give torch.optim.SGD with a constant lr, and momentum or mu"):
        FedNova(Net, CLASSES, **options)


def in_groups(parameters: Any) -> torch.optim.SGD:
    parameters = list(parameters)
    return torch.optim.SGD([{"params": parameters[:1]}, {"params": parameters[1:], "momentum": 0.9}], lr=0.1)


def with_two_rates(parameters: Any) -> torch.optim.SGD:
    parameters = list(parameters)
    return torch.optim.SGD([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.01}], lr=0.1)


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": sgd, "lr_scheduler": partial(OneCycleLR, max_lr=0.1, total_steps=5)},
        {"optimizer": in_groups},
        {"optimizer": with_two_rates, "mu": 0.1},
    ],
    ids=["scheduled", "momentum of groups", "lr of groups"],
)
def test_all_steps_have_the_weights_of_the_first(options: dict[str, Any]) -> None:
    with pytest.raises(FederationError, match=r"FedNova got momentum, nesterov and lr · mu of .* in a step, .* cycle_momentum"):
        fit(FedNova(Net, CLASSES, steps=1, **options), rounds=1)


def test_groups_may_have_rates_of_their_own_and_fine_tuning_another_optimizer() -> None:
    tuned = FineTuning(steps=1, optimizer=momentum)
    fit(FedNova(Net, CLASSES, optimizer=with_two_rates, steps=1, fine_tuning=tuned), rounds=1, evaluate_every=1)
