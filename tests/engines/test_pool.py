"""Who gets which turn, without a process: workers whose deaths, and the room for whom, are written down."""

import re
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from lightning_fed.core.messages import Broadcast, ClientUpdate, Turn, TurnResult
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.engines import watch
from lightning_fed.engines.pool import Broadcasts, Job, WorkerDeath, WorkerPool
from lightning_fed.errors import FederationError
from lightning_fed.storage.client_store import ClientStore

pytestmark = pytest.mark.usefixtures("lines")


class Village(WorkerPool):
    """Workers that count their client's turns, in its private state.

    Args:
        size: how many workers.
        deaths: workers that die in the turns of a client, one after the other.
        room: for so many new workers in the place of dead ones.
        mates: who dies with whom.
        turn_timeout: see :class:`.WorkerPool`.
    """

    remedy = "do something else"

    def __init__(
        self,
        size: int,
        deaths: dict[int, int] | None = None,
        room: int = 100,
        mates: Iterable[int] = (),
        turn_timeout: float | None = None,
    ) -> None:
        super().__init__(turn_timeout)
        self.resting: dict[int, float] = {}  # seconds for which a worker stands still in a client's turn
        self.starting: set[int] = set()
        self.living = dict.fromkeys(range(size), True)
        self.deaths = deaths or {}
        self.room, self.mates = room, set(mates)
        self.jobs = {worker: deque[Job]() for worker in range(size)}
        self.most = 0
        self.taken: list[tuple[int, int]] = []

    def available(self) -> list[int]:
        if not any(self.living.values()):
            self.living[0] = True  # a machine has come back
        return [worker for worker, lives in self.living.items() if lives]

    def send(self, worker: int, job: Job) -> None:
        self.jobs[worker].append(job)
        self.most = max(self.most, len(self.jobs[worker]))

    def has_started(self, worker: int) -> bool:
        return worker not in self.starting

    def name(self, worker: int) -> str:
        return f"house {worker}"

    def wait(self, busy: Iterable[int], seconds: float | None) -> list[tuple[int, TurnResult | Exception | WorkerDeath]]:
        answers: list[tuple[int, TurnResult | Exception | WorkerDeath]] = []
        resting = {worker for worker in busy if self.resting.get(self.jobs[worker][0].turn.client.id, 0) > 0}
        if resting == set(busy):
            assert seconds is not None, "they would be waited for, for ever"
            time.sleep(seconds)
            for worker in resting:
                self.resting[self.jobs[worker][0].turn.client.id] -= seconds
            return []
        for worker in set(busy) - resting:
            job = self.jobs[worker].popleft()
            client = job.turn.client.id
            if self.deaths.get(client, 0) or not self.living[worker]:
                self.deaths[client] = max(0, self.deaths.get(client, 0) - 1)
                self.living |= dict.fromkeys(self.mates if worker in self.mates else (), False)
                self.jobs[worker].clear()
                answers.append((worker, WorkerDeath("of old age")))
                continue
            self.taken.append((worker, client))
            count = 1 if job.private is None else int(job.private["count"]) + 1
            update = ClientUpdate(client, 1, {"count": torch.tensor(count)})
            answers.append((worker, TurnResult(update, {"count": torch.tensor(count)})))
        return answers

    def replace(self, worker: int) -> bool:
        self.jobs[worker].clear()
        self.living[worker] = self.room > 0
        self.room -= 1
        return self.living[worker]

    def drop(self, busy: Iterable[int]) -> None:
        for worker in busy:
            self.jobs[worker].clear()


def turns(clients: int) -> list[Turn]:
    return [Turn("fit", ClientInfo(client, 1, 0, 1, (1,)), 3, Broadcast({})) for client in range(clients)]


def play(village: Village, clients: int = 9) -> list[tuple[int, int]]:
    """Who was heard of, in which order, and how many turns it has had."""
    states = ClientStore(Path("states"), 10**6)
    return [(update.client, int(update.state["count"])) for update in village.run_turns(turns(clients), states)]


ALL = [(client, 1) for client in range(9)]


@pytest.mark.parametrize("room", [2, 1, 0])
@pytest.mark.parametrize("size", [3, 2, 1])
def test_a_turn_whose_worker_dies_is_taken_once_more_whether_there_is_room_for_a_new_one_or_not(size: int, room: int) -> None:
    village = Village(size, {0: 1, 5: 1}, room)
    assert play(village) == ALL
    assert sorted(client for _, client in village.taken) == list(range(9))


def test_where_there_is_no_room_for_a_new_one_the_others_take_over() -> None:
    village = Village(2, {0: 1}, room=0)
    assert play(village) == ALL
    assert {worker for worker, _ in village.taken} == {1}
    assert village.most == 3  # what it had left, and what the dead one had


