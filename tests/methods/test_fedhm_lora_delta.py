"""FedHM on adapters that adds up changes."""

from typing import Any

import pytest
import torch
from tiny import CLASSES, infos, new_data, new_federation, same, still, tiny_vit

from lightning_fed.core.messages import ClientUpdate
from lightning_fed.methods import FedHMLoRA, FedHMLoRADelta
from lightning_fed.methods.fedhm_lora_delta import FedHMLoRADeltaServer

CLIENTS = infos(10, 10, 10)
RANKS = (1, 2, 5)


def server_of(number: int, kind: type[FedHMLoRA] = FedHMLoRADelta, **options: Any) -> FedHMLoRADeltaServer:
    """At the start of a round, with changes of full rank."""
    torch.manual_seed(0)
    method = kind(tiny_vit, CLASSES, **{"ranks": RANKS} | options)
    method.configure_model()
    server: Any = method.configure_server(CLIENTS[:number])
    changes = {name: torch.randn_like(tensor) if name.endswith(".change") else tensor for name, tensor in server.state.items()}
    server.load_state_dict(changes)
    server.on_round_start(1, CLIENTS[:number])
    return server


def moved(server: FedHMLoRADeltaServer, client: int) -> ClientUpdate:
    sent = server.broadcast(CLIENTS[client]).state
    return ClientUpdate(client, 1 + client, {name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in sent.items()})


@pytest.mark.parametrize("targets", ["fused_qkv", "separate"])
@pytest.mark.parametrize("known", [True, False], ids=["changes of full rank", "the first round"])
def test_who_learned_nothing_contributes_exact_zeros(targets: Any, known: bool) -> None:
    server = server_of(3, targets=targets)
    if not known:  # B is zero, and A is not
        server.load_state_dict({name: t.zero_() if name.endswith(".change") else t for name, t in server.state.items()})
    before = {name: tensor.clone() for name, tensor in server.state.items()}
    updates = [ClientUpdate(c.id, 1, {n: t.clone() for n, t in server.broadcast(c).state.items()}) for c in CLIENTS]
    assert not any(tensor.any() for update in updates for tensor in server.embed(update).values())
    server.aggregate(updates)
    assert same(server.state, before)


def test_rounds_in_which_nobody_learns_change_nothing() -> None:
    model = FedHMLoRADelta(tiny_vit, CLASSES, ranks=RANKS, optimizer=still)
    federation = new_federation(3, participation=0.7, evaluate_every=0)
    federation.fit(model, new_data(3, 60))
    state, initial = federation.run.server.state_dict(), federation.run.model.shared_state()
    assert not any(tensor.any() for name, tensor in state.items() if name.endswith(".change"))
    head = state.keys() & initial.keys() - {matrix.first for matrix in federation.run.server.matrices}
    assert len(head) == 2
    assert all(torch.equal(state[name], initial[name]) for name in head)


def test_the_mean_of_changes_is_added() -> None:
    """Of products of factors, and of the head."""
    server = server_of(3)
    before, starts = server.state, [server.broadcast(client).state for client in CLIENTS]
    updates = [moved(server, client) for client in range(3)]
    server.aggregate(updates)
    weights = (torch.tensor(RANKS) / max(RANKS)).double().softmax(dim=0)
    for matrix in server.matrices:
        step = torch.zeros_like(before[matrix.change], dtype=torch.float64)
        for update, start, weight in zip(updates, starts, weights, strict=True):
            for sign, state in ((1, update.state), (-1, start)):
                step += sign * weight * torch.cat([state[name] for name in matrix.second]).double() @ state[matrix.first].double()
        torch.testing.assert_close(server.state[matrix.change], (before[matrix.change] + step).float(), rtol=1e-6, atol=1e-6)
        assert torch.equal(server.state[matrix.first], before[matrix.first])  # with which new ranks start
    head = "backbone.network.classifier.bias"
    step = sum(weight * (update.state[head] - before[head]) for update, weight in zip(updates, weights, strict=True))
    torch.testing.assert_close(server.state[head], before[head] + step.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_client_moves_a_matrix_within_twice_its_rank(rank: int) -> None:
    server = server_of(1, ranks=[rank])
    before = server.state
    server.aggregate([moved(server, 0)])
    for matrix in server.matrices:
        values = torch.linalg.svdvals(server.state[matrix.change].double() - before[matrix.change])
        assert values[2 * rank :].max() < 1e-5 * values[0] < values[2 * rank - 1]


def test_what_lies_behind_every_rank_is_kept_and_in_fedhm_replaced() -> None:
    tails = {}
    for kind in (FedHMLoRA, FedHMLoRADelta):
        server = server_of(3, kind)
        idle = [ClientUpdate(client.id, 1, server.broadcast(client).state) for client in CLIENTS]
        before = 1 - server.decomposed.energy.shares()[max(RANKS)]
        tails[kind] = server.aggregate(idle)["server/energy_tail"]
        assert before > 0.01
    assert tails[FedHMLoRADelta] == pytest.approx(before)
    assert tails[FedHMLoRA] < 1e-6  # nobody has them
