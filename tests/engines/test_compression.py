"""Compressed messages: known answers, and what a run makes of them."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from often import mostly_slow
from tiny import (
    CLASSES,
    METHODS,
    Net,
    Recording,
    assert_same,
    data_for,
    momentum,
    new_data,
    new_federation,
    new_method,
    private_states,
    same,
)
from torch import Tensor

from lightning_fed.core.messages import Broadcast, ClientUpdate, Turn, TurnFailure
from lightning_fed.engines import InProcess, Processes
from lightning_fed.engines.compression import ERROR, INDEX, INT8, SCALE, TOPK, Compression
from lightning_fed.errors import FederationError
from lightning_fed.methods import FedAvg
from lightning_fed.tensors import State

UP: tuple[Literal["none", "bf16", "int8", "topk"], ...] = ("none", "bf16", "int8", "topk")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("up", UP)
def test_what_is_sent_in_bytes(up: Any) -> None:
    state, received = {"w": numbers(40, 25), "n": torch.tensor(3)}, {"w": numbers(40, 25, seed=1), "n": torch.tensor(2)}
    sent, _ = Compression(up, share=0.1).compress_update(state, received, {})
    sizes = {"none": 4000, "bf16": 2000, "int8": 1000 + 4, "topk": 100 * (4 + 4)}
    assert sum(tensor.numel() * tensor.element_size() for name, tensor in sent.items() if name != "n") == sizes[up]
    assert torch.equal(sent["n"], state["n"])


def test_int8_is_right_on_average() -> None:
    state, received = {"w": numbers(6, 5)}, {"w": numbers(6, 5, seed=1)}
    scheme = Compression("int8")
    torch.manual_seed(0)
    draws = torch.stack([scheme.expand_update(scheme.compress_update(state, received, {})[0], received)["w"] for _ in range(4000)])
    step = (state["w"] - received["w"]).abs().max() / 127
    assert (draws - state["w"]).abs().max() <= step * (1 + 1e-4)
    assert (draws.mean(0) - state["w"]).abs().max() < 5 * step / 2 / 4000**0.5  # a draw's deviation is at most half a step
    assert not torch.equal(draws[0], draws[1])


def test_what_topk_owes_is_what_it_did_not_send() -> None:
    """Summed over rounds, what arrived and what is owed is what was meant: the sum telescopes."""
    scheme, received, owed = Compression("topk", share=0.2), {"w": numbers(5, 4)}, {}
    meant, arrived = torch.zeros(5, 4, dtype=torch.float64), torch.zeros(5, 4, dtype=torch.float64)
    received = {"w": received["w"].double()}
    for round in range(6):
        change = numbers(5, 4, seed=round + 10).double()
        sent, owed = scheme.compress_update({"w": received["w"] + change}, received, owed)
        found = scheme.expand_update(sent, received)["w"] - received["w"]
        assert len(sent[f"{INDEX}w"]) == 4
        meant, arrived = meant + change, arrived + found
        torch.testing.assert_close(arrived + owed["w"], meant, rtol=0, atol=1e-12)
    assert owed["w"].count_nonzero() >= 16


def test_topk_sends_the_largest() -> None:
    state, received = {"w": torch.tensor([1.0, 5.0, 2.0, -7.0])}, {"w": torch.tensor([0.0, 0.0, 0.0, 1.0])}
    sent, owed = Compression("topk", share=0.5).compress_update(state, received, {})
    assert sent[f"{TOPK}w"].tolist() == [5, -8]
    assert sent[f"{INDEX}w"].tolist() == [1, 3]
    assert owed["w"].tolist() == [1, 0, 2, 0]
    assert Compression("topk").expand_update(sent, received)["w"].tolist() == [0, 5, 0, -7]


@pytest.mark.parametrize("up", UP[1:])
def test_what_is_not_finite_arrives_as_it_is(up: Any) -> None:
    state = {"w": torch.tensor([1.0, float("nan")])}
    sent, _ = Compression(up).compress_update(state, {"w": torch.zeros(2)}, {})
    assert Compression(up).expand_update(sent, {"w": torch.zeros(2)})["w"].isnan().tolist() == [False, True]


@pytest.mark.parametrize(
    ("up", "sent", "said"),
    [
        ("topk", {f"{TOPK}w": torch.ones(2)}, "Entries of 'w' arrived that do not fit"),
        ("topk", {f"{TOPK}w": torch.ones(2), f"{INDEX}w": torch.tensor([0, 9], dtype=torch.int32)}, "do not fit"),
        (
            "topk",
            {f"{TOPK}v": torch.ones(1), f"{INDEX}v": torch.zeros(1, dtype=torch.int32)},
            "Entries of 'v' arrived",
        ),
        ("int8", {f"{INT8}w": torch.ones(3)}, "'w' arrived as torch.float32 without a scale"),
        ("int8", {f"{INT8}w": torch.ones(3, dtype=torch.int8), f"{SCALE}w": torch.ones(2)}, "without a scale of its own"),
    ],
)
def test_what_no_client_makes_is_refused(up: Any, sent: dict[str, Tensor], said: str) -> None:
    with pytest.raises(FederationError, match=said):
        Compression(up).expand_update(sent, {"w": torch.zeros(3)})


def test_a_share_of_nothing_is_refused() -> None:
    with pytest.raises(FederationError, match=r"compression\.share is 0: give the share"):
        Compression("topk", share=0)


def test_without_compression_nothing_changes() -> None:
    federations = [new_federation(2, **options) for options in ({}, {"compression": Compression()})]
    for federation in federations:
        federation.fit(new_method("SCAFFOLD"), new_data(3, 100))
    assert_same(*federations)


WAYS = [(where, up, down) for where in ("here", "apart") for up in UP[1:] for down in ("none", "int8")]


@pytest.mark.parametrize(("where", "up", "down"), mostly_slow(WAYS, [("apart", "topk", "int8")]))
def test_a_run_on_any_engine_and_through_a_stop(where: str, up: Any, down: Any, two_workers: Processes) -> None:
    engine = two_workers if where == "apart" else InProcess()
    options: dict[str, Any] = {"compression": Compression(up, down, share=0.2), "participation": 0.7, "evaluate_every": 1}
    whole = new_federation(3, **options)
    whole.fit(new_method("PFedLoRA"), new_data(4, 120))
    new_federation(2, "runs", engine=engine, **options).fit(new_method("PFedLoRA"), new_data(4, 120))
    continued = new_federation(3, "runs", engine=engine, **options)
    continued.fit(new_method("PFedLoRA"), new_data(4, 120), ckpt_path="last")
    assert_same(whole, continued)
    owing = [any(name.startswith(ERROR) for name in state) for state in private_states(whole).values()]
    assert all(owing) == any(owing) == (up == "topk")


def test_the_server_gets_what_was_expanded_and_traffic_counts_what_was_sent() -> None:
    engine, plain = Recording(), new_federation(1)
    plain.fit(FedAvg(Net, CLASSES, momentum), new_data(3, 100))
    federation = new_federation(1, engine=engine, compression=Compression("int8", "bf16"))
    federation.fit(FedAvg(Net, CLASSES, momentum), new_data(3, 100))
    row, before = federation.run.history[0], plain.run.history[0]
    count, tensors = before["traffic/up_parameters"], 3 * len(plain.run.server.state)
    assert row["traffic/up_bytes"] == count + 4 * tensors
    assert row["traffic/down_bytes"] == 2 * before["traffic/down_parameters"]
    exact, rounded = plain.run.server.state, federation.run.server.state
    assert exact.keys() == rounded.keys()
    assert not same(exact, rounded)
    assert all(torch.allclose(exact[name], rounded[name], atol=0.02) for name in exact)


@pytest.mark.often(4)
@pytest.mark.parametrize("name", mostly_slow(METHODS, ["FD", "FedHM", "HETLoRA", "PFedGate"]))
@pytest.mark.parametrize("up", ["int8", "topk"])
def test_payloads_of_any_kind(name: str, up: Any) -> None:

    federation = new_federation(2, compression=Compression(up, "bf16", share=0.5))
    federation.fit(new_method(name), data_for(name, num_clients=3, size=120))
    assert len(federation.run.history) == 2


def test_a_broadcast_is_expanded_to_what_was_rounded() -> None:
    state, scheme = {"w": numbers(3, 3), "n": torch.tensor(1)}, Compression(down="bf16")
    found = scheme.expand_broadcast(scheme.compress_broadcast(Broadcast(state).state))
    assert torch.equal(found["w"], state["w"].bfloat16().float())
    assert torch.equal(found["n"], state["n"])


def test_a_round_that_nobody_answered_changes_nothing_for_the_next_one(tmp_path: Path) -> None:
    """What is sent is rounded on the round's stream, whether the run was stopped between the two or not."""

    class Lost(InProcess):
        def run(self, turns: Iterable[Turn]) -> Iterator[ClientUpdate | TurnFailure]:
            for turn in turns:
                fits = turn.verb == "fit" and turn.round == 1
                yield TurnFailure(turn.client.id, "gone") if fits else next(iter(super().run([turn])))

    def played(rounds: int, folder: Path, ckpt_path: str | None = None) -> State:
        scheme = Compression(down="int8")
        federation = new_federation(rounds, folder, engine=Lost(), compression=scheme, participation=1.0)
        federation.fit(FedAvg(Net, CLASSES, momentum), new_data(2, size=40), ckpt_path)
        return federation.run.server.state

    whole = played(2, tmp_path / "whole")
    played(1, tmp_path / "parts")
    assert same(played(2, tmp_path / "parts", "last"), whole)
