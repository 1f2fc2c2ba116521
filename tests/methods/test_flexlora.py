"""FlexLoRA and raFLoRA: what the server makes of products, for every rank."""

from typing import Any

import pytest
import torch
from tiny import infos
from tiny_adapters import HEAD, LAYER, LAYERS, WIDTH, A, B, fit, method_of, of_size
from torch import Tensor

from lightning_fed.core import ClientUpdate, State
from lightning_fed.methods import FlexLoRA
from lightning_fed.methods.flexlora import FlexLoRAServer, partitioned


def server_of(counts: list[int], **options: Any) -> FlexLoRAServer:
    method = method_of(FlexLoRA, **{"weighting": "uniform"} | options)
    method.configure_model()
    server = method.configure_server(infos(*counts))
    assert isinstance(server, FlexLoRAServer)
    return server


def update_of(server: FlexLoRAServer, client: int, b: Tensor, a: Tensor, count: int = 1) -> ClientUpdate:
    """These factors of one matrix, and none of the other."""
    head = {name: tensor for name, tensor in server.state.items() if ".classifier." in name}
    other = {name.replace(LAYERS[0], LAYERS[1]): torch.zeros_like(tensor) for name, tensor in ((A, a), (B, b))}
    return ClientUpdate(client, count, head | other | {A: a, B: b})


def diagonal(*values: float) -> tuple[Tensor, Tensor]:
    """B and A whose product has these values on its diagonal."""
    rank = len(values)
    return of_size(torch.diag(torch.tensor(values)).tolist(), WIDTH, rank), torch.eye(rank, WIDTH)


def product(state: State, scaling: float = 1.0) -> Tensor:
    return scaling * state[B] @ state[A]


def unchanged(server: FlexLoRAServer, who: list[int], counts: list[int]) -> dict[str, float]:
    """A round in which these clients learn nothing."""
    updates = []
    for client in who:
        sent = server.broadcast(infos(*counts)[client])
        like = server.expected_payload(ClientUpdate(client, 1, {}), sent)
        updates.append(ClientUpdate(client, counts[client], {name: sent.state[name] for name in like}))
    return server.aggregate(iter(updates))


def test_the_best_of_each_rank_is_sent() -> None:
    """diag(6, 0) and diag(0, 2): the mean is diag(3, 1), whose first rank has 9/10 of the energy."""
    server = server_of([1, 1], ranks=[1, 2])
    (b, a), (d, c) = diagonal(6.0), diagonal(0.0, 2.0)
    metrics = server.aggregate(iter([update_of(server, 0, b, a), update_of(server, 1, d, c)]))
    small, large = (server.broadcast(client).state for client in infos(1, 1))
    assert torch.allclose(product(large), of_size([[3, 0], [0, 1]], WIDTH, WIDTH), atol=1e-6)
    assert torch.allclose(product(small), of_size([[3]], WIDTH, WIDTH), atol=1e-6)
    assert torch.allclose(large[B].norm(dim=0), torch.tensor([3.0, 1.0]), atol=1e-6)  # all of the singular values are in B
    assert torch.allclose(large[A].norm(dim=1), torch.ones(2), atol=1e-6)
    assert metrics == {"server/energy_rank_1": pytest.approx(0.9), "server/energy_rank_2": pytest.approx(1.0)}
    assert server.aggregate(iter([])) == {}  # as in a run that continues here


def test_each_clients_scale_is_in_the_sum() -> None:
    """lora_alpha 4, ranks 1 and 2: s is 4 and 2. Sent is what acts, by the scale of who gets it."""
    server = server_of([1, 1], ranks=[1, 2], lora_alpha=4.0, scale="per_rank")
    (b, a), (d, c) = diagonal(6.0), diagonal(0.0, 2.0)
    server.aggregate(iter([update_of(server, 0, b, a), update_of(server, 1, d, c)]))
    small, large = (server.broadcast(client).state for client in infos(1, 1))
    mean = of_size([[12, 0], [0, 2]], WIDTH, WIDTH)
    assert torch.allclose(product(large, 2), mean, atol=1e-5)
    assert torch.allclose(product(small, 4), of_size([[12]], WIDTH, WIDTH), atol=1e-5)
    change = server.matrices.change(server.state, LAYER)
    assert change is not None
    assert torch.equal(change, mean)


