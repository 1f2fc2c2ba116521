"""FedAMP against its paper, and a loop in plain PyTorch."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import (
    CLASSES,
    INFO,
    Net,
    NoisyNet,
    Recording,
    momentum,
    new_data,
    new_trainer,
    private_states,
    same,
    server_client_states,
    sgd,
)
from tiny_loops import fixed, step, stripped, turn_of
from tiny_rounds import assert_same_runs, fit, with_storage
from torch import Tensor
from torch.nn.functional import cross_entropy

import lightning_fed.core.client_state
from lightning_fed.core import FineTuning
from lightning_fed.core.client_state import Vectors, flatten
from lightning_fed.core.messages import Broadcast
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.engines.compression import Compression
from lightning_fed.engines.turn_loop import QUIET
from lightning_fed.errors import FederationError
from lightning_fed.methods import FedAMP, Standalone
from lightning_fed.methods.fedamp import CLOUD, MODEL, CloudServer
from lightning_fed.models import CNN1
from lightning_fed.tensors import State, count_bytes, count_floats

LIVELY = {"alpha": 1.0, "sigma": 5.0}
"""Settings with which the clients of these tests notice each other."""


fit = partial(fit, rounds=3)


def info(client: int) -> ClientInfo:
    return ClientInfo(client, 1, 0, 0, ())


def new_server(models: list[Tensor], tmp_path: Path, round: int = 1, **options: Any) -> CloudServer:
    """A server that has got these parameters, in a round that begins with everybody taking part."""
    state = {"model/a": models[0][:2].clone(), "model/b": models[0][2:].clone()}
    server = CloudServer(state, FedAMP(Net, CLASSES, **{"alpha": 0.8, "sigma": 2.0} | options))
    with_storage(server, tmp_path)
    for client, model in enumerate(models):
        server.client_state.put(client, {MODEL: model}, round)
    server.on_round_start(round + 1, [info(client) for client in range(len(models))])
    return server


def xi(server: CloudServer) -> Tensor:
    everybody = list(server.client_state)
    return server.weights(Vectors(server.client_state, MODEL, everybody, server.size), everybody)


def clouds(server: CloudServer) -> list[Tensor]:
    return [flatten(server.broadcast(info(client)).state) for client in server.client_state]


@pytest.fixture
def models() -> list[Tensor]:
    torch.manual_seed(2)
    return [torch.randn(7) for _ in range(5)]


# ----------------------------------------------------------------------------------------------------------------- the server


def test_weights_are_those_of_the_paper(models: list[Tensor], tmp_path: Path) -> None:
    found = xi(new_server(models, tmp_path))
    for i, one in enumerate(models):
        for j, other in enumerate(models):
            if i != j:
                distance = (one.double() - other.double()).square().sum()
                assert found[i, j].item() == pytest.approx((0.8 / 2.0 * torch.exp(-distance / 2.0)).item(), rel=1e-12)
    torch.testing.assert_close(found.sum(dim=1), torch.ones(5, dtype=torch.float64))
    off = found - found.diag().diag()
    torch.testing.assert_close(off, off.T, rtol=1e-12, atol=0)


@pytest.mark.parametrize("alpha", [0.5, 1e4])
def test_equal_models_stay_bit_for_bit(models: list[Tensor], tmp_path: Path, alpha: float) -> None:
    """However far from 0 the weights are."""
    server = new_server(models[:1] * 40, tmp_path, sigma=100.0, alpha=alpha)
    assert xi(server).diag().min() == pytest.approx(1 - 39 * alpha / 100)
    assert all(torch.equal(cloud, models[0]) for cloud in clouds(server))


def test_the_heuristic(models: list[Tensor], tmp_path: Path) -> None:
    found = xi(new_server(models, tmp_path, self_weight=0.3, sigma=4.0))
    cosines = torch.cosine_similarity(torch.stack(models).double()[:, None], torch.stack(models).double()[None], dim=2)
    for i in range(5):
        others = [j for j in range(5) if j != i]
        torch.testing.assert_close(found[i, others], 0.7 * (4.0 * cosines[i, others]).softmax(dim=0))
    torch.testing.assert_close(found.diag(), torch.full((5,), 0.3, dtype=torch.float64))


def test_alone_the_heuristic_keeps_its_own(models: list[Tensor], tmp_path: Path) -> None:
    server = new_server(models[:1], tmp_path, self_weight=0.3)
    assert xi(server).tolist() == [[1.0]]


def test_participants_a_few_at_a_time(models: list[Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = clouds(new_server(models, tmp_path / "whole"))
    monkeypatch.setattr(lightning_fed.core.client_state, "BLOCK", 4)  # two vectors at a time, and a column
    server = new_server(models, tmp_path / "parts")
    for client in (4, 0, 1, 2, 3, 4):
        assert len(server._ready) <= 2
        torch.testing.assert_close(flatten(server.broadcast(info(client)).state), whole[client])


# ----------------------------------------------------------------------------------------------------------------- the client


def of_cloud(module: FedAMP) -> Broadcast:
    """A cloud model that is the module's own."""
    return Broadcast({name.replace(MODEL, CLOUD): tensor for name, tensor in module.update_state().items()})


