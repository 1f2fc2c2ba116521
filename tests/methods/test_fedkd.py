"""FedKD: a mentor and a mentee that distil each other, and what travels of the mentee."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tiny import (
    CLASSES,
    INFO,
    Net,
    NoisyNet,
    Recording,
    StillNet,
    WideNet,
    X,
    Y,
    momentum,
    new_data,
    new_federation,
    photos,
    private_states,
    same,
    sgd,
)
from tiny_loops import drawn, fixed, stripped, turn_of
from tiny_rounds import UniformFedAvg, changing_state, fit
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, mse_loss

from lightning_fed.core.messages import Broadcast
from lightning_fed.errors import FederationError
from lightning_fed.methods import FedKD, Standalone
from lightning_fed.methods.fedkd import CHANGE, MENTEE, MenteeServer, energy_in_round
from lightning_fed.models import CNN1, CNN5
from lightning_fed.nn.energy import FACTORS, compressed, restored
from lightning_fed.tensors import State, count_bytes, count_floats

HETEROGENEOUS = [WideNet, Net]


fit = partial(fit, rounds=3)


# ------------------------------------------------------------------------------------- the algorithm, once more, bare


def truncated(matrix: Tensor, share: float) -> Tensor:
    """A matrix without the smallest singular values, as many as its energy can spare, if that makes it smaller."""
    left, values, right = torch.linalg.svd(matrix.flatten(1).double(), full_matrices=False)
    energy = values.square()
    rank = next(rank for rank in range(len(values) + 1) if energy[:rank].sum() >= share * energy.sum())
    if rank * (len(left) + right.shape[1] + 1) >= matrix.numel():
        return matrix.double()
    return ((left[:, :rank] * values[:rank]) @ right[:rank]).view(matrix.shape)


@pytest.mark.often(1)
@pytest.mark.parametrize(("participation", "hidden"), [(0.6, 0.5), (1.0, 1.0)], ids=["some", "all"])
def test_rounds_are_those_of_a_bare_loop(participation: float, hidden: float) -> None:
    """Up to rounding: the factors here come from another routine. Who takes part is looked up."""
    data, rounds, epochs = new_data(), 3, 2
    mentee_network = partial(Net, hidden=12)
    adam, plain = partial(torch.optim.Adam, lr=0.01), partial(torch.optim.SGD, lr=0.02)
    energies = {"energy_start": 0.7, "energy_end": 0.9, "energy_rounds": rounds}
    model = FedKD(HETEROGENEOUS, CLASSES, mentee_network, **energies, hidden=hidden, optimizer=momentum, mentee_optimizer=adam)
    model.projection_optimizer, model.epochs = plain, epochs
    engine = Recording()
    federation = fit(model, data, rounds=rounds, participation=participation, engine=engine)

    template = drawn(FedKD(HETEROGENEOUS, CLASSES, mentee_network))
    theta: nn.Module = template.shared
    modules = [template.for_client(client) for client in data.clients]
    mentors, projections = ([getattr(module, part) for module in modules] for part in ("backbone", "projection"))
    for round in range(1, rounds + 1):
        share = 0.7 + round / rounds * (0.9 - 0.7)
        changes: list[State] = []
        for turn, _ in engine.fits(round):
            k = turn.client.id
            mentor, W, mentee = mentors[k], projections[k], copy.deepcopy(theta)
            optimizers = [momentum(mentor.parameters()), adam(mentee.parameters()), plain(W.parameters())]
            for x, y in turn_of(data, k, round, epochs):
                h_t, h_s = mentor.encode(x), mentee.encode(x)
                t, s = mentor.head(h_t), mentee.head(h_s)
                a = (cross_entropy(t, y) + cross_entropy(s, y)).detach()
                log_t, log_s = log_softmax(t, dim=1), log_softmax(s, dim=1)
                H = mse_loss(W(h_s), h_t) / a
                D_t = kl_div(log_t, log_s.detach(), log_target=True, reduction="batchmean") / a
                D_s = kl_div(log_s, log_t.detach(), log_target=True, reduction="batchmean") / a
                L_t, L_s = cross_entropy(t, y) + D_t + hidden * H, cross_entropy(s, y) + D_s + hidden * H
                own, theirs = list(mentor.parameters()), [*mentee.parameters(), *W.parameters()]
                gradients = [
                    *torch.autograd.grad(L_t, own, retain_graph=True),
                    *torch.autograd.grad(L_s, theirs),
                ]
                for parameter, gradient in zip([*own, *theirs], gradients, strict=True):
                    parameter.grad = gradient
                for optimizer in optimizers:
                    optimizer.step()
            change = {name: tensor - theta.state_dict()[name] for name, tensor in mentee.state_dict().items()}
            changes.append({name: truncated(t, share) if t.dim() > 1 else t.double() for name, t in change.items()})
        mean = {name: torch.stack([change[name] for change in changes]).mean(dim=0) for name in changes[0]}
        theta = copy.deepcopy(theta)
        for name, tensor in theta.state_dict().items():
            tensor += truncated(mean[name], share) if tensor.dim() > 1 else mean[name]

    for name, tensor in theta.state_dict().items():
        torch.testing.assert_close(federation.run.server.state[f"{MENTEE}{name}"], tensor, rtol=1e-4, atol=1e-5)
    for k in federation.run.last_rounds:
        kept = federation.run.store.get(k)
        for part, network in (("backbone.", mentors[k]), ("projection.", projections[k])):
            torch.testing.assert_close(stripped(dict(kept), part), network.state_dict(), rtol=1e-4, atol=1e-5)


# ----------------------------------------------------------------------------------------------------- degenerate cases

APART = {"distillation": 0.0, "hidden": 0.0, "energy_start": 1.0, "energy_end": 1.0}


def test_networks_that_say_nothing_to_each_other_are_standalone_and_fedavg() -> None:
    """The mentor bit for bit, with dropout in both; the mentee, of which changes are added up, up to rounding."""
    options = {"rounds": 3, "participation": 0.7}
    common = {"epochs": 2, "gradient_clip": 0.5}
    mentee = fixed(StillNet)
    ours = fit(FedKD([NoisyNet, WideNet], CLASSES, mentee, **APART, optimizer=momentum, mentee_optimizer=sgd, **common), **options)
    alone = fit(Standalone([NoisyNet, WideNet], CLASSES, momentum, **common), **options)
    averaged = fit(UniformFedAvg(mentee, CLASSES, sgd, **common), **options)
    assert private_states(ours).keys() == private_states(alone).keys()
    for client, state in private_states(alone).items():
        assert same(stripped(private_states(ours)[client], "backbone."), stripped(state, "backbone."))
    assert ours.run.results == alone.run.results
    for name, tensor in stripped(averaged.run.server.state, "backbone.").items():
        torch.testing.assert_close(ours.run.server.state[f"{MENTEE}{name}"], tensor, rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------- the loss


def losses(module: FedKD) -> tuple[Tensor, Tensor]:
    """L_t and L_s as the paper has them, by probabilities."""
    h_t, h_s = module.backbone.encode(X), module.shared.encode(X)
    t, s = (network.head(h).softmax(dim=1) for network, h in ((module.backbone, h_t), (module.shared, h_s)))
    ce_t, ce_s = (-p[range(8), Y].log().mean() for p in (t, s))

    def divergence(p: Tensor, q: Tensor) -> Tensor:
        return (p * (p / q).log()).sum(dim=1).mean()

    assert module.projection is not None
    a = ce_t + ce_s
    H = (h_t - h_s @ module.projection.weight.T).square().mean() / a
    return ce_t + divergence(s, t) / a + H, ce_s + divergence(t, s) / a + H


def parts(module: FedKD) -> list[list[nn.Parameter]]:
    assert module.projection is not None
    return [list(network.parameters()) for network in (module.backbone, module.shared, module.projection)]


def test_attached_it_is_the_sum_as_it_is_written() -> None:
    module = FedKD(Net, CLASSES, WideNet, detach=False).for_client(INFO)
    everything = [p for part in parts(module) for p in part]
    L_t, L_s = losses(module)
    torch.testing.assert_close(module.client_loss((X, Y)), L_t + L_s)
    found = torch.autograd.grad(module.client_loss((X, Y)), everything)
    torch.testing.assert_close(list(found), list(torch.autograd.grad(L_t + L_s, everything)))


def test_networks_that_are_always_right_do_not_divide_by_zero() -> None:
    module = FedKD(Net, CLASSES, Net).for_client(INFO)
    for network in (module.backbone, module.shared):
        with torch.no_grad():
            network.head.weight.zero_()
            network.head.bias.copy_(torch.tensor([200.0, 0, 0, 0]))
    loss = module.client_loss((X, torch.zeros(8, dtype=torch.long)))
    assert torch.isfinite(loss)
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in module.parameters() if p.grad is not None)


# ------------------------------------------------------------------------------------------------------------ the energy


@pytest.mark.parametrize("rounds", [1, 3, 7, 100])
@pytest.mark.parametrize(("start", "end"), [(0.95, 0.98), (0.5, 1.0), (0.9, 0.9)])
def test_the_energy_grows_and_arrives(rounds: int, start: float, end: float) -> None:
    energies = [energy_in_round(round, start, end, rounds) for round in range(1, rounds + 3)]
    assert energies == sorted(energies)
    assert energies[rounds - 1 :] == [end] * 3
    assert energies[0] == pytest.approx(start + (end - start) / rounds)


def test_both_sides_keep_as_much_as_the_round_asks_for() -> None:
    engine = Recording()
    energies = {"energy_start": 0.5, "energy_end": 0.8, "energy_rounds": 3}
    model = FedKD(Net, CLASSES, partial(Net, hidden=12), **energies, optimizer=momentum, epochs=3)
    federation = fit(model, engine=engine)
    assert [row["server/energy"] for row in federation.run.history] == pytest.approx([0.6, 0.7, 0.8])
    ranks = {
        name: [len(update.state[name]) for update in engine.trained if name in update.state]
        for name in (f"{CHANGE}fc1.weight/sigma", f"{CHANGE}fc2.weight/sigma")
    }
    assert all(max(found) < 6 for found in ranks.values())
    assert all(len(set(found)) > 1 for found in ranks.values())  # they differ by client and round
    server = federation.run.server
    assert isinstance(server, MenteeServer)
    again = compressed(server.mean, 0.8)
    assert same(server.change(), again)
    for name, tensor in server.mean.items():
        if tensor.dim() > 1:
            left = restored(again, server.mean)[name].square().sum() / tensor.square().sum()
            assert left >= 0.8 - 1e-6


# ----------------------------------------------------------------------------------------------------------- what travels


def test_everybody_has_the_servers_mentee_bit_for_bit() -> None:
    """Whether it was sent whole or as what had changed; the changes of a client's own are not kept."""
    engine = Recording()
    federation = fit(FedKD(HETEROGENEOUS, CLASSES, NoisyNet, optimizer=momentum), new_data(), engine=engine, rounds=4)
    server = federation.run.server
    assert isinstance(server, MenteeServer)
    whole = [turn.round for turn, _ in engine.fits() if f"{MENTEE}fc1.weight" in turn.broadcast.state]
    assert set(whole) == {1}
    for client in federation.run.clients:
        module = federation.run.model.for_client(client)
        module.load_private_state(dict(federation.run.store.get(client.id)))
        module.load_broadcast(server.broadcast(client))
        assert not any(name.startswith(MENTEE) for name in server.broadcast(client).state)
        assert same(dict(module.shared.state_dict()), stripped(server.state, MENTEE))