def test_ranks_that_nothing_was_learned_in_start_as_loras_do() -> None:
    server = server_of([1, 1], r=3)
    start = dict(server.state)
    server.aggregate(iter([update_of(server, k, *diagonal(1.0 + k, 0.0, 0.0)) for k in range(2)]))
    assert torch.equal(server.state[A][1:], start[A][1:])
    assert not server.state[B][:, 1:].any()
    assert server.state[B][:, 0].any()
    assert torch.equal(server.state[A.replace(LAYERS[0], LAYERS[1])], start[A.replace(LAYERS[0], LAYERS[1])])


@pytest.mark.parametrize(("partition", "tail"), [("none", [1.0, 0.5, 0.25]), ("keep", [2.0] * 3), ("drop", [2.0] * 3)])
def test_the_tail_where_nobody_learns(partition: str, tail: list[float]) -> None:
    """Ranks 1 and 2, diag(4, 2): FlexLoRA halves the second value in each round, raFLoRA leaves it."""
    counts = [1, 1]
    server = server_of(counts, ranks=[1, 2], partition=partition)
    b, a = diagonal(4.0, 2.0)
    server.state = server.state | {A: a, B: b}
    for expected in tail:
        unchanged(server, [0, 1], counts)
        values = torch.linalg.svdvals(product(server.state))[:2]
        assert torch.allclose(values, torch.tensor([4.0, expected]), atol=1e-5)


@pytest.mark.parametrize(("partition", "kept"), [("none", 0.0), ("keep", 2.0), ("drop", 0.0)])
def test_the_tail_that_nobody_has(partition: str, kept: float) -> None:
    """The client of rank 2 does not take part."""
    counts = [1, 1]
    server = server_of(counts, ranks=[1, 2], partition=partition)
    b, a = diagonal(4.0, 2.0)
    server.state = server.state | {A: a, B: b}
    unchanged(server, [0], counts)
    assert torch.allclose(torch.linalg.svdvals(product(server.state))[:2], torch.tensor([4.0, kept]), atol=1e-5)


def test_shares_of_partitions() -> None:
    """Ranks 4, 8, 8 with 1, 1 and 2 examples: (1/4, 1/4, 1/2), then (0, 1/3, 2/3)."""
    shares = partitioned([1, 1, 2], [4, 8, 8])
    assert [len(share) for share in shares] == [4, 8, 8]
    assert shares[0].tolist() == [0.25] * 4
    assert shares[1].tolist() == pytest.approx([0.25] * 4 + [1 / 3] * 4)
    assert shares[2].tolist() == pytest.approx([0.5] * 4 + [2 / 3] * 4)


def test_one_client_is_left_as_it_is() -> None:
    """Its product is not symmetric: left and right are not confused."""
    server = server_of([1], r=2)
    torch.manual_seed(0)
    b, a = torch.randn(WIDTH, 2), torch.randn(2, WIDTH)
    server.aggregate(iter([update_of(server, 0, b, a)]))
    for _ in range(5):
        unchanged(server, [0], [1])
    torch.testing.assert_close(product(server.state), b @ a, rtol=0, atol=3e-6)


def test_the_server_is_measured_with_the_whole_mean() -> None:
    """And clients with their ranks of it."""
    federation = fit(method_of(FlexLoRA, r=1), rounds=2, evaluate_every=1)
    assert federation.run.model.monitor_model == "global"
    last = federation.run.history[-1]
    assert "global/test_accuracy" in last
    assert 0 < last["server/energy_rank_1"] < 1
    assert last["traffic/down_parameters"] == 3 * (2 * 2 * WIDTH + HEAD)
