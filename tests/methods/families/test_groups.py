"""Clients of different size: who is averaged with whom, what the server keeps, and what is measured."""

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import safetensors.torch
import torch
from often import mostly_slow
from tiny import CLASSES, Recording, infos, new_data, new_federation, private_states, same, tiny_transformer
from tiny_loops import step
from tiny_rounds import checked
from tiny_vits import images, strong, vit_small
from torch import Tensor
from torch.nn.functional import cross_entropy

import lightning_fed.methods
from lightning_fed.core.messages import ClientUpdate
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.errors import FederationError
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import AdapterTuning
from lightning_fed.methods.families.group_server import GroupServer
from lightning_fed.methods.families.grouped_adapters import GroupTuning
from lightning_fed.seeding import INITIAL, seeded
from lightning_fed.tensors import State, count_floats

CLIENTS = infos(*range(10, 15))
SIZES = {"AdapterTuning": "hidden", "PromptTuning": "tokens", "PrefixTuning": "hidden"}
"""What a method calls its sizes."""
every_method = pytest.mark.parametrize("name", SIZES)


def method_of(name: str = "AdapterTuning", sizes: tuple[int, ...] = (2, 3), **options: Any) -> GroupTuning:
    method = getattr(lightning_fed.methods, name)
    return method(**{"backbone": strong, "num_classes": CLASSES, SIZES[name]: sizes} | options)


def server_of(name: str = "AdapterTuning", sizes: tuple[int, ...] = (2, 3), **options: Any) -> GroupServer:
    method = method_of(name, sizes, **options)
    method.configure_model()
    server = method.configure_server(CLIENTS)
    assert isinstance(server, GroupServer)
    return server


def update_of(server: GroupServer, client: int) -> ClientUpdate:
    state = {name: torch.randn_like(tensor) for name, tensor in server.states[server.groups[client]].items()}
    return ClientUpdate(client, 10 + client, state)


def bare_mean(updates: list[ClientUpdate], weights: list[int]) -> State:
    """Summed in float64 and divided once."""
    mean: State = {}
    for name, like in updates[0].state.items():
        total = torch.zeros_like(like, dtype=torch.float64)
        for update, weight in zip(updates, weights, strict=True):
            total += weight * update.state[name].double()
        mean[name] = (total / sum(weights)).float()
    return mean


def fit(method: GroupTuning, rounds: int = 2, **options: Any) -> tuple[Federation, Recording]:
    engine = Recording()
    federation = new_federation(rounds, engine=engine, **{"evaluate_every": 0} | options)
    federation.fit(method, new_data(5, 200))
    return federation, engine


@cache
def recorded(name: str) -> tuple[Federation, Recording]:
    """Five clients of two sizes; four of them in each of two rounds."""
    return fit(method_of(name), participation=0.8)


@cache
def recorded_alike() -> tuple[Federation, Recording, list[tuple[int, Any]]]:
    """Five clients of one size in one round, and the batches that they stepped on."""
    method = Noting(strong, CLASSES, hidden=(3,))
    method.seen = []
    return *fit(method, rounds=1), method.seen


class Noting(AdapterTuning):
    """Keeps the batches that it steps on, and whose they are."""

    seen: list[tuple[int, Any]]

    def client_step(self, batch: Any) -> Tensor:
        self.seen.append((self.client.id, batch))
        return super().client_step(batch)


# ----------------------------------------------------------------------------------------------------------------- the parts


@every_method
def test_a_copy_has_parts_of_its_own(name: str) -> None:
    module, x = method_of(name, (3,)), images()
    module.configure_model()
    before = module.eval()(x)
    copied = copy.deepcopy(module)
    head = {id(p) for p in copied.backbone.head.parameters()}
    with torch.no_grad():
        for parameter in copied.trainable():
            if id(parameter) not in head:
                parameter.normal_()
    assert torch.equal(module(x), before)
    assert not torch.allclose(copied(x), before, atol=1e-2)


VIT_SMALL_TRAINS: list[tuple[str, int, dict[str, Any], int]] = [
    *(("AdapterTuning", hidden, {}, 9_216 * hidden) for hidden in (8, 16, 32, 64)),
    ("AdapterTuning", 8, {"placement": "attention"}, 73_728),
    ("AdapterTuning", 8, {"placement": "both"}, 147_456),
    ("AdapterTuning", 8, {"bias": True}, 78_432),
    ("AdapterTuning", 8, {"placement": "both", "bias": True}, 156_864),
    *(("PromptTuning", tokens, {}, 4_608 * tokens) for tokens in (16, 32, 64, 128)),
    *(("PromptTuning", tokens, {"depth": "shallow"}, 384 * tokens) for tokens in (16, 128)),
    *(("PrefixTuning", hidden, {}, 18_432 * hidden) for hidden in (4, 8, 16, 32)),
    ("PrefixTuning", 4, {"length": 100}, 73_728),
    ("PrefixTuning", 4, {"length": 10, "reparametrize": False}, 12 * 2 * 10 * 384),
]
"""Size, options, and values beside the head's 3,850. FedHM's budget is 73,728."""