def test_who_missed_a_round_gets_the_whole_mentee() -> None:
    engine = Recording()
    fit(FedKD(Net, CLASSES, optimizer=momentum), new_data(), engine=engine, rounds=6, participation=0.5)
    last: dict[int, int] = {}
    kinds = set()
    for turn, _ in engine.fits():
        whole = all(name.startswith(MENTEE) for name in turn.broadcast.state)
        assert whole or all(name.startswith(CHANGE) for name in turn.broadcast.state)
        assert whole == (last.get(turn.client.id) != turn.round - 1)
        last[turn.client.id] = turn.round
        kinds.add((whole, turn.round > 1))
    assert kinds == {(True, False), (True, True), (False, True)}


def test_private_are_mentor_projection_and_the_mentee_that_all_have() -> None:
    engine = Recording()
    federation = fit(FedKD(HETEROGENEOUS, CLASSES, optimizer=sgd), engine=engine, run_dir="runs")
    states = [turn.broadcast.state for turn in engine.turns] + [update.state for update in engine.updates]
    assert all(name.startswith((MENTEE, CHANGE)) for state in states for name in state)
    kept = private_states(federation)
    assert all({name.split(".")[0] for name in state} == {"backbone", "projection", "shared"} for state in kept.values())
    assert same(stripped(kept[0], "shared."), stripped(kept[1], "shared."))
    [*_, newest] = sorted(Path("runs/version_0/checkpoints").iterdir())
    names = safetensors.torch.load_file(newest / "server.safetensors").keys()
    assert not any(name.startswith(("backbone", "projection")) for name in names)
    row = federation.run.history[-1]
    assert row["before/test_accuracy/mean"] == row["after/test_accuracy/mean"]


