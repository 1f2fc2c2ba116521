"""FedHM that adds up changes: what it keeps, and that nothing else is different."""

import copy
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from often import mostly_slow
from tiny import CLASSES, Net, infos, new_data, same, still
from tiny_loops import step, stripped
from tiny_rounds import at_start, fit
from torch import Tensor, nn
from torch.nn.functional import conv2d, cross_entropy, linear

from lightning_fed.core.messages import ClientUpdate
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.methods import FedHM, FedHMDelta
from lightning_fed.methods.fedhm_delta import AddsChanges
from lightning_fed.models import ResNet8
from lightning_fed.nn.factorize import unroll
from lightning_fed.tensors import State

without_decay = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
TinyResNet = partial(ResNet8, width=1 / 16)
CLIENTS = infos(10, 10, 10)
RATIOS = (1.0, 0.5, 0.25)


def server_of(number: int, network: Any = TinyResNet, kind: type[FedHM] = FedHMDelta, **options: Any) -> AddsChanges:
    """At the start of round 1."""
    torch.manual_seed(0)
    method = kind(network, CLASSES, **{"ratios": RATIOS} | options)
    return at_start(method, CLIENTS[:number])


def moved(server: AddsChanges, client: int, by: float = 0.1) -> ClientUpdate:
    """An update whose numbers differ from those that were sent."""
    stream = torch.Generator().manual_seed(client)
    sent = server.broadcast(CLIENTS[client]).state
    state = {name: tensor + by * torch.randn(tensor.shape, generator=stream) for name, tensor in sent.items()}
    return ClientUpdate(client, 1 + client, state)


def recovered(state: State, layer: str) -> Tensor:
    """The kernel, or the matrix, of two layers in a row, found by sending unit impulses through them; float64."""
    first, second = (state[f"{layer}.{which}.weight"].double() for which in (0, 1))
    if first.dim() == 2:
        return linear(linear(torch.eye(first.shape[1], dtype=torch.float64), first), second).T
    height, width, inputs = first.shape[2], second.shape[3], first.shape[1]
    impulses = torch.zeros(inputs, inputs, 2 * height - 1, 2 * width - 1, dtype=torch.float64)
    impulses[range(inputs), range(inputs), height - 1, width - 1] = 1
    return conv2d(conv2d(impulses, first), second).flip(2, 3).transpose(0, 1)


def whole(state: State, layers: Sequence[str]) -> State:
    """A version of any size as a network of full size, in float64."""
    names = {name for name in state if not any(name.startswith(f"{layer}.") for layer in layers)}
    result = {name: state[name].double() for name in names}
    for layer in layers:
        if f"{layer}.weight" in state:
            return {name: tensor.double() for name, tensor in state.items()}
        result[f"{layer}.weight"] = recovered(state, layer)
        if f"{layer}.1.bias" in state:
            result[f"{layer}.bias"] = state[f"{layer}.1.bias"].double()
    return result


# -------------------------------------------------------------------------------------------------------- what a round keeps


