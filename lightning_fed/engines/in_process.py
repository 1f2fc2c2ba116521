"""Turns one after the other in this process."""

from collections.abc import Iterable, Iterator
from typing import Protocol

from lightning_fed.engines.worker import Turn, Worker
from lightning_fed.exchange import ClientUpdate


class Engine(Protocol):
    """Runs turns and yields what comes back, in any order; the numbers must not depend on which engine it is."""

    def run(self, worker: Worker, turns: Iterable[Turn]) -> Iterator[ClientUpdate]:
        """Yield one update per turn."""
        ...


class InProcess:
    """Takes each turn when the one before has been merged, so that one update is in memory at a time."""

    def run(self, worker: Worker, turns: Iterable[Turn]) -> Iterator[ClientUpdate]:
        """Yield one update per turn, in the order of the turns."""
        for turn in turns:
            yield worker.take(turn)