def test_a_continued_run_sends_what_an_uninterrupted_one_does() -> None:
    """The factors are computed anew from the mean of the last changes."""
    whole, stopped = Recording(), Recording()
    options: dict[str, Any] = {"participation": 0.7}
    fit(FedKD(Net, CLASSES, optimizer=momentum), rounds=4, engine=whole, **options)
    fit(FedKD(Net, CLASSES, optimizer=momentum), rounds=2, run_dir="runs", **options)
    fit(FedKD(Net, CLASSES, optimizer=momentum), rounds=4, run_dir="runs", engine=stopped, **options)
    expected = [turn.broadcast.state for turn, _ in whole.fits() if turn.round > 2]
    assert all(same(turn.broadcast.state, state) for (turn, _), state in zip(stopped.fits(), expected, strict=True))


def test_what_is_exported_of_the_server_is_the_mentee() -> None:
    federation, model, data = new_federation(1, "runs"), FedKD(Net, CLASSES, WideNet, optimizer=sgd), new_data(3, 120)
    federation.fit(model, data)
    federation.export(FedKD(Net, CLASSES, WideNet), data, "server")
    assert same(safetensors.torch.load_file("server/shared.safetensors"), stripped(federation.run.server.state, MENTEE))
    assert not Path("server/model.safetensors").exists()