@pytest.mark.parametrize("clients", range(2, 9))
@pytest.mark.parametrize("last", range(2))
def test_a_machine_with_several_workers_leaves(clients: int, last: int) -> None:
    """The idle ones are not tried one after the other, which would be two deaths in a turn."""
    village = Village(4, {clients - 1 - last: 1}, room=0, mates={0, 1, 2, 3} - {clients % 4})
    assert play(village, clients) == ALL[:clients]


def test_whoever_has_room_again_gets_turns_in_the_next_run() -> None:
    village = Village(2, {0: 1}, room=0)
    play(village)
    village.living[0] = True
    village.taken.clear()
    play(village)
    assert {worker for worker, _ in village.taken} == {0, 1}


def test_two_deaths_in_one_turn_end_the_run_and_say_what_to_do() -> None:
    with pytest.raises(FederationError) as error:
        play(Village(2, {4: 2}))
    assert str(error.value) == (
        "Two workers that trained client 4 in round 3 died, the last one of old age: do something else, or use the engine "
        "InProcess to see what happens. The last checkpoint is from before this round."
    )


def test_turns_that_are_not_done_come_to_nothing_when_others_begin() -> None:
    """Whoever holds the loop that waits for them."""
    village, states = Village(2), ClientStore(Path("states"), 10**6)
    held = village.run_turns(turns(9), states)
    next(held)
    assert any(village.jobs.values())
    again = village.run_turns(turns(9)[5:], states)
    assert not any(village.jobs.values())
    assert [update.client for update in again] == [5, 6, 7, 8]
    assert list(held) == []


def test_a_broadcast_is_made_ready_once_and_those_that_differ_in_statistics_alone_apart() -> None:
    """Clients that share a model may have statistics of their own."""
    state, means = {"weight": torch.ones(2)}, [{"mean": torch.zeros(2)}, {"mean": torch.ones(2)}]
    broadcasts = Broadcasts[Broadcast](lambda broadcast: broadcast)
    for mean in (*means, *means):
        assert broadcasts.sent(Broadcast(state, statistics=mean), keep=2).statistics is mean
    first = broadcasts.sent(Broadcast(state, statistics=means[0]), keep=2)
    assert broadcasts.sent(Broadcast(dict(state), statistics=dict(means[0])), keep=2) is first


# ---------------------------------------------------------------------------------------------------------- standing still


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"LEAST": 0.05, "START": 0.1}.items():
        monkeypatch.setattr(watch, name, seconds)


def test_a_turn_that_takes_much_longer_than_turns_did_so_far_is_named(impatient: None, capsys: pytest.CaptureFixture[str]) -> None:
    village = Village(2)
    village.resting = {6: 0.01}
    assert play(village) == ALL
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1
    assert re.fullmatch(
        r"Round 3: the turn of client 6 \(fit\) has taken [\d.]+ s in house 0; the longest one so far took [\de.-]+ s\. If it "
        r"hangs, kill it; federation\.engine\.init_args\.turn_timeout does so automatically\.",
        said[0],
    )


@pytest.mark.parametrize("room", [2, 0])
def test_a_worker_that_stands_still_is_taken_for_dead_after_the_timeout(room: int, capsys: pytest.CaptureFixture[str]) -> None:
    village = Village(2, room=room, turn_timeout=0.05)
    village.resting = {5: 0.01}
    assert play(village) == ALL
    assert sorted(client for _, client in village.taken) == list(range(9))
    (said,) = capsys.readouterr().out.splitlines()
    assert said.startswith("Round 3: the turn of client 5 (fit) has taken 0.")
    assert said.endswith("The worker counts as dead.")


def test_a_turn_in_which_two_stand_still_ends_the_run() -> None:
    village = Village(2, turn_timeout=0.05)
    village.resting = {5: 1.0}
    with pytest.raises(
        FederationError,
        match=r"^Two workers that trained client 5 in round 3 died, the last one after 0\.\d+ s without an answer: "
        r"set federation.engine.init_args.turn_timeout higher, if turns take that long, or use",
    ):
        play(village)
    assert not any(village.jobs.values())  # the one that still stands there is gone, too


def test_what_the_one_who_waits_does_meanwhile_makes_no_worker_late(capsys: pytest.CaptureFixture[str]) -> None:
    village, states = Village(2, turn_timeout=0.05), ClientStore(Path("states"), 10**6)
    for _ in village.run_turns(turns(3), states):
        time.sleep(0.06)
    assert capsys.readouterr().out == ""


def test_a_worker_has_time_to_start(impatient: None, capsys: pytest.CaptureFixture[str]) -> None:
    village = Village(1, turn_timeout=0.01)
    village.starting, village.resting = {0}, {0: 0.1}
    play(village, 1)
    assert re.fullmatch(r"house 0 has been starting for 0\.1\d* s. The worker counts as dead.\n", capsys.readouterr().out)
