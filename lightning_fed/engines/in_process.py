"""Turns one after the other in this process."""

from collections.abc import Iterable, Iterator

from lightning_fed.core.messages import ClientUpdate, Lost, Turn
from lightning_fed.engines.base import Engine
from lightning_fed.engines.recipe import Recipe
from lightning_fed.engines.worker import Worker
from lightning_fed.options import PositiveInt
from lightning_fed.storage.client_store import ClientStore


class InProcess(Engine):
    """Takes each turn when the one before has been merged, so that one update is in memory at a time.

    Args:
        threads: torch threads during a run; None: as many as the process has.
    """

    def __init__(self, threads: PositiveInt | None = None) -> None:
        self.threads = threads
        self._opened: tuple[Worker, ClientStore] | None = None

    def open(self, recipe: Recipe, states: ClientStore) -> None:
        """Make the worker."""
        self._opened = recipe.worker(), states

    def run(self, turns: Iterable[Turn]) -> Iterator[ClientUpdate | Lost]:
        """One update per turn."""
        assert self._opened is not None, "open() comes first"
        worker, states = self._opened
        for turn in turns:
            outcome = worker.take(turn, states.find(turn.client.id))
            if outcome.private is not None:
                states.put(turn.client.id, outcome.private, turn.round)
            yield outcome.update

    def close(self) -> None:
        """Let the worker's networks go."""
        self._opened = None
