"""How long turns take, and which turns take unusually long."""

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_fed.core.messages import Turn

FIRST = 600.0
"""Seconds before the first message about a turn while no turn of its kind has ended."""

LEAST = 60.0
"""Minimum seconds before a message about a turn."""

TIMES = 10.0
"""A message is printed when a turn takes this many times as long as the longest turn of its kind so far."""

START = 300.0
"""Seconds that a worker may take to start, even with a shorter timeout of turns."""


@dataclass
class _Activity:
    """What a worker is doing: a turn, or None while it starts; since when; and after how long a message is due."""

    turn: Turn | None
    begun: float
    patience: float


@dataclass(frozen=True)
class Overdue:
    """A worker that takes unusually long for its turn, or for its start (None).

    Args:
        worker: number of the worker.
        turn: its turn.
        seconds: how long it has taken so far.
        longest: seconds of the longest turn of that kind so far. None: none has ended yet.
        dead: whether the timeout has passed.
    """

    worker: int
    turn: Turn | None
    seconds: float
    longest: float | None
    dead: bool


class Watch:
    """Tracks how long each worker has been at its turn. Time only passes while the process waits for answers: work of this process,
    or a debugger that stops it, makes no worker late.

    Args:
        timeout: seconds after which a turn's worker counts as dead. None: never.
    """

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self._now = 0.0
        self._activities: dict[int, _Activity] = {}
        self._longest: dict[str, float] = {}  # by verb

    def look(self, at: Mapping[int, Turn | None]) -> None:
        """Update what each busy worker is doing."""
        before, self._activities = self._activities, {}
        for worker, turn in at.items():
            activity = before.get(worker)
            if activity is None or activity.turn is not turn:
                longest = self._longest.get(turn.verb) if turn else None
                activity = _Activity(turn, self._now, FIRST if longest is None else max(LEAST, TIMES * longest))
            self._activities[worker] = activity

    def pause(self) -> float | None:
        """Seconds until a message or a timeout may be due. None: no limit."""
        ends = [activity.begun + min(activity.patience, self._limit(activity)) for activity in self._activities.values()]
        return max(0.0, min(ends) - self._now) if ends else None

    def waited(self, seconds: float) -> None:
        """Record how long the process has waited for answers."""
        self._now += seconds

    def ended(self, worker: int, with_an_answer: bool) -> None:
        """Record that a worker has ended its turn or start."""
        activity = self._activities.pop(worker)
        if with_an_answer and activity.turn is not None:
            verb = activity.turn.verb
            self._longest[verb] = max(self._longest.get(verb, 0.0), self._now - activity.begun)

    def overdue(self) -> list[Overdue]:
        """Workers about which a message is due now; the next is due when the time has doubled."""
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
