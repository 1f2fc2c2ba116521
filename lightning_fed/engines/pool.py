"""Many workers at once: who gets which turn, in which order what comes of it is handed on, and what happens when a worker dies."""

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass

from lightning_fed.core.messages import ClientUpdate, Turn, TurnResult
from lightning_fed.engines.watch import Overdue, Watch
from lightning_fed.errors import FederationError
from lightning_fed.storage.client_store import ClientStore
from lightning_fed.tensors import State

log = logging.getLogger(__name__)

WAITING = 2
"""Turns that a worker has at a time: the one that it carries out, and the next."""

VERBS = {
    "fit": "trained",
    "evaluate": "measured",
    "compute_statistics": "gathered statistics of",
    "predict_public": "let a model predict for",
    "train_on_public": "trained a model of",
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
class WorkerDeath:
    """A worker ended without an answer; ``how`` says how, for people, and ``remedy`` what to change if it is not the usual."""

    how: str
    remedy: str | None = None


class WorkerPool(ABC):
    """Workers by number, wherever they are.

    Args:
        turn_timeout: seconds after which a turn's worker is taken for dead; None: it is waited for.
    """

    remedy: str
    """What to change if workers die again and again."""

    def __init__(self, turn_timeout: float | None = None) -> None:
        self.watch = Watch(turn_timeout)
        self._under_way: Generator[ClientUpdate, None, None] | None = None

    def carry_out(self, turns: Iterable[Turn], states: ClientStore) -> Iterator[ClientUpdate]:
        """See :func:`carry_out`. Turns of an earlier call that are not done come to nothing: an answer reaches those who asked, and
        nobody else.
        """
        self.end_turns()
        self._under_way = carry_out(self, turns, states)
        return self._under_way

    def end_turns(self) -> None:
        """Let turns that are under way come to nothing. Whoever holds an exception, as notebooks do, holds the loop that waits for
        them, which then does not end by itself.
        """
        if self._under_way is not None:
            self._under_way.close()
            self._under_way = None

    @abstractmethod
    def available(self) -> Iterable[int]:
        """Who is to get turns: the workers for whom there is room, one at least."""

    @abstractmethod
    def send(self, worker: int, job: Job) -> None:
        """Give a worker a turn to carry out after those that it has."""

    @abstractmethod
    def has_started(self, worker: int) -> bool:
        """Whether a worker that was given turns is at the first of them."""

    @abstractmethod
    def wait(self, busy: Iterable[int], seconds: float | None) -> list[tuple[int, TurnResult | Exception | WorkerDeath]]:
        """Wait until one of the busy workers answers, or several do, or one has started; so many seconds at most, None: for ever.
        Each answers its turns one after the other, with what came of it or what it raised.
        """

    @abstractmethod
    def name(self, worker: int) -> str:
        """What a worker is called where it is, for people."""

    @abstractmethod
    def replace(self, worker: int) -> bool:
        """Put a new worker in the place of one that died, or that is not waited for any longer. False: there is no room for one any
        more.
        """

    @abstractmethod
    def drop(self, busy: Iterable[int]) -> None:
        """Let the busy workers' turns come to nothing."""


def carry_out(pool: WorkerPool, turns: Iterable[Turn], states: ClientStore) -> Generator[ClientUpdate, None, None]:
    """What comes of each turn, in the order of the turns.

    At most twice as many turns as there are workers are under way or wait to be handed on: so many updates are in memory. Turns
    that only measure bring no payload and do not count. A turn whose worker dies is given to a new one, once, and starts from the
    same private state; where there is no room for a new one, the others take over. A line says which turn takes much longer than
    turns did so far; where there is a timeout, a worker that exceeds it is taken for dead.

    Raises:
        FederationError: if a turn's workers die twice.
    """
    waiting, done = iter(turns), dict[int, ClientUpdate | Exception]()
    jobs = {worker: deque[Job]() for worker in pool.available()}
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
                pool.send(worker, job)
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
            for worker, answer in _next_answers(pool, jobs, busy):
                if isinstance(answer, WorkerDeath):
                    _start_again(pool, worker, jobs, answer)
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
        pool.watch.look({})
        if busy := [worker for worker, own in jobs.items() if own]:
            pool.drop(busy)


def _next_answers(
    pool: WorkerPool, jobs: Mapping[int, deque[Job]], busy: Iterable[int]
) -> Iterator[tuple[int, TurnResult | Exception | WorkerDeath]]:
    """What busy workers say, and of whom nothing has been heard for too long."""
    watch = pool.watch
    watch.look({worker: jobs[worker][0].turn if pool.has_started(worker) else None for worker in busy})
    since = time.monotonic()
    answers = pool.wait(busy, watch.pause())
    watch.waited(time.monotonic() - since)
    for worker, answer in answers:
        watch.ended(worker, with_an_answer=not isinstance(answer, WorkerDeath))
        yield worker, answer
    for late in watch.overdue():
        if late.worker in jobs:
            log.warning(_said_of(late, pool))
            if late.dead:
                remedy = "set federation.engine.init_args.turn_timeout higher, if turns take that long"
                yield late.worker, WorkerDeath(f"after {late.seconds:.3g} s without an answer", remedy)


def _said_of(late: Overdue, pool: WorkerPool) -> str:
    where, so_far = pool.name(late.worker), f"{late.seconds:.3g} s"
    if late.turn is None:
        told = f"{where} has been starting for {so_far}"
    else:
        told = f"Round {late.turn.round}: the turn of client {late.turn.client.id} ({late.turn.verb}) has taken {so_far} in {where}"
        told += f"; the longest one so far took {late.longest:.3g} s" if late.longest is not None else ""
    if late.dead:
        return f"{told}. It is taken for dead."
    return f"{told}. If it stands still, end it; federation.engine.init_args.turn_timeout does so by itself."


def _least_busy(jobs: Mapping[int, deque[Job]]) -> int:
    return min(jobs, key=lambda worker: len(jobs[worker]))


def _start_again(pool: WorkerPool, worker: int, jobs: dict[int, deque[Job]], death: WorkerDeath) -> None:
    own = jobs[worker]
    first = own[0]
    first.deaths += 1
    if first.deaths > 1:
        own.clear()
        verb = VERBS[first.turn.verb]
        raise FederationError(
            f"Two workers that {verb} client {first.turn.client.id} in round {first.turn.round} died, the last one {death.how}: "
            f"{death.remedy or pool.remedy}, or use the engine InProcess to see what happens. The last checkpoint is from before "
            "this round."
        )
    if pool.replace(worker):
        for job in own:
            pool.send(worker, job)
        return
    del jobs[worker]
    present = set(pool.available())
    for other in [other for other, its in jobs.items() if not its and other not in present]:
        del jobs[other]  # idle on the same machine; who is busy there will be heard of
    if not jobs:
        jobs.update((other, deque()) for other in present)
    for job in own:
        taker = _least_busy(jobs)
        jobs[taker].append(job)
        pool.send(taker, job)
