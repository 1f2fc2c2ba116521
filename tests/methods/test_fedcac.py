"""FedCAC against its paper, and a loop in plain PyTorch."""

from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny import CLASSES, INFO, Net, NoisyNet, Recording, momentum, new_data, same, server_client_states, sgd
from tiny_loops import learn, turn_of
from tiny_rounds import assert_same_runs, fit, with_storage
from torch import Tensor

import lightning_fed.core.client_state
from lightning_fed.core.client_state import flatten
from lightning_fed.core.messages import Broadcast, ClientUpdate
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.errors import FederationError
from lightning_fed.methods import FedAvg, FedCAC
from lightning_fed.methods.fedcac import CRITICAL, CollaborationServer, collaborators, critical_entries, overlap_threshold
from lightning_fed.models import CNN1
from lightning_fed.tensors import State, count_bytes, count_floats, pack_bits, unpack_bits

fit = partial(fit, rounds=3)


# ------------------------------------------------------------------------------------------------------------ what is critical


@pytest.mark.parametrize("tau", [0.0, 0.1, 0.29, 0.5, 0.7, 1.0])
@pytest.mark.parametrize("shape", [(90,), (9, 10), (1,), (7, 1, 3, 3)])
def test_the_share_of_a_tensor_is_critical(tau: float, shape: tuple[int, ...]) -> None:
    """⌊τ n⌋ entries, also where the product of floats is a little less."""
    torch.manual_seed(0)
    effect = torch.randn(shape)
    mask = critical_entries(effect, tau)
    quota = int(Fraction(str(tau)) * effect.numel())
    assert (mask.shape, int(mask.sum())) == (effect.shape, quota)
    if 0 < quota < effect.numel():
        assert effect[mask].abs().min() > effect[~mask].abs().max()


def test_equal_effects_may_exceed_the_share() -> None:
    assert critical_entries(torch.tensor([3.0, -1.0, 1.0, 0.5]), 0.5).tolist() == [True, True, True, False]


def test_where_little_moved_all_that_moved_is_critical() -> None:
    """A threshold of zero would make those critical that did not."""
    assert critical_entries(torch.tensor([1.0, 1e-15, 1e-25, 0.0]), 0.75).tolist() == [True, True, False, False]
    assert not critical_entries(torch.zeros(8), 0.5).any()


def masks_to_common(masks: Tensor) -> Tensor:
    return masks.long() @ masks.long().T


def overlaps(masks: Tensor) -> list[list[Fraction]]:
    """O_ij = 1 - |M_i - M_j| / 2 |M_i|, pair by pair."""
    return [[1 - Fraction(int((one != other).sum()), 2 * int(one.sum())) for other in masks] for one in masks]


@pytest.fixture
def masks() -> Tensor:
    """Of five clients, of different sizes."""
    torch.manual_seed(4)
    return torch.rand(5, 60) < torch.tensor([0.3, 0.4, 0.5, 0.6, 0.5])[:, None]


@pytest.mark.parametrize("t", [1, 5, 10, 11])
def test_threshold_and_collaborators_are_those_of_the_paper(masks: Tensor, t: int) -> None:
    found, o = collaborators(masks_to_common(masks), Fraction(t, 10)), overlaps(masks)
    pairs = [o[i][j] for i in range(5) for j in range(5) if i != j]
    mean = sum(pairs, start=Fraction()) / len(pairs)
    threshold = mean + Fraction(t, 10) * (max(pairs) - mean)
    assert overlap_threshold(masks_to_common(masks), Fraction(t, 10)) == threshold
    assert found.tolist() == [[i == j or o[i][j] >= threshold for j in range(5)] for i in range(5)]
    if t == 10:  # those that attain the maximum
        assert found.sum() == 5 + sum(pair == max(pairs) for pair in pairs)
    if t > 10:
        assert torch.equal(found, torch.eye(5, dtype=torch.bool))


def test_equal_masks_always_collaborate() -> None:
    common = masks_to_common((torch.rand(60) < 0.4).expand(4, -1))
    for t in (1, 100, 10_000):
        assert overlap_threshold(common, Fraction(t, 100)) == 1
        assert collaborators(common, Fraction(t, 100)).all()


