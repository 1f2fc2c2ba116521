"""Many workers at once: who gets which turn, in which order what comes of it is handed on, and what happens when a worker dies."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from lightning_fed.errors import FederationError
from lightning_fed.exchange import ClientUpdate, Outcome, State, Turn
from lightning_fed.storage.client_store import ClientStore

WAITING = 2
"""Turns that a worker has at a time: the one that it carries out, and the next."""

VERBS = {
    "fit": "trained",
    "evaluate": "measured",
    "gather": "gathered statistics of",
    "predict": "let a model predict for",
    "learn": "trained a model of",
}
"""What is said of turns that failed."""


@dataclass
class Job:
    """A turn under way, with what it starts from: it can be started again."""

    place: int
    turn: Turn
    private: State | None
    deaths: int = 0


@dataclass(frozen=True)
class Died:
    """A worker ended without an answer; ``how`` says how, for people."""

    how: str


class Crew(ABC):
    """Workers by number, wherever they are."""

    remedy: str
    """What to change if workers die again and again."""

    @abstractmethod
    def muster(self) -> Iterable[int]:
        """Who is to get turns: the workers for whom there is room, one at least."""

    @abstractmethod
    def send(self, worker: int, job: Job) -> None:
        """Give a worker a turn to carry out after those that it has."""

    @abstractmethod
    def wait(self, busy: Iterable[int]) -> list[tuple[int, Outcome | Exception | Died]]:
        """Wait until one of the busy workers answers, or several do. Each answers its turns one after the other, with what came of
        it or what it raised.
        """

    @abstractmethod
    def replace(self, worker: int) -> bool:
        """Put a new worker in the place of one that died. False: there is no room for one any more."""

    @abstractmethod
    def drop(self, busy: Iterable[int]) -> None:
        """Let the busy workers' turns come to nothing."""


def carry_out(crew: Crew, turns: Iterable[Turn], states: ClientStore) -> Iterator[ClientUpdate]:
    """What comes of each turn, in the order of the turns.

    At most twice as many turns as there are workers are under way or wait to be handed on: so many updates are in memory. Turns
    that only measure bring no payload and do not count. A turn whose worker dies is given to a new one, once, and starts from the
    same private state; where there is no room for a new one, the others take over.

    Raises:
        FederationError: if a turn's workers die twice.
    """
    waiting, done = iter(turns), dict[int, ClientUpdate | Exception]()
    jobs = {worker: deque[Job]() for worker in crew.muster()}
    brings_payload = deque[bool]()  # of the turns that have been started and not handed on
    started = handed_on = payloads = 0
    exhausted = False
    try:
        while True:
            while not exhausted and payloads < WAITING * len(jobs):
                worker = _least_busy(jobs)
                if len(jobs[worker]) >= WAITING:
                    break
                if (turn := next(waiting, None)) is None:
                    exhausted = True
                    break
                job = Job(started, turn, states.find(turn.client.id))
                jobs[worker].append(job)
                brings_payload.append(turn.verb != "evaluate")
                payloads += brings_payload[-1]
                started += 1
                crew.send(worker, job)
            if handed_on in done:
                if isinstance(result := done.pop(handed_on), Exception):
                    raise result  # in its place: whose turn it was that failed does not depend on who was faster
                yield result
                payloads -= brings_payload.popleft()
                handed_on += 1
                continue
            busy = [worker for worker, own in jobs.items() if own]
            if not busy:
                return
            for worker, answer in crew.wait(busy):
                if isinstance(answer, Died):
                    _start_again(crew, worker, jobs, answer)
                else:
                    job = jobs[worker].popleft()
                    if isinstance(answer, Exception):
                        done[job.place] = answer
                        continue
                    if answer.private is not None:
                        # A copy: the worker's memory is let go when the update has been merged.
                        own = {name: tensor.clone() for name, tensor in answer.private.items()}
                        states.put(job.turn.client.id, own, job.turn.round)
                    done[job.place] = answer.update
    finally:
        if busy := [worker for worker, own in jobs.items() if own]:
            crew.drop(busy)


def _least_busy(jobs: Mapping[int, deque[Job]]) -> int:
    return min(jobs, key=lambda worker: len(jobs[worker]))


def _start_again(crew: Crew, worker: int, jobs: dict[int, deque[Job]], died: Died) -> None:
    own = jobs[worker]
    first = own[0]
    first.deaths += 1
    if first.deaths > 1:
        own.clear()
        verb = VERBS[first.turn.verb]
        raise FederationError(
            f"Two workers that {verb} client {first.turn.client.id} in round {first.turn.round} died, the last one {died.how}: "
            f"{crew.remedy}, or use the engine InProcess to see what happens. The last checkpoint is from before this round."
        )
    if crew.replace(worker):
        for job in own:
            crew.send(worker, job)
        return
    del jobs[worker]
    present = set(crew.muster())
    for other in [other for other, its in jobs.items() if not its and other not in present]:
        del jobs[other]  # idle on the same machine; who is busy there will be heard of
    if not jobs:
        jobs.update((other, deque()) for other in present)
    for job in own:
        taker = _least_busy(jobs)
        jobs[taker].append(job)
        crew.send(taker, job)
