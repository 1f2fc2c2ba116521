"""Server optimizers against their papers, on numbers that can be followed by hand, and in federations."""

from functools import partial
from typing import Any

import pytest
import torch
from tiny import (
    CLASSES,
    METHODS,
    Net,
    NoisyNet,
    Recording,
    Stop,
    data_for,
    momentum,
    new_data,
    new_federation,
    new_method,
    private_states,
    same,
    sgd,
)
from tiny_rounds import fit
from torch import Tensor

from lightning_fed.core import (
    FederationError,
    ServerAdagrad,
    ServerAdam,
    ServerOptimizer,
    ServerSGD,
    ServerYogi,
)
from lightning_fed.core.server import OptimizerUpdate
from lightning_fed.methods import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedProx, FedYogi

DELTA = torch.tensor([2.0, -0.5, 1e-3, 0.0])


def steps(optimizer: ServerOptimizer, deltas: list[Tensor]) -> list[Tensor]:
    """What the server moves by in each round, from 0."""
    start = torch.zeros_like(deltas[0])
    update, state, moves = OptimizerUpdate(optimizer, {"w": start}), {"w": start}, []
    for delta in deltas:
        new = update(state, {"w": state["w"] + delta}, 1)
        moves.append(new["w"] - state["w"])
        state = new
    return moves


@pytest.mark.often(2)
@pytest.mark.parametrize(
    "method",
    [
        partial(FedAvgM, momentum=0.0),
        partial(FedAvg, server_optimizer=ServerSGD()),
        partial(FedProx, mu=0.0, server_optimizer=ServerSGD()),
    ],
)
def test_with_rate_1_and_no_momentum_it_is_fedavg_bit_for_bit(method: Any) -> None:
    ours, theirs = (
        fit(each, rounds=3) for each in (method(NoisyNet, CLASSES, optimizer=momentum), FedAvg(NoisyNet, CLASSES, momentum))
    )
    assert same(ours.run.server.state_dict(), theirs.run.server.state_dict())


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_goes_on_and_the_first_round_moves_the_model(nesterov: bool) -> None:
    moves = steps(ServerSGD(1.0, 0.5, nesterov), [torch.ones(1, dtype=torch.float64)] * 40)
    first, second = (1.5, 1.75) if nesterov else (1.0, 1.5)
    assert (moves[0].item(), moves[1].item()) == (first, second)
    assert moves[-1].item() == pytest.approx(1 / (1 - 0.5))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (ServerSGD(0.3, 0.9), partial(torch.optim.SGD, momentum=0.9)),
        (ServerSGD(0.3, 0.9, nesterov=True), partial(torch.optim.SGD, momentum=0.9, nesterov=True)),
        (
            ServerAdam(lr=0.3, beta_1=0.9, beta_2=0.99, tau=1e-12, initial_v=0.0, bias_correction=True),
            partial(torch.optim.Adam, betas=(0.9, 0.99), eps=1e-12),
        ),
        (
            ServerAdagrad(lr=0.3, beta_1=0.0, tau=0.1, initial_v=0.5),
            partial(torch.optim.Adagrad, eps=0.1, initial_accumulator_value=0.5),
        ),
    ],
    ids=["sgd", "nesterov", "adam", "adagrad"],
)
def test_they_are_pytorchs(ours: ServerOptimizer, theirs: Any) -> None:
    """Adam with Keras' correction, up to its epsilon."""
    generator = torch.Generator().manual_seed(0)
    deltas = [torch.randn(5, dtype=torch.float64, generator=generator) for _ in range(4)]
    weight = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    optimizer = theirs([weight], lr=0.3)
    for delta, move in zip(deltas, steps(ours, deltas), strict=True):
        before, weight.grad = weight.detach().clone(), -delta
        optimizer.step()
        assert torch.allclose(weight.detach() - before, move)


@pytest.mark.parametrize("kind", [ServerAdam, ServerYogi])
def test_without_memory_a_step_is_the_sign_softened_by_tau(kind: Any) -> None:
    step = steps(kind(lr=0.5, beta_1=0.0, beta_2=0.0, tau=0.1, initial_v=0.0), [DELTA])[0]
    assert torch.allclose(step, 0.5 * DELTA / (DELTA.abs() + 0.1))


