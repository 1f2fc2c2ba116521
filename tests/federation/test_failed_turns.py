"""Turns that come to nothing: a round goes on without them; and engines that do not keep their contract."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from often import FEW, mostly_slow
from tiny import CLASSES, METHODS, Net, data_for, momentum, new_data, new_federation, new_method, same
from tiny_rounds import Losing

from lightning_fed.callbacks import FederationCallback, RunView
from lightning_fed.core.messages import ClientUpdate, Turn, TurnFailure
from lightning_fed.core.module import FederatedModule
from lightning_fed.data.client_info import SERVER
from lightning_fed.engines import InProcess
from lightning_fed.errors import FederationError
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import FedAvg
from lightning_fed.tensors import State, count_bytes

WITH_COHORTS = [name for name in METHODS if name != "Cyclic"]  # whose rounds have one client
each_method = pytest.mark.parametrize("name", mostly_slow(WITH_COHORTS, FEW))


class Noting(Losing):
    """Keeps what is taken and what comes of fit turns."""

    def __init__(self, lost: Callable[[Turn], bool]) -> None:
        super().__init__(lost)
        self.turns: list[Turn] = []
        self.updates: dict[tuple[int, int], ClientUpdate] = {}  # by round and client

    def run(self, turns: Iterable[Turn]) -> Iterator[ClientUpdate | TurnFailure]:
        for turn in turns:
            self.turns.append(turn)
            [update] = super().run([turn])
            if turn.verb == "fit" and isinstance(update, ClientUpdate):
                self.updates[turn.round, turn.client.id] = update
            yield update


class Watch(FederationCallback):
    """Keeps what the server and the clients have after each round, and whose updates were received."""

    def __init__(self) -> None:
        self.servers: list[State] = []
        self.privates: list[dict[int, State]] = []
        self.client_state: list[dict[int, State]] = []
        self.last_rounds: list[dict[int, int]] = []
        self.arrived: list[int] = []

    def on_turn_end(self, run: RunView, update: ClientUpdate) -> None:
        self.arrived.append(update.client)

    def on_round_end(self, run: RunView) -> None:
        self.servers.append({name: tensor.clone() for name, tensor in run.server.state_dict().items()})
        clients = [SERVER, *(client.id for client in run.clients)]
        self.privates.append({client: copy.deepcopy(run.store.get(client)) for client in clients if client in run.store})
        self.client_state.append({client: copy.deepcopy(run.client_state.get(client)) for client in run.client_state})
        self.last_rounds.append(dict(run.last_rounds))


def fit(
    model: str | FederatedModule, lost: Callable[[Turn], bool], rounds: int = 3, **options: Any
) -> tuple[Federation, Noting, Watch]:
    engine, watch = Noting(lost), Watch()
    federation = new_federation(rounds, engine=engine, callbacks=[watch], **{"evaluate_every": 0} | options)
    if isinstance(model, str):
        federation.fit(new_method(model), data_for(model, num_clients=3, size=100))
    else:
        federation.fit(model, new_data(3, 120))
    return federation, engine, watch


def fits_of(round: int, *clients: int) -> Callable[[Turn], bool]:
    """The fit turns of some clients in a round."""
    return lambda turn: turn.verb == "fit" and turn.round == round and turn.client.id in clients


# ----------------------------------------------------------------------------------------------------------- every method


def everybody(name: str) -> set[int]:
    return {SERVER} if new_method(name).centralized else {0, 1, 2}


@cache
def losing(name: str) -> tuple[Federation, Noting, Watch]:
    """Four rounds; one client is lost in the second, all are in the third."""
    one, all_of_them = fits_of(2, max(everybody(name) - {2})), fits_of(3, *everybody(name))
    return fit(name, lambda turn: one(turn) or all_of_them(turn), rounds=4)


@each_method
def test_a_round_in_which_nobody_arrives_leaves_everything_as_it_was(name: str) -> None:
    federation, engine, watch = losing(name)
    _, before, after, later = watch.servers
    assert same(before, after)
    for states in (watch.privates, watch.client_state):
        assert states[1].keys() == states[2].keys()
        assert all(same(states[1][client], state) for client, state in states[2].items())
    assert watch.last_rounds[1] == watch.last_rounds[2]
    row = federation.run.history[2]
    assert row["round/failed_clients"] == federation.run.cohort_size
    assert row["traffic/up_bytes"] == row["compute/flops"] == 0
    lessons = [
        turn for turn in engine.turns if (turn.verb, turn.round) == ("train_on_public", 4) and turn.client.id >= 0
    ]  # for who arrived
    of_lessons = sum(count_bytes(turn.broadcast.state) for turn in lessons)
    assert row["traffic/down_bytes"] == federation.run.history[3]["traffic/down_bytes"] - of_lessons  # it was sent all the same
    assert not any(column.startswith("train/") for column in row)
    assert all(math.isfinite(value) for value in row.values())
    assert watch.last_rounds[3] == dict.fromkeys(everybody(name), 4)
    if federation.run.model.shared_names() and not federation.run.model.centralized:
        assert not same(after, later)


@each_method
def test_who_is_lost_keeps_its_private_state(name: str) -> None:
    """And what it is told the next time: of which round that state is."""
    federation, engine, watch = losing(name)
    one = max(everybody(name) - {2})
    others = sorted(everybody(name) - {one})
    before, after = watch.privates[0], watch.privates[1]
    assert before.keys() == after.keys() <= everybody(name)
    assert {client for client in before if not same(before[client], after[client])} == before.keys() - {one}
    assert watch.last_rounds[0] == dict.fromkeys(everybody(name), 1)
    assert watch.last_rounds[1] == {one: 1} | dict.fromkeys(others, 2)
    assert {(turn.round, turn.last_round) for turn in engine.turns if turn.client.id == one and turn.verb == "fit"} == {
        (1, 0),
        (2, 1),
        (3, 1),
        (4, 1),
    }
    assert [row.get("round/failed_clients", 0) for row in federation.run.history] == [0, 1, len(everybody(name)), 0]
    assert watch.arrived == [*sorted(everybody(name)), *others, *sorted(everybody(name))]


# ---------------------------------------------------------------------------------------------------------- what is merged


def test_the_mean_is_over_those_who_arrived(capsys: pytest.CaptureFixture[str]) -> None:
    federation, engine, _ = fit(FedAvg(Net, CLASSES, momentum), fits_of(1, 1), rounds=1)
    first, third = engine.updates[1, 0], engine.updates[1, 2]
    assert first.num_examples != third.num_examples
    share = first.num_examples / (first.num_examples + third.num_examples)
    for name, tensor in federation.run.server.state.items():
        torch.testing.assert_close(tensor, share * first.state[name] + (1 - share) * third.state[name])
    row = federation.run.history[0]
    losses = [first.metrics["train/local_loss"], third.metrics["train/local_loss"]]
    assert row["train/local_loss"] == pytest.approx(share * losses[0] + (1 - share) * losses[1])
    assert row["compute/flops"] == first.metrics["flops"] + third.metrics["flops"]
    assert row["traffic/up_bytes"] * 3 == row["traffic/down_bytes"] * 2
    assert "Round 1: the turn of client 1 was lost: its battery was empty\n" in capsys.readouterr().out


def test_where_nobody_is_lost_nothing_is_said() -> None:
    federation, _, _ = fit(FedAvg(Net, CLASSES, momentum), lambda turn: False, rounds=1)
    assert "round/failed_clients" not in federation.run.history[0]


def test_a_continued_run_knows_who_was_lost() -> None:
    federation, _, _ = fit(FedAvg(Net, CLASSES, momentum), fits_of(2, 1), rounds=2, run_dir="runs")
    assert federation.run.last_rounds == {0: 2, 1: 1, 2: 2}
    continued = new_federation(2, run_dir="runs", evaluate_every=0)
    continued.fit(FedAvg(Net, CLASSES, momentum), new_data(3, 120), ckpt_path="last")
    assert continued.run.last_rounds == federation.run.last_rounds
    assert continued.run.history[1]["round/failed_clients"] == 1


# ------------------------------------------------------------------------------------------------------------- measurements


def evaluations_of(*clients: int) -> Callable[[Turn], bool]:
    return lambda turn: turn.verb == "evaluate" and turn.client.id in clients


@pytest.mark.parametrize("name", mostly_slow(["FedAvg", "PFedLoRA", "PF2LoRA", "FedHM"], often={"FedAvg", "PFedLoRA"}))
def test_a_lost_measurement_leaves_those_of_the_others(name: str) -> None:
    """Tables and figures are made of these."""
    federation, _, _ = fit(name, evaluations_of(1), rounds=2, run_dir="runs", logger=True)
    results, row = federation.run.results, federation.run.history[-1]
    assert results.keys() == {0, 2}
    assert row["after/test_accuracy/mean"] == pytest.approx(sum(result["test/accuracy"] for result in results.values()) / 2)
    assert "round/failed_clients" not in row
    of_client_1 = Path("runs/version_0/clients.csv").read_text().splitlines()[2].split(",")
    assert of_client_1[0] == "1"
    assert of_client_1[-1] == ""


def test_a_round_without_any_measurement_goes_on() -> None:
    """A second measurement finds what the first one lost."""
    federation, _, _ = fit(
        "PFedLoRA", lambda turn: turn.verb == "evaluate" and turn.round == 1, rounds=2, evaluate_every=1, run_dir="runs"
    )
    first, second = federation.run.history
    assert not any(column.startswith("after/") for column in first)
    assert "after/test_accuracy/mean" in second
    assert federation.run.results.keys() == {0, 1, 2}


def test_statistics_are_those_of_the_clients_that_arrived() -> None:
    def gathered(lost: Callable[[Turn], bool]) -> State:
        server = fit("FedHM", lost, rounds=1)[0].run.server
        return server.global_models()["global"].statistics

    everybody, without = (
        gathered(lambda turn: False),
        gathered(lambda turn: turn.verb == "compute_statistics" and turn.client.id == 2),
    )
    assert everybody.keys() == without.keys()
    assert all(torch.isfinite(tensor).all() for tensor in without.values())
    assert not same(everybody, without)


# ----------------------------------------------------------------------------------------------------------------- contract


class Reversed(InProcess):
    """Hands on what is done last first."""

    def run(self, turns: Iterable[Turn]) -> Iterator[ClientUpdate | TurnFailure]:
        yield from reversed(list(super().run(turns)))


class Forgetful(InProcess):
    """Takes all turns and hands on all but the last."""

    def run(self, turns: Iterable[Turn]) -> Iterator[ClientUpdate | TurnFailure]:
        yield from list(super().run(turns))[:-1]


class Lazy(InProcess):
    """Takes the first turn only."""

    def run(self, turns: Iterable[Turn]) -> Iterator[ClientUpdate | TurnFailure]:
        for turn in turns:
            yield from super().run([turn])
            return


class Repeating(InProcess):
    """Hands on the last update twice."""

    def run(self, turns: Iterable[Turn]) -> Iterator[ClientUpdate | TurnFailure]:
        for update in super().run(turns):
            yield update
        yield update


class Inventing(InProcess):
    """Loses a turn that it was not given."""

    def run(self, turns: Iterable[Turn]) -> Iterator[ClientUpdate | TurnFailure]:
        yield from super().run(turns)
        yield TurnFailure(7, "nobody knows")


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (Reversed, "Reversed returned something of client 2 when client 0's turn was due"),
        (Forgetful, "Forgetful did not run all turns of round 2"),
        (Lazy, "Lazy did not run all turns of round 2"),
        (Repeating, "Repeating returned something of client 2, which had no turn"),
        (Inventing, "Inventing returned something of client 7, which had no turn"),
    ],
)
def test_an_engine_that_mixes_up_turns_is_refused_by_name(engine: type[InProcess], message: str) -> None:
    """The server stays as it was, and no checkpoint of the round is written."""
    new_federation(1, run_dir="runs").fit(FedAvg(Net, CLASSES, momentum), new_data(3, 120))
    federation, watch = new_federation(2, run_dir="runs", engine=engine()), Watch()
    federation.callbacks.append(watch)
    with pytest.raises(FederationError, match=message):
        federation.fit(FedAvg(Net, CLASSES, momentum), new_data(3, 120), ckpt_path="last")
    assert watch.servers == []
    assert [path.name for path in sorted(Path("runs/version_0/checkpoints").iterdir())] == ["round_000001"]
