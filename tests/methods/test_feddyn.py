"""FedDyn against its paper."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from often import mostly_slow
from tiny import CLASSES, INFO, Net, NoisyNet, Recording, new_data, new_trainer, private_states, same, sgd
from tiny_loops import batches, fixed, mean_of, stripped
from tiny_rounds import Bowls, fit
from torch import Tensor
from torch.nn.functional import cross_entropy

from lightning_fed.core.server import UPDATE
from lightning_fed.data import IID
from lightning_fed.engines.turn_loop import QUIET
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import FedAvg, FedDyn, FedProx
from lightning_fed.nn.proximal import half_squared_distance
from lightning_fed.tensors import State

ALPHA = 0.3

dyn = partial(FedDyn, alpha=ALPHA, optimizer=sgd)


def gradients(private: State) -> State:
    """A client's g, by name of the parameter."""
    return {name.removeprefix("own_gradient.").replace("/", "."): tensor for name, tensor in private.items()}


def split(federation: Federation) -> tuple[State, State]:
    """The server's model, and h."""
    state = federation.run.server.state_dict()
    h = {name.removeprefix(UPDATE): tensor for name, tensor in state.items() if name.startswith(UPDATE)}
    return {name: tensor for name, tensor in state.items() if not name.startswith(UPDATE)}, h


@pytest.mark.parametrize("participation", mostly_slow([1.0, 0.4], often={0.4}))
def test_h_is_the_mean_of_all_clients(participation: float) -> None:
    """Of all who may take part, those that never did included; also of a run that was continued."""
    for rounds, options in ((2, {}), (4, {}), (3, {"eligible_clients": [0, 1, 3]})):
        where = {} if options else {"run_dir": "runs"}
        federation = fit(dyn(NoisyNet, CLASSES), new_data(5, 200), rounds, participation=participation, **where, **options)
        each = [gradients(state) for state in private_states(federation).values()]
        assert 0 < len(each) <= len(federation.run.eligible_clients)
        for name, tensor in split(federation)[1].items():
            mean = sum(own[name] for own in each) / len(federation.run.eligible_clients)
            torch.testing.assert_close(tensor, mean, rtol=1e-4, atol=1e-6)
            assert tensor.abs().max() > 1e-3


def test_the_first_round_of_clients_is_fedproxs_and_the_server_goes_twice_as_far() -> None:
    """w = 2 mean - w_0: neither FedAvg nor FedProx. Buffers are the mean; there is a g of each parameter and of nothing else."""
    ours, theirs = Recording(), Recording()
    federation = fit(dyn(NoisyNet, CLASSES, epochs=2), engine=ours)
    mean = fit(UniformProx(NoisyNet, CLASSES, ALPHA, optimizer=sgd, epochs=2), engine=theirs).run.server.state
    assert all(same(one.state, other.state) for one, other in zip(ours.trained, theirs.trained, strict=True))
    start, (model, h) = ours.turns[0].broadcast.state, split(federation)
    assert h.keys() == {name for name, _ in FedAvg(NoisyNet, CLASSES).for_client(INFO).named_parameters()}
    for name, tensor in model.items():
        expected = 2 * mean[name] - start[name] if name in h else mean[name]
        torch.testing.assert_close(tensor, expected, rtol=1e-4, atol=1e-5)
    assert gradients(private_states(federation)[0]).keys() == h.keys()


class UniformProx(FedProx):
    weighting = "uniform"


