"""Who gets which turn, without a process: workers whose deaths, and the room for whom, are written down."""

from collections import deque
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from lightning_fed.engines.pool import Crew, Died, Job, carry_out
from lightning_fed.errors import FederationError
from lightning_fed.exchange import Broadcast, ClientInfo, ClientUpdate, Outcome, Turn
from lightning_fed.storage.client_store import ClientStore


class Village(Crew):
    """Workers that count their client's turns, in its private state.

    Args:
        size: how many workers.
        deaths: workers that die in the turns of a client, one after the other.
        room: for so many new workers in the place of dead ones.
        mates: who dies with whom.
    """

    remedy = "do something else"

    def __init__(self, size: int, deaths: dict[int, int] | None = None, room: int = 100, mates: Iterable[int] = ()) -> None:
        self.living = dict.fromkeys(range(size), True)
        self.deaths = deaths or {}
        self.room, self.mates = room, set(mates)
        self.jobs = {worker: deque[Job]() for worker in range(size)}
        self.most = 0
        self.taken: list[tuple[int, int]] = []

    def muster(self) -> list[int]:
        if not any(self.living.values()):
            self.living[0] = True  # a machine has come back
        return [worker for worker, lives in self.living.items() if lives]

    def send(self, worker: int, job: Job) -> None:
        self.jobs[worker].append(job)
        self.most = max(self.most, len(self.jobs[worker]))

    def wait(self, busy: Iterable[int]) -> list[tuple[int, Outcome | Exception | Died]]:
        answers: list[tuple[int, Outcome | Exception | Died]] = []
        for worker in busy:
            job = self.jobs[worker].popleft()
            client = job.turn.client.id
            if self.deaths.get(client, 0) or not self.living[worker]:
                self.deaths[client] = max(0, self.deaths.get(client, 0) - 1)
                self.living |= dict.fromkeys(self.mates if worker in self.mates else (), False)
                self.jobs[worker].clear()
                answers.append((worker, Died("of old age")))
                continue
            self.taken.append((worker, client))
            count = 1 if job.private is None else int(job.private["count"]) + 1
            update = ClientUpdate(client, 1, {"count": torch.tensor(count)})
            answers.append((worker, Outcome(update, {"count": torch.tensor(count)})))
        return answers

    def replace(self, worker: int) -> bool:
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
    return [(update.client, int(update.state["count"])) for update in carry_out(village, turns(clients), states)]


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