@pytest.mark.parametrize("place", mostly_slow(range(len(VIT_SMALL_TRAINS)), often={0, 7, 8, 12, 14, 19}))
def test_what_vit_small_trains(place: int) -> None:
    name, size, options, count = VIT_SMALL_TRAINS[place]
    method = method_of(name, (size,), backbone=vit_small, num_classes=10, **options)
    with torch.device("meta"):
        module = method.for_client(ClientInfo(0, 1, 0, 0, (1,) * 10, model_size=size))
    shared = {key: tensor for key, tensor in module.state_dict().items() if key in module.shared_names()}
    assert count_floats(shared) == count + 3850


# ------------------------------------------------------------------------------------------------------------------ starting


@every_method
def test_clients_of_a_size_start_from_the_same_tensors(name: str) -> None:
    server = server_of(name)
    sent = [server.broadcast(client) for client in CLIENTS]
    assert [broadcast.model_size for broadcast in sent] == [2, 3, 2, 3, 2]
    assert same(sent[0].state, sent[2].state)
    assert same(sent[1].state, sent[3].state)
    assert any(sent[0].state[key].shape != sent[1].state[key].shape for key in sent[0].state)
    for client in CLIENTS:
        module = method_of(name).for_client(replace(client, model_size=server.groups[client.id]), seed=client.id)
        module.load_broadcast(server.broadcast(client))
        assert same(module.shared_state(), sent[client.id].state)


@every_method
def test_the_servers_first_tensors_are_those_of_the_module(name: str) -> None:
    method = method_of(name, sizes=(3, 2))
    method.configure_model()
    own = {key: torch.randn_like(tensor) for key, tensor in method.shared_state().items()}
    method.load_shared_state(own)  # it was trained before, say
    server = method.configure_server(CLIENTS)
    assert same(server.states[3], own)
    assert server.states[2].keys() == own.keys()


def test_another_seed_draws_another_start() -> None:
    servers = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        servers.append(server_of())
    one, again, other = servers
    assert same(one.state_dict(), again.state_dict())
    for size in (2, 3):
        drawn = [key for key in one.states[size] if ".down." in key]
        assert len(drawn) == 2
        assert not any(torch.equal(one.states[size][key], other.states[size][key]) for key in drawn)


@every_method
def test_a_network_without_such_blocks_is_refused(name: str) -> None:
    with pytest.raises(FederationError, match=f"{name} needs a network with 'layers', which RobertaModel lacks"):
        method_of(name, backbone=tiny_transformer).configure_model()


# ------------------------------------------------------------------------------------------------------------------ learning


def test_one_size_is_federated_averaging() -> None:
    federation, engine, _ = recorded_alike()
    updates = [update for _, update in engine.fits(1)]
    weights = [update.num_examples for update in updates]
    assert len(set(weights)) == 5
    assert same(federation.run.server.state, bare_mean(updates, weights))
    assert not same(federation.run.server.state, bare_mean(updates, [1] * 5))