def moved(module: FedAMP) -> dict[str, Tensor]:
    """Send a cloud model and go far from it; returns the differences."""
    module.load_broadcast(of_cloud(module))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter))
    return {name: p.detach() - module.cloud[name] for name, p in module.named_parameters()}


def test_a_step_minimises_the_second_term() -> None:
    """It minimises |w - v|² / 2η + λ/2α |w - u|², v being where the optimizer's step ends. Re-implementations that make the term of
    data without a gradient train alone.
    """
    rate, lam, alpha = 0.1, 0.7, 0.2
    module = FedAMP(Net, CLASSES, lam, alpha=alpha, optimizer=sgd).for_client(INFO)
    plain = FedAMP(Net, CLASSES, 0.0, optimizer=sgd).for_client(INFO)
    away = moved(module)
    start = {name: p.detach().clone() for name, p in module.named_parameters()}
    plain.load_state_dict(start, strict=False)
    for each in (module, plain):
        new_trainer(**QUIET, max_epochs=1, limit_train_batches=1, limit_val_batches=0).fit(each, datamodule=new_data().client(1))
    ends = dict(plain.named_parameters())
    for name, parameter in module.named_parameters():
        u, v = start[name] - away[name], ends[name].detach()
        torch.testing.assert_close(
            parameter.detach(), (v / rate + lam / alpha * u) / (1 / rate + lam / alpha), rtol=1e-4, atol=1e-5
        )


def test_only_the_rounds_own_phase_is_drawn_to_the_cloud() -> None:
    """Adapting before measuring is not."""
    plain, drawn = (
        fit(FedAMP(Net, CLASSES, lam, **LIVELY, optimizer=sgd, epochs=0, fine_tuning=FineTuning(epochs=1)), rounds=2)
        for lam in (0.0, 1.0)
    )
    assert plain.run.results == drawn.run.results


# ----------------------------------------------------------------------------------------------------------------- the rounds


@pytest.mark.often(1)
@pytest.mark.parametrize("participation", [0.5, 1.0])
def test_without_the_second_term_it_is_standalone_bit_for_bit(participation: float) -> None:
    ours, theirs = (
        FedAMP(fixed(Net), CLASSES, 0.0, optimizer=momentum, epochs=2),
        Standalone(fixed(Net), CLASSES, momentum, epochs=2),
    )
    assert_same_runs(ours, theirs, "clients", "results", rounds=3, participation=participation)


