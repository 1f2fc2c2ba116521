"""HETLoRA: ranks, what the server makes of them, and pruning."""

from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from tiny import CLASSES, Recording, infos, new_federation, new_texts, new_trainer, private_states, same, tiny_transformer
from tiny_adapters import A, B, adam
from tiny_rounds import AfterRounds, checked
from torch.nn.functional import cross_entropy

from lightning_fed.core.messages import ClientUpdate
from lightning_fed.core.phased_module import MOMENTS
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.engines.turn_loop import QUIET
from lightning_fed.errors import FederationError
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import HETLoRA
from lightning_fed.methods.families.exact_lora import Matrices
from lightning_fed.methods.hetlora import HETLoRAServer
from lightning_fed.models.adapters import COMMON
from lightning_fed.tensors import State


def method_of(**options: Any) -> HETLoRA:
    options = {"r_min": 2, "r_max": 6, "optimizer": adam, "steps": 2} | options
    return HETLoRA(tiny_transformer, CLASSES, **options)


def clients(number: int) -> list[ClientInfo]:
    return infos(*range(10, 10 + number))


def server_of(number: int, **options: Any) -> HETLoRAServer:
    method = method_of(**options)
    method.configure_model()
    server = method.configure_server(clients(number))
    assert isinstance(server, HETLoRAServer)
    return server


def filled(state: State, scale: float = 1.0) -> State:
    return {name: scale * torch.randn_like(tensor) for name, tensor in state.items()}


def updates_of(server: HETLoRAServer) -> list[ClientUpdate]:
    """An update of random numbers from everybody, later ones larger."""
    return [
        ClientUpdate(client, 10 + client, filled(server.broadcast(replace(clients(1)[0], id=client)).state, 1.0 + client))
        for client in server.ranks
    ]


def explicit_norm(state: State) -> float:
    products = [b.double() @ state[name.replace("lora_B", "lora_A")].double() for name, b in state.items() if "lora_B" in name]
    assert len(products) == 2
    return torch.stack([product.square().sum() for product in products]).sum().sqrt().item()


def weighted(states: list[State], weights: list[float]) -> State:
    """The weighted mean of states padded with zeros to rank 6."""
    total: State = {}
    for state, weight in zip(states, weights, strict=True):
        for name, tensor in state.items():
            lacking = 6 - tensor.shape[0] if "lora_A" in name else 6 - tensor.shape[1] if "lora_B" in name else 0
            whole = torch.nn.functional.pad(tensor.double(), (0, 0, 0, lacking) if "lora_A" in name else (0, lacking))
            total[name] = total.get(name, torch.zeros(())) + whole * weight / sum(weights)
    return total