FC1 = f"{CHANGE}fc1.weight"
OF_RANK_13 = {f"{FC1}{part}": torch.ones(size) for part, size in zip(FACTORS, ((12, 13), (13,), (48, 13)), strict=True)}


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state | OF_RANK_13,
        lambda state: {name: tensor for name, tensor in state.items() if name not in (FC1, f"{FC1}/U")},
        lambda state: state | {FC1: torch.zeros(12, 48)},
    ],
    ids=["rank", "lacks", "more"],
)
def test_an_update_that_cannot_be_is_refused(change: Any) -> None:
    with pytest.raises(FederationError, match=r"The update of client 0 (has|lacks|holds) 'change/fc1.weight"):
        fit(FedKD(Net, CLASSES, partial(Net, hidden=12), energy_start=0.5, energy_end=0.5), engine=changing_state(change))


# ---------------------------------------------------------------------------------------------------------------- traffic


@pytest.mark.parametrize(("networks", "mentee", "raw", "biases"), [([CNN5, CNN5], CNN5, 670_058, 1_058)])
def test_traffic_is_what_the_ranks_say(networks: Any, mentee: Any, raw: int, biases: int) -> None:
    """At first the whole mentee; then Σ min(mn, r (m + n + 1)) over the matrices, and the biases."""
    engine = Recording()
    history = fit(FedKD(networks, 10, mentee), photos(10, 2, copies=3, batch_size=32), rounds=2, engine=engine).run.history
    assert history[0]["traffic/down_parameters"] == 2 * raw
    assert history[0]["traffic/down_bytes"] == 8 * raw
    shapes = {name: tensor.shape for name, tensor in mentee(10).state_dict().items()}

    def cost(state: State) -> int:
        total = biases
        for name, shape in shapes.items():
            if len(shape) > 1:
                rows, columns = shape[0], shape[1:].numel()
                sigma = state.get(f"{CHANGE}{name}/sigma")
                total += rows * columns if sigma is None else len(sigma) * (rows + columns + 1)
                assert sigma is None or len(sigma) * (rows + columns + 1) < rows * columns
        return total

    for round in (1, 2):
        ups = [cost(update.state) for _, update in engine.fits(round)]
        assert all(up < raw / 2 for up in ups)
        assert history[round - 1]["traffic/up_parameters"] == sum(ups)
        assert history[round - 1]["traffic/up_bytes"] == 4 * sum(ups)
    downs = [cost(turn.broadcast.state) for turn, _ in engine.fits(2)]
    assert history[1]["traffic/down_parameters"] == sum(downs) < raw


def test_nothing_learned_is_next_to_nothing_sent() -> None:
    """Factors of rank 0, and biases."""
    module = FedKD(CNN1, 10, epochs=0).for_client(INFO)
    module.after_training({})
    assert count_floats(module.update_state()) == 2_558
    assert count_bytes(module.update_state()) == 4 * 2_558
    module.load_broadcast(Broadcast({f"{MENTEE}{name}": t for name, t in CNN1(10).state_dict().items()}))
    assert module.update_state() == {}


# ---------------------------------------------------------------------------------------------------------------- errors
