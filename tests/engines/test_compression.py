"""Compressed messages: known answers, and what a run makes of them."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from often import mostly_slow
from tiny import (
    CLASSES,
    METHODS,
    Net,
    NoisyNet,
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
from tiny_rounds import Losing
from torch import Tensor

from lightning_fed.core import ServerAdam
from lightning_fed.core.messages import Broadcast
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
    sent, _ = Compression(up, share=0.1).compress_update(state, received, {}, state)
    sizes = {"none": 4000, "bf16": 2000, "int8": 1000 + 4, "topk": 100 * (4 + 4)}
    assert sum(tensor.numel() * tensor.element_size() for name, tensor in sent.items() if name != "n") == sizes[up]
    assert torch.equal(sent["n"], state["n"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_int8_is_right_on_average(dtype: torch.dtype) -> None:
    """Also of small changes in half precision, in which 127 over the largest is infinite."""
    size = 1 if dtype == torch.float32 else 1e-4
    received = {"w": numbers(6, 5, seed=1).to(dtype) * (dtype == torch.float32)}
    state = {"w": (numbers(6, 5) * size).to(dtype)}
    scheme = Compression("int8")
    torch.manual_seed(0)
    sent = (scheme.compress_update(state, received, {}, state)[0] for _ in range(4000))
    draws = torch.stack([scheme.expand_update(each, received)["w"] for each in sent])
    assert draws.dtype == dtype
    wanted, draws = state["w"].double(), draws.double()
    step = (wanted - received["w"]).abs().max() / 127
    assert (draws - wanted).abs().max() <= step * (1 + 1e-4) + 2**-25  # half the spacing of the smallest numbers
    # A draw's deviation is at most half a step.
    assert (draws.mean(0) - wanted).abs().max() < 5 * step / 2 / 4000**0.5 + (dtype == torch.float16) * 2**-25
    assert not torch.equal(draws[0], draws[1])


def test_equal_values_are_rounded_alike_in_any_layout() -> None:
    """Numbers that are read from a checkpoint may lie in memory in another order."""
    w, drawn = numbers(2, 3, 4, 4), []
    for tensor in (w, w.to(memory_format=torch.channels_last)):
        torch.manual_seed(0)
        drawn.append(Compression(down="int8").compress_broadcast({"w": tensor}, ())[f"{INT8}w"])
    assert torch.equal(*drawn)


def test_what_topk_owes_is_what_it_did_not_send() -> None:
    """Summed over rounds, what arrived and what is owed is what was meant: the sum telescopes."""
    scheme, received, owed = Compression("topk", share=0.2), {"w": numbers(5, 4)}, {}
    meant, arrived = torch.zeros(5, 4, dtype=torch.float64), torch.zeros(5, 4, dtype=torch.float64)
    received = {"w": received["w"].double()}
    for round in range(6):
        change = numbers(5, 4, seed=round + 10).double()
        sent, owed = scheme.compress_update({"w": received["w"] + change}, received, owed, "w")
        found = scheme.expand_update(sent, received)["w"] - received["w"]
        assert len(sent[f"{INDEX}w"]) == 4
        meant, arrived = meant + change, arrived + found
        torch.testing.assert_close(arrived + owed["w"], meant, rtol=0, atol=1e-12)
    assert owed["w"].count_nonzero() >= 16


def test_what_is_owed_for_a_tensor_that_rests_waits() -> None:
    waiting = {"v": numbers(3)}
    _, owed = Compression("topk", share=0.5).compress_update({"w": numbers(4)}, {"w": torch.zeros(4)}, waiting, "wv")
    assert owed.keys() == {"v", "w"}
    assert owed["v"] is waiting["v"]


def test_what_is_owed_comes_with_the_rest_of_an_adapter_that_lost_a_rank() -> None:
    """Which is sent whole; what was owed of the dropped rank is dropped."""
    owed, kept = {"a": numbers(3, 4)}, numbers(2, 4, seed=1)
    sent, left = Compression("topk", share=0.2).compress_update({"a": kept}, {"a": numbers(3, 4, seed=2)}, owed, "a")
    assert torch.equal(sent["a"], kept + owed["a"][:2])
    assert left == {}


def test_topk_sends_the_largest() -> None:
    state, received = {"w": torch.tensor([1.0, 5.0, 2.0, -7.0])}, {"w": torch.tensor([0.0, 0.0, 0.0, 1.0])}
    sent, owed = Compression("topk", share=0.5).compress_update(state, received, {}, state)
    assert sent[f"{TOPK}w"].tolist() == [5, -8]
    assert sent[f"{INDEX}w"].tolist() == [1, 3]
    assert owed["w"].tolist() == [1, 0, 2, 0]
    assert Compression("topk").expand_update(sent, received)["w"].tolist() == [0, 5, 0, -7]


@pytest.mark.parametrize(("share", "sent"), [(0.07, 7), (0.28, 28), (0.071, 8), (1e-9, 1), (1.0, 100)])
def test_topk_sends_the_share_that_was_meant(share: float, sent: int) -> None:
    state, received = {"w": torch.arange(1.0, 101)}, {"w": torch.zeros(100)}
    assert len(Compression("topk", share=share).compress_update(state, received, {}, state)[0][f"{TOPK}w"]) == sent


@pytest.mark.parametrize("up", UP[1:])
def test_what_is_not_finite_arrives_as_it_is(up: Any) -> None:
    state = {"w": torch.tensor([1.0, float("nan")])}
    sent, _ = Compression(up).compress_update(state, {"w": torch.zeros(2)}, {}, state)
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


def then_nothing(optimizer: torch.optim.Optimizer) -> Any:
    """A schedule with one round of learning."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda round: float(round == 0))