def test_a_turn_is_an_epoch_of_a_new_adam() -> None:
    federation, engine, seen = recorded_alike()
    for turn, update in engine.fits(1):
        module = federation.client_module(turn.client.id)
        module.load_shared_state(turn.broadcast.state)
        network = module.backbone.train()
        batches = [batch for client, batch in seen if client == turn.client.id]
        assert len(batches) == -(-turn.client.num_train // 16)
        optimizer = torch.optim.Adam([p for p in network.parameters() if p.requires_grad], lr=2e-3)
        for x, labels in batches:
            step(optimizer, cross_entropy(network(x), labels))
        expected = {f"backbone.{name}": p.detach() for name, p in network.named_parameters() if p.requires_grad}
        assert same(update.state, expected)


@pytest.mark.often(1)
@every_method
def test_nothing_stays_with_a_client(name: str) -> None:
    federation, engine = recorded(name)
    assert len(engine.fits(2)) == 4
    assert private_states(federation) == {}


@pytest.mark.often(1)
@every_method
def test_the_network_is_frozen_and_in_memory_once(name: str) -> None:
    drawn = method_of(name)
    with seeded(0, INITIAL):
        drawn.configure_model()
    before = drawn.networks.frozen[0].copy(CLASSES).state_dict()
    federation, engine = fit(method_of(name), rounds=1)
    plain = federation.run.model.networks.frozen[0].copy(CLASSES)
    body = before.keys() - plain.head_names()
    assert len(body) > 30
    for module in [*engine.worker._modules.values(), *(federation.client_module(client) for client in (0, 1))]:
        state = module.state_dict()
        for key in body:
            assert torch.equal(state[f"backbone.{key}"], before[key])
            assert state[f"backbone.{key}"].data_ptr() == plain.state_dict()[key].data_ptr()
        assert module.shared_names() == state.keys() - {f"backbone.{key}" for key in body}


# ------------------------------------------------------------------------------------------------------------------- merging


@every_method
@pytest.mark.parametrize("round", [1, 2])
def test_a_round_is_a_mean_for_each_size(name: str, round: int) -> None:
    federation, engine = recorded(name)
    groups = {size: [(t, u) for t, u in engine.fits(round) if t.broadcast.model_size == size] for size in (2, 3)}
    assert all(groups.values())
    assert {turn.client.id % 2 for turn, _ in groups[2]} == {0}
    for size, pairs in groups.items():
        mean = bare_mean([update for _, update in pairs], [update.num_examples for _, update in pairs])
        if round == 2:
            assert same(federation.run.server.states[size], mean)
        else:
            sent = next(turn.broadcast.state for turn, _ in engine.fits(2) if turn.broadcast.model_size == size)
            assert same(sent, mean)


def test_groups_never_mix() -> None:
    server, other = server_of(), server_of()
    updates = [update_of(server, client) for client in range(5)]
    loud = [u if u.client % 2 == 0 else replace(u, state={k: 1e6 * t for k, t in u.state.items()}) for u in updates]
    before = dict(server.states)
    server.aggregate(iter(updates))
    other.aggregate(iter(loud))
    assert same(server.states[2], other.states[2])
    for key in before[2]:
        assert not torch.equal(server.states[3][key], other.states[3][key])
        assert not torch.equal(server.states[2][key], before[2][key])


def test_a_size_that_nobody_has_keeps_its_state() -> None:
    server = server_of()
    before = dict(server.states)
    server.aggregate(iter([update_of(server, 0), update_of(server, 4)]))
    assert same(server.states[3], before[3])
    assert not same(server.states[2], before[2])


def test_a_group_can_be_weighted_equally() -> None:
    server = server_of()
    server.weighting = "uniform"
    updates = [update_of(server, client) for client in (0, 2, 4)]
    server.aggregate(iter(updates))
    assert same(server.states[2], bare_mean(updates, [1, 1, 1]))


def test_what_does_not_fit_or_diverged_is_refused_and_changes_nothing() -> None:
    server = server_of()
    before = server.state_dict()
    alien = replace(update_of(server, 1), client=2)
    with pytest.raises(FederationError, match=r"update of client 2 has .* of shape \(3, 8\), expected \(2, 8\)"):
        server.aggregate(checked(server, [update_of(server, 0), alien]))
    broken = update_of(server, 3)
    next(iter(broken.state.values()))[0] = float("nan")
    with pytest.raises(FederationError, match="update of client 3 holds NaN"):
        server.aggregate(checked(server, [update_of(server, 0), broken]))
    assert same(server.state_dict(), before)


# ----------------------------------------------------------------------------------------------------------------- measuring


@every_method
def test_several_sizes_are_measured_each(name: str) -> None:
    federation, engine = recorded(name)
    row = federation.run.history[-1]
    assert {"size_2/test_accuracy", "size_3/test_accuracy", "after/test_accuracy/mean"} <= row.keys()
    assert not any(column.startswith("global/") for column in row)
    assert federation.run.monitored("test") == "after/test_accuracy/mean"
    measured = [turn.broadcast for turn in engine.turns if turn.verb == "evaluate" and turn.client.id == -1]
    assert [broadcast.model_size for broadcast in measured] == [2, 3]
    data = federation.run.data.pooled()
    images, labels = data.data[data.splits[2]]
    for size, client in ((2, 0), (3, 1)):
        module = federation.client_module(client).eval()
        accuracy = (module(images).argmax(dim=1) == labels).float().mean().item()
        assert accuracy == pytest.approx(row[f"size_{size}/test_accuracy"])


@every_method
@pytest.mark.parametrize("sizes", [(3,), (3, 3)])
def test_one_size_is_a_global_model(name: str, sizes: tuple[int, ...]) -> None:
    method = method_of(name, sizes)
    assert method.monitor_model == "global"
    assert server_of(name, sizes).global_models().keys() == {"global"}
    assert method_of(name).monitor_model == "clients"
    assert server_of(name, (3, 2)).global_models().keys() == {"size_2", "size_3"}


def test_the_headline_of_one_size() -> None:
    federation, _, _ = recorded_alike()
    assert federation.run.monitored("test") == "global/test_accuracy"
    assert "global/test_accuracy" in federation.run.history[-1]


# ------------------------------------------------------------------------------------------------------------------- keeping


def test_the_servers_state_comes_back() -> None:
    server, other = server_of(), server_of()
    server.aggregate(iter([update_of(server, client) for client in range(5)]))
    assert not same(server.state_dict(), other.state_dict())
    other.load_state_dict(server.state_dict())
    assert all(same(server.states[size], other.states[size]) for size in (2, 3))
    assert len(server.state_dict()) == len(server.states[2]) + len(server.states[3])


@pytest.mark.parametrize(("client", "size"), mostly_slow([(None, 3), (0, 2), (1, 3)], often={(None, 3), (0, 2)}))
def test_the_server_exports_its_largest_model_and_a_client_its_own(client: int | None, size: int) -> None:
    federation, _ = fit(method_of(), rounds=1, run_dir="runs")
    new_federation(1, run_dir="runs").export(method_of(), new_data(5, 200), "exported", client)
    state = safetensors.torch.load_file("exported/model.safetensors")
    expected = {name.removeprefix("backbone."): tensor for name, tensor in federation.run.server.states[size].items()}
    assert same({key: state[key] for key in expected}, expected)