def bare_rounds(model: FedAMP, initial: State, rounds: int, cohorts: list[list[int]]) -> list[State]:
    """The method once more, from its card: everybody's parameters after some rounds."""
    data = new_data(3, 120)
    data.setup()
    own = [{name: tensor.clone() for name, tensor in initial.items()} for _ in range(3)]
    sent: dict[int, State] = {}
    for round in range(1, rounds + 1):
        alpha = model.alpha * model.alpha_decay ** ((round - 1) // model.alpha_every)
        anchors: dict[int, State] = {}
        for i in cohorts[round - 1]:
            u = {name: tensor.double() for name, tensor in own[i].items()}
            for j, theirs in sent.items():
                if j != i:
                    distance = sum((own[i][name].double() - theirs[name].double()).square().sum() for name in theirs)
                    weight = alpha / model.sigma * torch.exp(-torch.as_tensor(distance) / model.sigma)
                    u = {name: u[name] + weight * (theirs[name].double() - own[i][name].double()) for name in u}
            anchors[i] = {name: tensor.float() for name, tensor in u.items()}
        for i in cohorts[round - 1]:
            network = Net(CLASSES)
            network.load_state_dict(own[i])
            optimizer = momentum(network.parameters())
            for x, y in turn_of(data, i, round, model.epochs):
                step(optimizer, cross_entropy(network(x), y))
                c = 0.1 * model.lam / alpha
                with torch.no_grad():
                    for name, p in network.named_parameters():
                        p.copy_((p + c * anchors[i][name]) / (1 + c))
            own[i] = {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}
        sent |= {i: own[i] for i in cohorts[round - 1]}
    return own


@pytest.mark.parametrize("participation", [0.7, 1.0])
def test_rounds_are_those_of_a_bare_loop(participation: float) -> None:
    def model() -> FedAMP:
        return FedAMP(Net, CLASSES, 1.0, **LIVELY, alpha_every=2, optimizer=momentum, epochs=2)

    engine = Recording()
    federation = fit(model(), participation=participation, engine=engine)
    cohorts = [[turn.client.id for turn, _ in engine.fits(round)] for round in (1, 2, 3)]
    initial = {name.removeprefix("model/backbone."): t for name, t in federation.run.server.state_dict().items()}
    expected = bare_rounds(model(), initial, 3, cohorts)
    for client, private in private_states(federation).items():
        torch.testing.assert_close(stripped(private), expected[client], rtol=1e-4, atol=1e-5)


def test_the_first_anchor_is_the_first_model_and_the_cloud_may_be_the_start() -> None:
    with_own, with_cloud = (
        fit(FedAMP(Net, CLASSES, 0.0, self_weight=0.5, start=start, optimizer=sgd), rounds=rounds)
        for start, rounds in (("own", 1), ("cloud", 1))
    )
    assert with_own.run.results == with_cloud.run.results
    engine = Recording()
    fit(FedAMP(Net, CLASSES, 0.0, self_weight=0.5, start="cloud", optimizer=sgd, epochs=0), engine=engine, rounds=2)
    turn, update = engine.fits(2)[1]
    assert same(update.state, turn.broadcast.state)


# ------------------------------------------------------------------------------------------------------------------- the wire


def test_as_much_travels_as_with_fedavg_and_no_buffers() -> None:
    module = FedAMP(CNN1, 10).for_client(ClientInfo(0, 1, 0, 0, (1,) * 10))
    assert count_floats(module.update_state()) == 2_621_558
    assert count_bytes(module.update_state()) == 4 * 2_621_558
    row = fit(FedAMP(NoisyNet, CLASSES, optimizer=sgd), rounds=1).run.history[0]
    assert row["traffic/down_parameters"] == row["traffic/up_parameters"] == 3 * sum(p.numel() for p in NoisyNet().parameters())
    assert row["traffic/down_bytes"] == row["traffic/up_bytes"] == 4 * row["traffic/up_parameters"]


def test_a_broadcast_that_does_not_fit_is_refused() -> None:
    module = FedAMP(Net, CLASSES).for_client(INFO)
    broadcast = of_cloud(module)
    broadcast.state.pop("cloud/backbone.head.bias")
    with pytest.raises(FederationError, match=r"The payload for FedAMP lacks 'cloud/backbone\.head\.bias'"):
        module.load_broadcast(broadcast)


@pytest.mark.parametrize("up", ["bf16", "int8"])
def test_the_rounding_of_a_model_does_not_grow_with_its_distance_from_the_cloud(up: Any) -> None:
    """By default the cloud models are far from all models, and a client's is no change of its cloud model."""
    federation = fit(FedAMP(Net, CLASSES, optimizer=sgd), compression=Compression(up))
    for client, kept in server_client_states(federation).items():
        state = private_states(federation)[client]
        own = flatten({name: state[name.removeprefix(MODEL)] for name in federation.run.server.state})
        assert 0 < (kept[MODEL] - own).norm() < 0.02 * own.norm()