@pytest.mark.parametrize("name", mostly_slow(["FedAvg", "RoLoRA", "FlexLoRA", "FLoRA", "FedHMLoRA"], ["RoLoRA", "FlexLoRA"]))
def test_what_topk_owes_arrives_in_the_end(name: str) -> None:
    """Once nothing more is learned, the server gets to where it is without compression, also if a factor rests in every other
    round, or factors are new in each.
    """

    def fitted(rounds: int, compression: Compression | None = None) -> State:
        federation = new_federation(rounds, compression=compression)
        federation.fit(new_method(name, lr_scheduler=then_nothing), data_for(name, num_clients=3, size=60))
        return {key: tensor for key, tensor in federation.run.server.state.items() if tensor.is_floating_point()}

    def apart(state: State) -> float:
        return max(float((tensor - whole[key]).abs().max()) for key, tensor in state.items())

    whole, scheme = fitted(3), Compression("topk", share=0.5)
    assert apart(fitted(3, scheme)) < 1e-5 < 1e-3 < apart(fitted(1, scheme))


STARTING_ELSEWHERE = {"DSFL", "FD", "FedAMP", "FedKD", "FedProto", "FedRolex", "PFedGate", "SplitMix"}
"""Methods none of whose tensors continue, in the same coordinates, from what the client received."""

NOTHING_SENT = "Got compression, but {} trains on the pooled data of all clients, and nothing is sent: leave it out"


@pytest.mark.often(4)
@pytest.mark.parametrize("name", mostly_slow(METHODS, ["FD", "FedHM", "HETLoRA", "PFedGate"]))
@pytest.mark.parametrize("up", ["int8", "topk"])
def test_payloads_of_any_kind(name: str, up: Any) -> None:
    federation = new_federation(2, compression=Compression(up, "bf16", share=0.5))
    method = new_method(name)
    refuses = method.centralized or (up == "topk" and name in STARTING_ELSEWHERE)
    says = f"compression.up is topk, but {name}'s clients send nothing of which a part could follow in a later round: set it to"
    says = NOTHING_SENT.format(name) if method.centralized else says
    with pytest.raises(FederationError, match=says) if refuses else nullcontext():
        federation.fit(method, data_for(name, num_clients=3, size=120))
        assert len(federation.run.history) == 2


@pytest.mark.parametrize("compression", [Compression("bf16"), Compression(down="int8")], ids=str)
def test_a_method_that_sends_nothing_refuses_it(compression: Compression) -> None:
    with pytest.raises(FederationError, match=NOTHING_SENT.format("Centralized")):
        new_federation(1, compression=compression).fit(new_method("Centralized"), new_data(2, 40))


def test_of_sizes_that_are_redrawn_what_has_one_size_is_compressed_and_the_rest_is_whole() -> None:
    federation = new_federation(3, compression=Compression("topk"))
    federation.fit(new_method("FedHM", ratios=[1.0, 0.5, 0.25], assignment="redrawn"), new_data(3, 60))
    with pytest.raises(FederationError, match=r"compression\.up is topk, but HeteroFL's clients send nothing"):
        new_federation(1, compression=Compression("topk")).fit(new_method("HeteroFL", assignment="redrawn"), new_data(2, 40))


def test_layers_that_do_not_start_from_what_was_received_are_sent_whole() -> None:
    model = new_method("FedALA").for_client(new_data(1, 40).client(0).info)
    assert model.shared_names() - model.continued_names() == {"backbone.head.weight", "backbone.head.bias"}
    assert new_method("FedAMP", start="cloud").for_client(new_data(1, 40).client(0).info).continued_names()


@pytest.mark.parametrize("up", UP[1:])
def test_statistics_of_batch_norm_are_those_without_compression(up: Any) -> None:
    """A network that does not learn, so that they are all that changes: they move towards a target, and a part that is not sent
    comes up again by itself.
    """
    states = []
    for compression in (None, Compression(up, share=0.05)):
        federation = new_federation(4, compression=compression)
        federation.fit(FedAvg(NoisyNet, CLASSES, optimizer=partial(torch.optim.SGD, lr=0.0)), new_data(3, 120))
        states.append(federation.run.server.state)
    assert same(*states)