def test_who_has_nothing_critical_has_no_overlap_of_its_own() -> None:
    """That of others with it is what the formula says, a half."""
    masks = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]]).bool()
    found = collaborators(masks_to_common(masks), Fraction(1, 100))
    assert found[2].tolist() == [False, False, True]
    assert overlap_threshold(masks_to_common(masks), Fraction(1)) == Fraction(1, 2)
    assert found[:2].all()
    assert collaborators(masks_to_common(masks[2:].expand(3, -1)), Fraction(1)).tolist() == torch.eye(3).bool().tolist()
    assert collaborators(masks_to_common(masks[:1]), Fraction(1)).tolist() == [[True]]


# ----------------------------------------------------------------------------------------------------------------- the server


def new_server(tmp_path: Path, beta: int = 100) -> CollaborationServer:
    server = CollaborationServer({"b": torch.zeros(3, 4), "a": torch.zeros(5)}, "examples", beta)
    with_storage(server, tmp_path)
    return server


def update(client: int, examples: int, vector: Tensor, mask: Tensor) -> ClientUpdate:
    return ClientUpdate(client, examples, {"b": vector[:12].view(3, 4), "a": vector[12:], CRITICAL: pack_bits(mask)})


def info(client: int) -> ClientInfo:
    return ClientInfo(client, 1, 0, 0, ())