def test_two_rounds_are_those_of_a_plain_loop() -> None:
    data = new_data(3, 120)
    found, _ = split(fit(dyn(fixed(Net), CLASSES), data, rounds=2))
    network = fixed(Net)(CLASSES)
    g = [[torch.zeros_like(p) for p in network.parameters()] for _ in range(3)]
    h = [torch.zeros_like(p) for p in network.parameters()]
    for round in (1, 2):
        anchors, clients = [p.detach().clone() for p in network.parameters()], []
        for client in range(3):
            clients.append(own := copy.deepcopy(network))
            optimizer = sgd(own.parameters())
            for x, y in batches(data, client, round, epoch=0):
                optimizer.zero_grad()
                cross_entropy(own(x), y).backward()
                with torch.no_grad():
                    for p, mine, anchor in zip(own.parameters(), g[client], anchors, strict=True):
                        p.grad += ALPHA * (p - anchor) - mine
                optimizer.step()
        network.load_state_dict(mean_of(clients))
        with torch.no_grad():
            for place, (p, anchor) in enumerate(zip(network.parameters(), anchors, strict=True)):
                changes = [list(own.parameters())[place] - anchor for own in clients]
                for client, change in enumerate(changes):
                    g[client][place] -= ALPHA * change
                h[place] -= ALPHA / 3 * sum(changes)
                p -= h[place] / ALPHA
    torch.testing.assert_close(stripped(found), network.state_dict(), rtol=1e-4, atol=1e-5)


def test_the_gradient_is_the_losss_minus_g_plus_alpha_times_the_drift() -> None:
    """Libraries leave the square of the distance out, or the distance; the logged loss is FedAvg's."""
    module = dyn(Net, CLASSES).for_client(INFO)
    new_trainer(**QUIET, max_epochs=1, limit_train_batches=0).fit(module, datamodule=new_data().client(1))
    start = {name: p.detach().clone() for name, p in module.named_parameters()}
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.own_gradient.values()):
            tensor.add_(torch.randn_like(tensor))
    batch, own = (torch.randn(8, 3, 4, 4), torch.arange(8) % CLASSES), dict(module.named_parameters())
    [phase] = module.phases()
    assert phase.penalty is not None
    grads = [torch.autograd.grad(loss, list(own.values())) for loss in (phase.loss(batch) + phase.penalty(), phase.loss(batch))]
    for (name, parameter), one, other in zip(own.items(), *grads, strict=True):
        expected = ALPHA * (parameter.detach() - start[name]) - module.own_gradient[name]
        torch.testing.assert_close(one - other, expected, rtol=1e-4, atol=1e-5)


def test_without_a_step_nothing_changes() -> None:
    """Also for a client that had a turn before, and where another client's turn came in between."""
    federation = fit(dyn(NoisyNet, CLASSES), rounds=2, run_dir="runs")
    before = private_states(federation)
    module = dyn(NoisyNet, CLASSES, epochs=0).for_client(INFO)
    module.load_private_state(before[1])
    module.load_shared_state(federation.run.server.state)  # other parameters than those of the last fit, of which there was none
    module.after_training({})
    assert same(module.private_state(), before[1])
    engine = Recording()
    model, h = split(fit(dyn(NoisyNet, CLASSES, epochs=0), rounds=2, engine=engine))
    assert same(model, engine.turns[0].broadcast.state)
    assert not any(tensor.any() for tensor in h.values())


# ---------------------------------------------------------------------------------------------------- two quadratic clients


class Bowl(Bowls, FedDyn):
    curvatures, optima = (1.0, 5.0), (0.0, 3.0)


class OtherSign(Bowl):
    """As in a library whose clients follow the state instead of turning against it."""

    def dynamic_penalty(self) -> Tensor:
        distance = half_squared_distance(self.learning().values(), self.global_parameters.values())
        return 2 * self.alpha * distance - super().dynamic_penalty()


def end(method: type[FedDyn], rounds: int = 20) -> float:
    data = new_data(2, 40, batch_size=4, partition=IID())
    options: dict[str, Any] = {"alpha": 0.5, "optimizer": partial(torch.optim.SGD, lr=0.18), "steps": 30}
    return fit(method(Net, CLASSES, **options), data, rounds).run.server.state["backbone.head.bias"][0].item()


@pytest.mark.slow
def test_it_finds_the_optimum_of_the_mean_and_a_known_mistake_does_not() -> None:
    assert end(Bowl) == pytest.approx(2.5, abs=5e-3)
    assert abs(end(OtherSign, rounds=10) - 2.5) > 1