def assert_state(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor.float(), rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------------------------ ranks


@pytest.mark.parametrize(
    ("r_min", "r_max", "number", "ranks"),
    [
        (8, 12, 8, [8, 8, 9, 9, 10, 10, 11, 11]),
        (6, 14, 4, [6, 8, 10, 12]),
        (6, 12, 8, [6, 6, 7, 8, 9, 9, 10, 11]),
        (5, 5, 3, [5, 5, 5]),
    ],
)
def test_ranks_at_first(r_min: int, r_max: int, number: int, ranks: list[int]) -> None:
    server = server_of(number, r_min=r_min, r_max=r_max)
    assert server.ranks == dict(enumerate(ranks))
    assert {name: tensor.shape for name, tensor in server.state.items() if name in (A, B)} == {A: (r_max, 8), B: (8, r_max)}
    for client in clients(number):
        sent = server.broadcast(client)
        assert sent.model_size == ranks[client.id]
        assert (sent.state[A].shape, sent.state[B].shape) == ((ranks[client.id], 8), (8, ranks[client.id]))
        assert torch.equal(sent.state[A], server.state[A][: ranks[client.id]])


def test_who_is_only_measured_moves_neither_ranks_nor_their_mean() -> None:
    """Those who take part have the ranks that they would have among themselves."""
    method = method_of(r_min=8, r_max=12)
    method.configure_model()
    absent = {0, 3, 5}
    server = method.configure_server([replace(client, takes_part=client.id not in absent) for client in clients(6)])
    assert server.ranks == {0: 8, 1: 8, 2: 9, 3: 10, 4: 10, 5: 10}
    here = [update for update in updates_of(server) if update.client not in absent]
    assert server.aggregate(iter(here)) == {"server/rank_mean": 9}


def test_scaling_is_the_same_for_every_rank() -> None:
    method = method_of(lora_alpha=12.0)
    for model_size in (None, 2, 5):
        module = method.for_client(replace(clients(1)[0], model_size=model_size))
        layer = module.backbone.network.roberta.encoder.layer[0].attention.self.query
        assert layer.scaling[COMMON] == pytest.approx(2)
        assert module.shared_state()[A].shape == (model_size or 6, 8)


# ----------------------------------------------------------------------------------------------------------------- server


def test_unequal_ranks_are_padded_with_zeros() -> None:
    """Where few clients have a rank, it fades: the weights are not normalized over those that have it."""
    server = server_of(4)
    assert list(server.ranks.values()) == [2, 3, 4, 5]
    updates = updates_of(server)
    server.aggregate(iter(updates))
    states = [update.state for update in updates]
    norms = [explicit_norm(state) for state in states]
    assert_state(server.state, weighted(states, norms))
    assert server.state[A].shape == (6, 8)
    assert server.state[B].shape == (8, 6)
    torch.testing.assert_close(server.state[A][4], states[3][A][4] * (norms[3] / sum(norms)))
    assert not server.state[A][5].any()


def test_the_first_round_without_products_has_equal_weights() -> None:
    server = server_of(3)
    updates = updates_of(server)
    for update in updates:
        update.state.update({name: torch.zeros_like(tensor) for name, tensor in update.state.items() if "lora_B" in name})
    server.aggregate(iter(updates))
    assert_state(server.state, weighted([update.state for update in updates], [1, 1, 1]))
    assert server.state[A].any()


def test_what_is_padded_and_truncated_is_as_before() -> None:
    like = server_of(1).state
    matrices = Matrices.of(like)
    for rank in (1, 4, 6):
        state = filled(matrices.of_rank(like, rank))
        padded = matrices.of_largest(state)
        assert {name: tensor.shape for name, tensor in padded.items()} == {name: tensor.shape for name, tensor in like.items()}
        assert same(matrices.of_rank(padded, rank), state)
        assert not padded[A][rank:].any()
        assert not padded[B][:, rank:].any()


def test_a_smaller_rank_is_kept_and_a_wrong_one_refused() -> None:
    server = server_of(4)
    updates = updates_of(server)
    shrunk = replace(updates[3], state=server.matrices.of_rank(updates[3].state, 3))
    before = dict(server.state)
    for client, rank in ((3, 1), (1, 4)):
        wrong = list(updates)
        wrong[client] = replace(updates[client], state=filled(server.matrices.of_rank(before, rank)))
        with pytest.raises(FederationError, match=f"update of client {client} has rank {rank}, expected 2 to"):
            server.aggregate(checked(server, wrong))
        assert same(server.state, before)
        assert list(server.ranks.values()) == [2, 3, 4, 5]
    metrics = server.aggregate(iter([*updates[:3], shrunk]))
    assert list(server.ranks.values()) == [2, 3, 4, 3]
    assert metrics == {"server/rank_mean": 3}
    again = server_of(4)
    again.load_state_dict(server.state_dict())
    assert again.ranks == server.ranks
    assert same(again.state, server.state)


# ---------------------------------------------------------------------------------------------------------------- clients


def client_of(rank: int, **options: Any) -> HETLoRA:
    """A client whose adapter is random, B too."""
    module = method_of(**options).for_client(replace(new_texts(1, 60).clients[0], model_size=rank))
    with torch.no_grad():
        for parameter in module.adapter(COMMON).values():
            parameter.normal_()
    return module


@pytest.mark.parametrize(("rank", "keep", "kept"), [(4, 0.5, 2), (5, 0.99, 4), (6, 0.4, 2), (3, 0.99, 2), (100, 0.29, 29)])
def test_the_penalty_is_on_the_tail_only(rank: int, keep: float, kept: int) -> None:
    module = client_of(rank, keep=keep, penalty=0.3).eval()
    batch = next(iter(new_texts(1, 60).client(0).train_dataloader()))
    adapter = module.adapter(COMMON)
    pairs = [(a, adapter[name.replace("lora_A", "lora_B")]) for name, a in adapter.items() if "lora_A" in name]
    score = sum(b[:, kept:].norm() * a[kept:].norm() for a, b in pairs)
    inputs, labels = batch
    loss = cross_entropy(module(inputs), labels)
    [phase] = module.phases()
    torch.testing.assert_close(phase.loss(batch), loss)
    torch.testing.assert_close(phase.penalty(), 0.3 * score)
    parameters = dict(module.named_parameters())
    learning = [name for name, parameter in parameters.items() if parameter.requires_grad]
    values = [parameters[name] for name in learning]
    found = torch.autograd.grad(phase.penalty(), values, materialize_grads=True)
    for name, grad in zip(learning, found, strict=True):
        if "lora_" not in name:
            assert grad.abs().max() < 1e-6
            continue
        front, tail = (grad[:kept], grad[kept:]) if "lora_A" in name else (grad[:, :kept], grad[:, kept:])
        assert front.abs().max() < 1e-6
        own = adapter[name][kept:] if "lora_A" in name else adapter[name][:, kept:]
        partner = name.replace("lora_A", "lora_B") if "lora_A" in name else name.replace("lora_B", "lora_A")
        other = adapter[partner][:, kept:] if "lora_A" in name else adapter[partner][kept:]
        torch.testing.assert_close(tail, 0.3 * own / own.norm() * other.norm(), rtol=1e-3, atol=1e-5)


def test_the_penalty_of_zeros_has_no_nans() -> None:
    module = method_of(penalty=1.0).for_client(replace(clients(1)[0], model_size=3))
    gradients = torch.autograd.grad(module.tail(), list(module.adapter(COMMON).values()))
    assert not any(gradient.any() for gradient in gradients)
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


def trained(rank: int, lr: float, maximize: bool = False, **options: Any) -> tuple[HETLoRA, State]:
    """After two steps in which the penalty is nearly all there is; what the adapter was like at the end of them."""
    optimizer = partial(torch.optim.SGD, lr=lr, maximize=maximize)
    module = client_of(rank, penalty=100.0, optimizer=optimizer, **options)
    new_trainer(**QUIET, max_epochs=1, limit_val_batches=0).fit(module, datamodule=new_texts(1, 60).client(0))
    return module, {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("rank", "keep", "rest"), [(5, 0.99, 4), (3, 0.99, 2), (6, 0.5, 3), (6, 0.1, 2), (2, 0.99, 2), (2, 0.1, 2), (4, 1.0, 4)]
)
def test_a_lighter_tail_is_dropped_down_to_r_min(rank: int, keep: float, rest: int) -> None:
    module, end = trained(rank, 1e-4, keep=keep)
    assert same(module.shared_state(), module.matrices.of_rank(end, rest))
    assert module.shared_state()[A].shape == (rest, 8)


@pytest.mark.parametrize("lr", [1e-4, 0.0])
def test_a_tail_that_is_as_heavy_or_heavier_is_kept(lr: float) -> None:
    module, end = trained(5, lr, maximize=True)
    assert same(module.shared_state(), end)
    assert module.shared_state()[A].shape == (5, 8)


def test_pruning_is_forgotten_with_the_next_broadcast() -> None:
    """Clients of one rank take turns on a module."""
    module, end = trained(5, 1e-4)
    assert module.shared_state()[A].shape == (4, 8)
    module.load_shared_state(end)
    assert module.shared_state()[A].shape == (5, 8)


def test_moments_shrink_with_the_rank() -> None:
    module = client_of(4)
    new_trainer(**QUIET, max_epochs=1, limit_val_batches=0).fit(module, datamodule=new_texts(1, 60).client(0))
    large = module.private_state()
    small = client_of(3)
    small.load_private_state(large)
    found = small.private_state()
    assert found.keys() == large.keys()
    for name, tensor in found.items():
        assert name.startswith(MOMENTS)
        expected = large[name][:3] if ".lora_A." in name and tensor.dim() else large[name]
        expected = large[name][:, :3] if ".lora_B." in name and tensor.dim() else expected
        assert torch.equal(tensor, expected)
    assert found[f"{MOMENTS}local/{A}/exp_avg"].shape == (3, 8)
    assert found[f"{MOMENTS}local/{B}/exp_avg_sq"].shape == (8, 3)
    assert found[f"{MOMENTS}local/{A}/exp_avg"].any()


# ------------------------------------------------------------------------------------------------------------ federations


def fit(rounds: int = 3, **options: Any) -> tuple[Federation, list[dict[int, int]]]:
    """The penalty is so heavy that the tail becomes lighter as soon as it weighs anything."""
    ranks: list[dict[int, int]] = []  # everybody's, after each round
    settings = {"evaluate_every": 0, "seed": 1, "callbacks": [AfterRounds(lambda run: ranks.append(dict(run.server.ranks)))]}
    settings |= {k: options.pop(k) for k in ("engine", "run_dir") if k in options}
    federation = new_federation(rounds, **settings)
    federation.fit(method_of(penalty=10.0), new_texts(4, 160), **options)
    return federation, ranks


@cache
def recorded() -> tuple[Federation, list[dict[int, int]], Recording]:
    engine = Recording()
    federation, ranks = fit(engine=engine)
    return federation, ranks, engine


def test_nothing_is_pruned_at_first_and_ranks_only_fall() -> None:
    federation, ranks, _ = recorded()
    assert ranks[0] == {0: 2, 1: 3, 2: 4, 3: 5}  # a tail of zeros cannot become lighter
    for before, after in pairwise(ranks):
        assert all(max(2, before[client] - 1) <= after[client] <= before[client] for client in range(4))
    assert sum(ranks[-1].values()) < sum(ranks[0].values())
    assert [row["server/rank_mean"] for row in federation.run.history] == [sum(r.values()) / 4 for r in ranks]


def test_payloads_have_the_clients_rank() -> None:
    _, ranks, engine = recorded()
    assert len(engine.fits()) == 3 * 4
    for turn, update in engine.fits():
        client = turn.client.id
        before = ranks[turn.round - 2][client] if turn.round > 1 else [2, 3, 4, 5][client]
        assert turn.broadcast.model_size == before
        assert (turn.broadcast.state[A].shape, turn.broadcast.state[B].shape) == ((before, 8), (8, before))
        after = ranks[turn.round - 1][client]
        assert (update.state[A].shape, update.state[B].shape) == ((after, 8), (8, after))


def test_clients_are_measured_with_their_rank_and_the_server_with_the_largest() -> None:
    federation, ranks, engine = recorded()
    measured = {turn.client.id: turn.broadcast for turn in engine.turns if turn.verb == "evaluate"}
    assert {client: sent.state[A].shape[0] for client, sent in measured.items()} == {**ranks[-1], -1: 6}
    assert federation.run.metric == "accuracy"
    assert {"after/test_accuracy/mean", "global/test_accuracy"} <= federation.run.history[-1].keys()
    for client in range(4):
        assert federation.client_module(client).shared_state()[A].shape == (ranks[-1][client], 8)


def test_the_store_keeps_moments_no_larger_than_the_rank_that_was_trained() -> None:
    federation, ranks, _ = recorded()
    for client, state in private_states(federation).items():
        assert state
        assert all(name.startswith(MOMENTS) for name in state)
        assert state[f"{MOMENTS}local/{A}/exp_avg"].shape == (ranks[1][client], 8)
        assert state[f"{MOMENTS}local/{A}/step"] == 3 * 2
    assert ranks[1] != ranks[0]


@pytest.mark.slow
def test_a_continued_run_has_the_same_ranks() -> None:
    fit(2, run_dir="runs")
    continued, ranks = fit(3, run_dir="runs", ckpt_path="last")
    federation, expected, _ = recorded()
    assert expected[1] != expected[0]
    assert ranks == expected[2:]
    assert same(continued.run.server.state_dict(), federation.run.server.state_dict())
    assert [row["server/rank_mean"] for row in continued.run.history] == [row["server/rank_mean"] for row in federation.run.history]
    assert continued.run.results == federation.run.results