@pytest.mark.parametrize("block", [1, 2**23])
def test_what_a_client_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Its critical entries from its collaborators, the others from all."""
    monkeypatch.setattr(lightning_fed.core.client_state, "BLOCK", block)
    torch.manual_seed(0)
    vectors, server = torch.randn(3, 17), new_server(tmp_path)
    masks = torch.zeros(3, 17).bool()
    masks[0, :6], masks[1, 1:7], masks[2, 11:] = True, True, True
    server.on_round_start(1, [])
    metrics = server.aggregate(update(client, client + 1, vectors[client], masks[client]) for client in range(3))
    assert metrics == {"server/collaborators": pytest.approx(2 / 3)}  # 0 and 1 with each other
    mean = (vectors[0] + 2 * vectors[1] + 3 * vectors[2]) / 6
    pair = (vectors[0] + vectors[1]) / 2
    for client, customized in enumerate((pair, pair, vectors[2])):
        torch.testing.assert_close(flatten(server.broadcast(info(client)).state), torch.where(masks[client], customized, mean))
    assert torch.equal(flatten(server.broadcast(info(2)).state)[11:], vectors[2, 11:])
    assert same(server.broadcast(info(9)).state, server.state)
    assert not list(server.round_state)


# ----------------------------------------------------------------------------------------------------------------- the rounds


@pytest.mark.often(1)
@pytest.mark.parametrize("participation", [0.7, 1.0])
def test_with_nothing_critical_it_is_fedavg_bit_for_bit(participation: float) -> None:
    ours, theirs = FedCAC(Net, CLASSES, 0.0, optimizer=momentum, epochs=2), FedAvg(Net, CLASSES, momentum, epochs=2)
    assert_same_runs(ours, theirs, "server", "results", rounds=3, participation=participation)


def test_after_round_beta_critical_entries_are_the_clients_own_bit_for_bit() -> None:
    engine = Recording()
    federation = fit(FedCAC(Net, CLASSES, 0.4, beta=1, optimizer=momentum), engine=engine)
    assert [row["server/collaborators"] for row in federation.run.history][1:] == [0, 0]
    for turn, sent in engine.fits(3):
        mask = unpack_bits(sent.state[CRITICAL], sum(tensor.numel() for tensor in turn.broadcast.state.values()))
        own = flatten({name: sent.state[name] for name in federation.run.server.state_dict()})
        got = flatten(federation.run.server.broadcast(turn.client).state)
        assert torch.equal(got[mask], own[mask])
        assert torch.equal(got[~mask], flatten(federation.run.server.state_dict())[~mask])


def bare_rounds(model: FedCAC, initial: State, cohorts: list[list[int]]) -> list[dict[str, Tensor]]:
    """The method once more, from its card: what everybody gets after the rounds."""
    data = new_data(3, 120)
    data.setup()
    get = [dict(initial) for _ in range(3)]
    customized: dict[int, tuple[dict[str, Tensor], dict[str, Tensor]]] = {}
    for t, cohort in enumerate(cohorts, start=1):
        trained: dict[int, dict[str, Tensor]] = {}
        critical: dict[int, dict[str, Tensor]] = {}
        for k in cohort:
            network = Net(CLASSES)
            network.load_state_dict(get[k])
            learn(network, turn_of(data, k, t, model.epochs), momentum)
            trained[k] = {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}
            critical[k] = {}
            for name, after in trained[k].items():
                effect = ((after - get[k][name]) * after).abs().flatten()
                quota = int(model.tau * len(effect))
                least = effect.sort(descending=True).values[quota - 1]
                critical[k][name] = ((effect >= least) if least > 1e-10 else (effect > 1e-20)).view(after.shape)
        flat = {k: torch.cat([mask.flatten() for mask in critical[k].values()]) for k in cohort}
        o = {(i, j): 1 - int((flat[i] != flat[j]).sum()) / (2 * int(flat[i].sum())) for i in cohort for j in cohort if i != j}
        mean, largest = sum(o.values()) / len(o), max(o.values())
        sizes = {k: data.clients[k].num_train for k in cohort}
        everybody = {name: sum(sizes[k] * trained[k][name].double() for k in cohort) / sum(sizes.values()) for name in initial}
        for i in cohort:
            together = [j for j in cohort if j == i or o[i, j] >= mean + t / model.beta * (largest - mean) - 1e-12]
            means = {name: sum(trained[j][name].double() for j in together) / len(together) for name in initial}
            customized[i] = (critical[i], means)
        for k in range(3):
            if k in customized:
                mask, own = customized[k]
                get[k] = {name: torch.where(mask[name], own[name], everybody[name]).float() for name in initial}
            else:
                get[k] = {name: tensor.float() for name, tensor in everybody.items()}
    return get


@pytest.mark.often(1)
@pytest.mark.parametrize("participation", [0.7, 1.0])
def test_rounds_are_those_of_a_bare_loop(participation: float) -> None:
    engine, model = Recording(), partial(FedCAC, Net, CLASSES, 0.3, 2, optimizer=momentum, epochs=2)
    federation = fit(model(), participation=participation, engine=engine)
    cohorts = [[turn.client.id for turn, _ in engine.fits(round)] for round in (1, 2, 3)]
    initial = {name.removeprefix("backbone."): tensor for name, tensor in engine.turns[0].broadcast.state.items()}
    expected = bare_rounds(model(), initial, cohorts)
    for client in range(3):
        torch.testing.assert_close(federation.client_module(client).backbone.state_dict(), expected[client], rtol=1e-4, atol=1e-5)


# ----------------------------------------------------------------------------------------------------------------- the client


def test_without_training_nothing_is_critical() -> None:
    federation = fit(FedCAC(Net, CLASSES, epochs=0))
    assert not any(state[CRITICAL].any() for state in server_client_states(federation).values())


def test_traffic_is_the_parameters_and_a_bit_for_each_on_the_way_up() -> None:
    module = FedCAC(CNN1, 10).for_client(ClientInfo(0, 1, 0, 0, (1,) * 10))
    assert count_floats(module.update_state()) == 2_621_558
    assert count_bytes(module.update_state()) == 4 * 2_621_558 + 327_695
    row = fit(FedCAC(NoisyNet, CLASSES, optimizer=sgd), rounds=1).run.history[0]
    parameters = sum(p.numel() for p in NoisyNet().parameters())
    assert row["traffic/down_parameters"] == row["traffic/up_parameters"] == 3 * parameters
    assert row["traffic/down_bytes"] == 3 * 4 * parameters
    assert row["traffic/up_bytes"] == 3 * (4 * parameters + -(-parameters // 8))


def test_a_mask_of_another_length_is_refused() -> None:
    class Short(FedCAC):
        def payload(self) -> State:
            return {CRITICAL: pack_bits(self.critical[:-8])}

    with pytest.raises(FederationError, match="The update of client 0 has 'critical' of shape"):
        fit(Short(Net, CLASSES))
    module = FedCAC(Net, CLASSES).for_client(INFO)
    with pytest.raises(FederationError, match="The payload for FedCAC holds 'critical', which does not belong there"):
        module.load_broadcast(Broadcast(module.update_state()))
