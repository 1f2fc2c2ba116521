"""Distributes turns to many workers, returns results in order, and replaces workers that die."""

import logging
import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from lightning_fed.core.messages import Broadcast, ClientUpdate, Turn, TurnResult
from lightning_fed.engines.watch import Overdue, Watch
from lightning_fed.errors import FederationError
from lightning_fed.storage.client_store import ClientStore
from lightning_fed.tensors import State

log = logging.getLogger(__name__)
Sent = TypeVar("Sent")

WAITING = 2
"""Number of turns that a worker has at a time: the current and the next one."""

VERBS = {
    "fit": "trained",
    "evaluate": "measured",
    "personalize": "personalized a model for",
    "compute_statistics": "gathered statistics of",
    "predict_public": "let a model predict for",
    "train_on_public": "trained a model of",
}
"""How messages describe failed turns."""


@dataclass
class Job:
    """A turn in progress, with its private state, so that it can be restarted."""

    place: int
    turn: Turn
    private: State | None
    deaths: int = 0


@dataclass(frozen=True)
class WorkerDeath:
    """A worker ended without an answer; ``how`` describes it for the user, and ``remedy`` what to change if not the usual."""

    how: str
    remedy: str | None = None


class WorkerPool(ABC):
    """Numbered workers, wherever they run.

    Args:
        turn_timeout: seconds after which a turn's worker counts as dead. None: no limit.
    """

    remedy: str
    """What to change if workers die repeatedly."""

    def __init__(self, turn_timeout: float | None = None) -> None:
        self.watch = Watch(turn_timeout)
        self._under_way: Generator[ClientUpdate, None, None] | None = None

    def run_turns(self, turns: Iterable[Turn], states: ClientStore) -> Iterator[ClientUpdate]:
        """Yield the result of each turn, in the order of the turns.

        At most twice as many turns as workers are in progress or wait to be yielded, which limits the updates in memory; turns that
        only evaluate have no payload and do not count. If a worker dies, its turn is restarted once on a new worker, from the same
        private state; if there is no resource for a new one, the other workers take over. A line is printed for a turn that takes
        much longer than earlier ones; with a timeout, a worker that exceeds it counts as dead. A new call drops unfinished turns of
        an earlier call, so that answers only reach the caller that requested them.

        Raises:
            FederationError: if two workers die in the same turn.
        """
        self.end_turns()
        self._under_way = self._run_turns(turns, states)
        return self._under_way

    def end_turns(self) -> None:
        """Drop turns in progress. Code that holds an exception, as notebooks do, also holds the loop that waits for them, which
        then does not end by itself.
        """
        if self._under_way is not None:
            self._under_way.close()
            self._under_way = None

    @abstractmethod
    def available(self) -> Iterable[int]:
        """The workers that can get turns: those for which there are resources, at least one."""

    @abstractmethod
    def send(self, worker: int, job: Job) -> None:
        """Give a worker a turn to run after those that it has."""

    @abstractmethod
    def has_started(self, worker: int) -> bool:
        """Whether a worker with turns has started the first of them."""

    @abstractmethod
    def wait(self, busy: Iterable[int], seconds: float | None) -> list[tuple[int, TurnResult | Exception | WorkerDeath]]:
        """Wait until a busy worker answers or starts, for at most ``seconds`` (None: without limit). Each worker answers its turns
        in order, with the result or the exception that was raised.
        """

    @abstractmethod
    def name(self, worker: int) -> str:
        """Name of a worker for messages."""

    @abstractmethod
    def replace(self, worker: int) -> bool:
        """Replace a worker that died or timed out. Returns False if there are no resources for a new one."""

    @abstractmethod
    def drop(self, busy: Iterable[int]) -> None:
        """Drop the turns of busy workers."""

    def _run_turns(self, turns: Iterable[Turn], states: ClientStore) -> Generator[ClientUpdate, None, None]:
        waiting, done = iter(turns), dict[int, ClientUpdate | Exception]()
        jobs = {worker: deque[Job]() for worker in self.available()}
        brings_payload = deque[bool]()  # for turns that have started but are not yielded yet
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
                    brings_payload.append(turn.verb not in ("evaluate", "personalize"))
                    payloads += brings_payload[-1]
                    started += 1
                    self.send(worker, job)
                if handed_on in done:
                    if isinstance(result := done.pop(handed_on), Exception):
                        raise result  # in order: which failure is raised must not depend on speed
                    yield result
                    payloads -= brings_payload.popleft()
                    handed_on += 1
                    continue
                busy = [worker for worker, own in jobs.items() if own]
                if not busy:
                    return
                for worker, answer in self._next_answers(jobs, busy):
                    if isinstance(answer, WorkerDeath):
                        self._start_again(worker, jobs, answer)
                    else:
                        job = jobs[worker].popleft()
                        if isinstance(answer, Exception):
                            done[job.place] = answer
                            continue
                        if answer.private is not None:
                            # A copy: the worker's memory is released once the update is merged.
                            own = {name: tensor.clone() for name, tensor in answer.private.items()}
                            states.put(job.turn.client.id, own, job.turn.round)
                        done[job.place] = answer.update
        finally:
            self.watch.look({})
            if busy := [worker for worker, own in jobs.items() if own]:
                self.drop(busy)

    def _next_answers(
        self, jobs: Mapping[int, deque[Job]], busy: Iterable[int]
    ) -> Iterator[tuple[int, TurnResult | Exception | WorkerDeath]]:
        """Answers of busy workers, and deaths of workers that have timed out."""
        watch = self.watch
        watch.look({worker: jobs[worker][0].turn if self.has_started(worker) else None for worker in busy})
        since = time.monotonic()
        answers = self.wait(busy, watch.pause())
        watch.waited(time.monotonic() - since)
        for worker, answer in answers:
            watch.ended(worker, with_an_answer=not isinstance(answer, WorkerDeath))
            yield worker, answer
        for late in watch.overdue():
            if late.worker in jobs:
                log.warning(self._said_of(late))
                if late.dead:
                    remedy = "set federation.engine.init_args.turn_timeout higher, if turns take that long"
                    yield late.worker, WorkerDeath(f"after {late.seconds:.3g} s without an answer", remedy)

    def _said_of(self, late: Overdue) -> str:
        where, turn, so_far = self.name(late.worker), late.turn, f"{late.seconds:.3g} s"
        if turn is None:
            line = f"{where} has been starting for {so_far}"
        else:
            line = f"Round {turn.round}: the turn of client {turn.client.id} ({turn.verb}) has taken {so_far} in {where}"
            line += f"; the longest one so far took {late.longest:.3g} s" if late.longest is not None else ""
        if late.dead:
            return f"{line}. The worker counts as dead."
        return f"{line}. If it hangs, kill it; federation.engine.init_args.turn_timeout does so automatically."

    def _start_again(self, worker: int, jobs: dict[int, deque[Job]], death: WorkerDeath) -> None:
        own = jobs[worker]
        first = own[0]
        first.deaths += 1
        if first.deaths > 1:
            turn = first.turn
            raise FederationError(
                f"Two workers that {VERBS[turn.verb]} client {turn.client.id} in round {turn.round} died, the last one "
                f"{death.how}: {death.remedy or self.remedy}, or use the engine InProcess to see what happens. The last checkpoint "
                "is from before this round."
            )
        if self.replace(worker):
            for job in own:
                self.send(worker, job)
            return
        del jobs[worker]
        present = set(self.available())
        for other in [other for other, its in jobs.items() if not its and other not in present]:
            del jobs[other]  # idle on the same machine; a busy worker's pipe reports its death
        if not jobs:
            jobs.update((other, deque()) for other in present)
        for job in own:
            taker = _least_busy(jobs)
            jobs[taker].append(job)
            self.send(taker, job)


def _least_busy(jobs: Mapping[int, deque[Job]]) -> int:
    return min(jobs, key=lambda worker: len(jobs[worker]))


class Broadcasts(Generic[Sent]):
    """Broadcasts in the form that is sent. The last few are kept with their tensors, so that ids of tensors stay unique."""

    def __init__(self, ready: Callable[[Broadcast], Sent]) -> None:
        self._ready = ready
        self._sent: OrderedDict[tuple[Any, ...], tuple[Broadcast, Sent]] = OrderedDict()

    def sent(self, broadcast: Broadcast, keep: int) -> Sent:
        """A broadcast in the form that is sent; the same object for the same tensors."""
        tensors = {**broadcast.state, **{f"{name} ": tensor for name, tensor in broadcast.statistics.items()}}
        key = (broadcast.model_size, *((name, id(tensor)) for name, tensor in tensors.items()))
        if key not in self._sent:
            self._sent[key] = broadcast, self._ready(broadcast)
            while len(self._sent) > keep:
                self._sent.popitem(last=False)
        self._sent.move_to_end(key)
        return self._sent[key][1]

    def clear(self) -> None:
        """Drop all broadcasts."""
        self._sent.clear()
