"""How long turns take, and which of them takes longer than turns do."""

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_fed.core.messages import Turn

FIRST = 600.0
"""Seconds that may pass without a word while no turn of a kind has ended."""

LEAST = 60.0
"""Seconds that may pass without a word in any case."""

TIMES = 10.0
"""How much longer than the longest turn of its kind so far a turn takes before something is said of it."""

START = 300.0
"""Seconds that a worker has to start, however soon turns are taken for dead."""


@dataclass
class _Activity:
    """What a worker is at: a turn, or None while it starts; since when; and after how long something is said of it."""

    turn: Turn | None
    begun: float
    patience: float


@dataclass(frozen=True)
class Overdue:
    """A worker that is at a turn, or at its start (None), for longer than that takes.

    Args:
        worker: which one.
        turn: what it is at.
        seconds: for how long.
        longest: seconds of the longest turn of that kind so far; None: none has ended yet.
        dead: whether it is to be waited for no longer.
    """

    worker: int
    turn: Turn | None
    seconds: float
    longest: float | None
    dead: bool


class Watch:
    """Knows since when each worker is at its turn. Time passes for it while answers are waited for: what this process does itself
    meanwhile, or a debugger that holds it, makes no worker late.

    Args:
        timeout: seconds after which a turn's worker is taken for dead; None: never.
    """

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self._now = 0.0
        self._activities: dict[int, _Activity] = {}
        self._longest: dict[str, float] = {}  # by verb

    def look(self, at: Mapping[int, Turn | None]) -> None:
        """What each busy worker is at now."""
        before, self._activities = self._activities, {}
        for worker, turn in at.items():
            activity = before.get(worker)
            if activity is None or activity.turn is not turn:
                longest = self._longest.get(turn.verb) if turn else None
                activity = _Activity(turn, self._now, FIRST if longest is None else max(LEAST, TIMES * longest))
            self._activities[worker] = activity

    def pause(self) -> float | None:
        """Seconds after which there may be something to say or to do; None: whenever there is an answer."""
        ends = [activity.begun + min(activity.patience, self._limit(activity)) for activity in self._activities.values()]
        return max(0.0, min(ends) - self._now) if ends else None

    def waited(self, seconds: float) -> None:
        """So long answers have been waited for."""
        self._now += seconds

    def ended(self, worker: int, with_an_answer: bool) -> None:
        """A worker has ended what it was at."""
        activity = self._activities.pop(worker)
        if with_an_answer and activity.turn is not None:
            verb = activity.turn.verb
            self._longest[verb] = max(self._longest.get(verb, 0.0), self._now - activity.begun)

    def overdue(self) -> list[Overdue]:
        """Of whom something is to be said now; the next time when it has taken twice as long."""
        found = []
        for worker, activity in self._activities.items():
            seconds, dead = self._now - activity.begun, self._now - activity.begun >= self._limit(activity)
            if dead or seconds >= activity.patience:
                activity.patience = 2 * seconds
                longest = self._longest.get(activity.turn.verb) if activity.turn else None
                found.append(Overdue(worker, activity.turn, seconds, longest, dead))
        return found

    def _limit(self, activity: _Activity) -> float:
        if self.timeout is None:
            return float("inf")
        return self.timeout if activity.turn else max(self.timeout, START)