def test_yogis_second_moment_moves_by_no_more_than_the_square() -> None:
    yogi, square = ServerYogi(beta_2=0.9), torch.tensor(4.0)
    assert yogi.second_moment(torch.tensor(0.0), square).item() == pytest.approx(0.4)
    assert yogi.second_moment(torch.tensor(100.0), square).item() == pytest.approx(99.6)
    assert ServerAdam(beta_2=0.9).second_moment(torch.tensor(100.0), square).item() == pytest.approx(90.4)


def test_the_paper_begins_with_the_square_of_tau() -> None:
    assert ServerAdam(tau=0.1).initial(DELTA)["v"].tolist() == pytest.approx([0.01] * 4)
    assert not ServerAdam(tau=0.1, initial_v=0.0).initial(DELTA)["v"].any()


@pytest.mark.often(2)
@pytest.mark.parametrize("method", [FedAvgM, FedAdagrad, FedAdam, FedYogi])
def test_buffers_are_averaged_and_parameters_are_not(method: Any) -> None:
    ours, theirs = (fit(each(NoisyNet, CLASSES, optimizer=sgd), rounds=1).run.server for each in (method, FedAvg))
    parameters = {name for name, _ in FedAvg(NoisyNet, CLASSES).for_client(new_data().clients[0]).named_parameters()}
    buffers = theirs.state.keys() - parameters
    assert buffers
    assert all(torch.equal(ours.state[name], theirs.state[name]) for name in buffers)
    if method is not FedAvgM:  # whose first round is FedAvg's
        assert not any(torch.equal(ours.state[name], theirs.state[name]) for name in parameters & theirs.state.keys())


def test_moments_are_in_the_checkpoint_and_a_continued_run_ends_alike(tmp_path: Any) -> None:
    method = partial(FedAdam, Net, CLASSES, bias_correction=True, optimizer=sgd)
    whole = fit(method(), rounds=4).run.server.state_dict()
    assert {name.split("/")[1] for name in whole if name.startswith("update/")} == {"m", "v", "rounds"}
    with pytest.raises(KeyboardInterrupt):
        fit(method(), rounds=4, run_dir=str(tmp_path / "run"), checkpoint_every=1, callbacks=[Stop(3)])
    resumed = fit(method(), rounds=4, run_dir=str(tmp_path / "run"), checkpoint_every=1)
    assert same(resumed.run.server.state_dict(), whole)


@pytest.mark.often(2)
@pytest.mark.parametrize(
    "name", ["FedProx", "FedNova", "PFedLoRA", "HOMLoRA", "FedPer", "FedRep", "FedAS", "FedALA", "MOON", "Ditto"]
)
def test_it_moves_what_is_shared_and_nothing_else(name: str) -> None:
    """One round: private parts end where they do without it, and shared parameters half as far from where they began."""
    ends, engine = [], Recording()
    for optimizer in (None, ServerSGD(0.5)):
        federation = new_federation(1, evaluate_every=0, engine=engine)
        method = new_method(name, server_optimizer=optimizer)
        federation.fit(method, data_for(name))
        run = federation.run
        ends.append((run.server.state, private_states(federation)))
    (mean, private), (half, same_private) = ends
    assert all(same(one, other) for one, other in zip(private.values(), same_private.values(), strict=True))
    start = engine.turns[0].broadcast.state
    moved = {key for key, _ in method.for_client(engine.turns[0].client).named_parameters() if key in mean}
    for key, tensor in mean.items():
        expected = torch.lerp(start[key], tensor, 0.5) if key in moved else tensor
        torch.testing.assert_close(half[key], expected)
    assert any(not torch.equal(mean[key], half[key]) for key in moved)


def test_only_servers_that_average_have_one() -> None:
    refused = []
    for name in ("SCAFFOLD", "FedDyn", "Standalone", "FedKD", "FedAMP", "FD", "FedProto", "SplitMix", "FedHM"):
        with pytest.raises(FederationError, match=f"^{name} got server_optimizer=ServerAdam, but .*leave server_optimizer out"):
            new_federation(1).fit(new_method(name, server_optimizer=ServerAdam()), data_for(name))
        refused.append(name)
    assert set(refused) <= set(METHODS)


@pytest.mark.parametrize(
    "made", [partial(ServerSGD, momentum=1.0), partial(ServerAdam, beta_2=1.0), partial(ServerYogi, beta_1=1.5)]
)
def test_what_never_forgets_is_refused(made: Any) -> None:
    with pytest.raises(FederationError, match="give a number from 0, less than 1"):
        made()