@pytest.mark.parametrize("name", ["FedAvg", "FedDF", "FedKD"])
def test_no_variance_is_rounded_either_way(name: str) -> None:
    engine = Recording()
    networks = [Net, NoisyNet] if name == "FedDF" else NoisyNet
    federation = new_federation(2, engine=engine, compression=Compression("int8", "int8"))
    federation.fit(new_method(name, backbone=networks), data_for(name, num_clients=2, size=60))
    for turn, update in engine.fits():
        for state in (turn.broadcast.state, update.state):
            statistics = [key for key in state if key.endswith("running_var")]
            assert bool(statistics) == (name != "FedDF" or turn.client.id == 1)
            assert not any(key.startswith((INT8, SCALE)) for key in statistics)


def test_an_unseen_client_trains_from_what_it_would_receive() -> None:
    engine = Recording()
    federation = new_federation(1, engine=engine, unseen=[2], participation=1.0, compression=Compression(down="int8"))
    federation.fit(FedAvg(Net, CLASSES, momentum), new_data(3, 100))
    [turn] = [turn for turn in engine.turns if turn.verb == "personalize"]
    expanded = Compression(down="int8").expand_broadcast(turn.broadcast.state)
    now = federation.run.server.state
    assert expanded.keys() == now.keys() != turn.broadcast.state.keys()
    assert all(torch.allclose(expanded[name], now[name], atol=0.02) and not torch.equal(expanded[name], now[name]) for name in now)


def test_a_broadcast_is_expanded_to_what_was_rounded() -> None:
    state, scheme = {"w": numbers(3, 3), "n": torch.tensor(1)}, Compression(down="bf16")
    found = scheme.expand_broadcast(scheme.compress_broadcast(Broadcast(state).state, ()))
    assert torch.equal(found["w"], state["w"].bfloat16().float())
    assert torch.equal(found["n"], state["n"])


@pytest.mark.parametrize("options", [{}, {"server_optimizer": ServerAdam(0.1)}], ids=["mean", "Adam"])
@pytest.mark.parametrize("down", ["bf16", "int8"])
def test_a_rounded_broadcast_is_no_change(down: Any, options: dict[str, Any]) -> None:
    """Of clients that learn nothing the server learns nothing, which Adam would make a step of."""
    start = new_federation(1)
    start.fit(FedAvg(Net, CLASSES, partial(torch.optim.SGD, lr=0.0)), new_data(3, 60))
    federation = new_federation(2, compression=Compression(down=down))
    federation.fit(FedAvg(Net, CLASSES, partial(torch.optim.SGD, lr=0.0), **options), new_data(3, 60))
    assert same(federation.run.server.state, start.run.server.state)


@pytest.mark.parametrize("name", ["FedHMDelta", "FedHMLoRADelta", "FlexLoRA", "SLoRA"])
def test_a_rounded_broadcast_of_what_is_computed_anew_is_no_change(name: str) -> None:
    """Nobody learns after the first round."""
    states = []
    for rounds in (1, 4):
        federation = new_federation(rounds, compression=Compression(down="int8"))
        federation.fit(new_method(name, lr_scheduler=then_nothing), data_for(name, num_clients=3, size=60))
        states.append(federation.run.server.state)
    known = [key for key in states[0] if "lora_" not in key]  # singular vectors may change their signs
    assert any(key.endswith(("change", "values", "weight")) for key in known)
    for key in known:
        torch.testing.assert_close(states[1][key], states[0][key], rtol=0, atol=1e-6)


def test_changes_below_the_precision_of_a_broadcast_add_up() -> None:
    """bfloat16 has three digits; what is rounded away of the model in each round is not lost."""
    still, plain, rounded = (
        fit_state(FedAvg(Net, CLASSES, partial(torch.optim.SGD, lr=lr)), Compression(down=down))
        for lr, down in ((0.0, "none"), (1e-5, "none"), (1e-5, "bf16"))
    )
    for name, start in still.items():
        torch.testing.assert_close(rounded[name] - start, plain[name] - start, rtol=0.1, atol=2e-6)
        assert not torch.equal(rounded[name], start)


def fit_state(method: FedAvg, compression: Compression) -> State:
    federation = new_federation(4, compression=compression)
    federation.fit(method, new_data(3, 60))
    return federation.run.server.state


def test_a_round_that_nobody_answered_changes_nothing_for_the_next_one(tmp_path: Path) -> None:
    """What is sent is rounded on the round's stream, whether the run was stopped between the two or not."""

    def played(rounds: int, folder: Path, ckpt_path: str | None = None) -> State:
        scheme, lost = Compression(down="int8"), Losing(lambda turn: (turn.verb, turn.round) == ("fit", 1))
        federation = new_federation(rounds, folder, engine=lost, compression=scheme, participation=1.0)
        federation.fit(FedAvg(Net, CLASSES, momentum), new_data(2, size=40), ckpt_path)
        return federation.run.server.state

    whole = played(2, tmp_path / "whole")
    played(1, tmp_path / "parts")
    assert same(played(2, tmp_path / "parts", "last"), whole)