@pytest.mark.parametrize("network", mostly_slow([Net, TinyResNet], often={TinyResNet}))
@pytest.mark.parametrize("ratios", [RATIOS, (0.5, 0.25), pytest.param((0.25,), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("anchor", mostly_slow(["never", "always"], often={"never"}))
def test_rounds_in_which_nobody_learns_change_nothing(network: Any, ratios: tuple[float, ...], anchor: Any) -> None:
    model = FedHMDelta(network, CLASSES, ratios=ratios, anchor=anchor, optimizer=still)
    federation = fit(model, new_data(3, 80, batch_size=1000), rounds=3, participation=0.7)
    assert same(federation.run.server.state_dict(), federation.run.model.shared_state())


def test_a_client_that_learned_nothing_contributes_exact_zeros_however_its_tensors_lie_in_memory() -> None:
    server = server_of(3)
    for client in CLIENTS:
        sent = server.broadcast(client).state
        back = {name: t.clone(memory_format=torch.channels_last) if t.dim() == 4 else t.clone() for name, t in sent.items()}
        change = server.embed(ClientUpdate(client.id, 1, back))
        assert change.keys() == server.state.keys()
        assert not any(tensor.any() for tensor in change.values())


@pytest.mark.parametrize("participants", [[0], [0, 1]], ids=["one", "two"])
@pytest.mark.parametrize("ratio", [0.25, 0.125])
def test_clients_of_a_rank_move_a_layer_within_twice_it(ratio: float, participants: list[int]) -> None:
    """Two of them within three times it: they start from the same factors."""
    server = server_of(2, partial(ResNet8, width=1 / 4), ratios=[ratio])
    before = server.state
    server.aggregate([moved(server, client) for client in participants])
    for layer in server.layers:
        rank = server.version(ratio)[f"{layer}.0.weight"].shape[0]
        values = torch.linalg.svdvals(unroll(server.state[f"{layer}.weight"].double() - before[f"{layer}.weight"]))
        bound = (1 + len(participants)) * rank
        assert bound < len(values)
        assert values[bound:].max() < 1e-5 * values[0] < values[bound - 1]


# ----------------------------------------------------------------------------------------------------------- what is averaged


@pytest.mark.parametrize("network", [Net, TinyResNet], ids=["linear", "convolutions"])
@pytest.mark.parametrize("cohort", [[0, 1, 2], [1, 2], [2]], ids=str)
def test_the_mean_of_changes_is_added(network: Any, cohort: list[int]) -> None:
    """Whoever is there counts with softmax(ratio), whoever is lost or absent does not."""
    server = server_of(3, network)
    before, layers = server.state, server.layers
    updates = [moved(server, client) for client in cohort]
    starts = [server.broadcast(CLIENTS[client]).state for client in cohort]
    server.aggregate(updates)
    weights = torch.tensor([RATIOS[client] for client in cohort]).double().softmax(dim=0)
    for name, tensor in before.items():
        changes = [whole(u.state, layers)[name] - whole(start, layers)[name] for u, start in zip(updates, starts, strict=True)]
        expected = tensor.double() + sum(weight * change for weight, change in zip(weights, changes, strict=True))
        torch.testing.assert_close(server.state[name], expected.float(), rtol=1e-6, atol=1e-6)
        assert not torch.equal(server.state[name], tensor)


def test_if_nobody_s_update_arrives_the_model_stays() -> None:
    server = server_of(3)
    before = server.state
    server.aggregate([])
    assert same(server.state, before)


def test_the_anchor_is_a_participant_who_changed_nothing() -> None:
    steps = []
    for anchor in ("never", "missing_largest", "always"):
        server = server_of(3, anchor=anchor)
        before = server.state
        server.aggregate([moved(server, 1), moved(server, 2)])
        steps.append({name: server.state[name] - tensor for name, tensor in before.items()})
    share = sum(math.exp(r) for r in RATIOS[1:]) / sum(math.exp(r) for r in RATIOS)
    for name, change in steps[0].items():
        for other in steps[1:]:
            torch.testing.assert_close(other[name], share * change, rtol=1e-4, atol=1e-6)


def test_rows_of_the_head_move_by_the_changes_of_their_owners() -> None:
    """Classes: 0 of the first client, 1 of both, 2 of the second, 3 of nobody."""
    owned = [(1, 1, 0, 0), (0, 1, 1, 0)]
    participants = [ClientInfo(k, 10, 2, 2, owned[k]) for k in range(2)]
    method = FedHMDelta(Net, CLASSES, ratios=[1.0, 0.5])
    method.configure_model()
    server: Any = method.configure_server(participants)
    before = server.state["backbone.head.weight"]
    updates = [
        ClientUpdate(k, 1, {name: tensor + 10 * (k + 1) for name, tensor in server.broadcast(participants[k]).state.items()})
        for k in range(2)
    ]
    server.aggregate(updates)
    both = (10 * math.e + 20 * math.exp(0.5)) / (math.e + math.exp(0.5))
    change = server.state["backbone.head.weight"] - before
    torch.testing.assert_close(change.mean(dim=1), torch.tensor([10.0, both, 20.0, 0.0]))
    assert torch.equal(server.state["backbone.head.weight"][3], before[3])


# ------------------------------------------------------------------------------------------------------------ a plain loop


class LowRank(nn.Sequential):
    """Two linear layers for one, from the best factors that numpy's decomposition gives."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        left, values, right = torch.linalg.svd(layer.weight.detach().double().T, full_matrices=False)
        root = values[:rank].sqrt()
        first, second = nn.Linear(len(left), rank, bias=False), nn.Linear(rank, right.shape[1])
        super().__init__(first, second)
        with torch.no_grad():
            first.weight.copy_((left[:, :rank] * root).T)
            second.weight.copy_(right[:rank].T * root)
            second.bias.copy_(layer.bias)


def test_two_rounds_equal_a_plain_loop() -> None:
    """Clients of full size, 1/2 and 1/4 on their data in one batch; momentum that starts afresh; no weight decay."""
    data, epochs, layers = new_data(3, 90, batch_size=1000), 3, ["fc1", "fc2"]
    model = FedHMDelta(Net, CLASSES, ratios=RATIOS, masked=False, decay=0.0, optimizer=without_decay, epochs=epochs)
    federation = fit(model, data, rounds=2)
    network = Net(CLASSES)
    network.load_state_dict({n.removeprefix("backbone."): t for n, t in federation.run.model.shared_state().items()})
    weights = torch.tensor(RATIOS).softmax(dim=0)
    for _ in range(2):
        moves = {name: torch.zeros_like(tensor) for name, tensor in network.state_dict().items()}
        for client, (ratio, weight) in enumerate(zip(RATIOS, weights, strict=True)):
            own = copy.deepcopy(network)
            for layer in layers if ratio < 1 else ():
                plain = own.get_submodule(layer)
                assert isinstance(plain, nn.Linear)
                setattr(own, layer, LowRank(plain, max(1, round(ratio * min(plain.weight.shape)))))
            start = whole(own.state_dict(), layers)
            optimizer = without_decay(own.parameters())
            [(x, y)] = data.client(client).predict_dataloader()
            for _ in range(epochs):
                step(optimizer, cross_entropy(own(x), y))
            end = whole(own.state_dict(), layers)
            moves = {name: tensor + weight * (end[name] - start[name]).float() for name, tensor in moves.items()}
        network.load_state_dict({name: tensor + moves[name] for name, tensor in network.state_dict().items()})
    torch.testing.assert_close(stripped(federation.run.server.state_dict()), network.state_dict(), rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------------- energy


@pytest.mark.parametrize("kind", [FedHM, FedHMDelta])
@pytest.mark.parametrize("network", [Net, TinyResNet], ids=["linear", "convolutions"])
def test_the_energy_of_what_ranks_keep_is_reported(kind: type[FedHM], network: Any) -> None:
    server = server_of(3, network, kind)
    metrics = server.aggregate([moved(server, client) for client in range(3)])
    weights = {layer: server.state[f"{layer}.weight"] for layer in server.layers}
    total = sum(weight.double().square().sum().item() for weight in weights.values())
    for ratio in (0.5, 0.25):
        kept = sum(recovered(server.version(ratio), layer).square().sum().item() for layer in server.layers)
        assert metrics[f"server/energy_rank_{ratio}"] == pytest.approx(kept / total, rel=1e-5)
    assert metrics["server/energy_tail"] == pytest.approx(1 - metrics["server/energy_rank_0.5"])
    assert 0 < metrics["server/energy_rank_0.25"] < metrics["server/energy_rank_0.5"] < 1
    assert len(metrics) == 3


def test_where_everybody_has_the_whole_there_is_no_tail() -> None:
    server = server_of(2, ratios=[1.0])
    assert server.aggregate([moved(server, client) for client in range(2)]) == {}
