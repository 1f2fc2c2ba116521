"""The engine that runs turns one after the other in this process."""

from collections.abc import Iterable, Iterator

from lightning_fed.core.messages import ClientUpdate, Turn, TurnFailure
from lightning_fed.engines.base import Engine
from lightning_fed.engines.worker import Worker
from lightning_fed.engines.worker_spec import WorkerSpec
from lightning_fed.options import PositiveInt
from lightning_fed.storage.client_store import ClientStore


class InProcess(Engine):
    """Runs each turn after the previous one has been merged, so that only one update is in memory.

    Args:
        threads: number of torch threads during a run. None: one, or all of the process if steps are large enough to gain from
            them, see :meth:`.Engine.threads_for`.
    """

    def __init__(self, threads: PositiveInt | None = None) -> None:
        self.threads = threads
        self._opened: tuple[Worker, ClientStore] | None = None

    def open(self, spec: WorkerSpec, states: ClientStore) -> None:
        """Create the worker."""
        self._opened = spec.worker(), states

    def run(self, turns: Iterable[Turn]) -> Iterator[ClientUpdate | TurnFailure]:
        """One update per turn."""
        assert self._opened is not None, "open() comes first"
        worker, states = self._opened
        for turn in turns:
            result = worker.run_turn(turn, states.find(turn.client.id))
            if result.private is not None:
                states.put(turn.client.id, result.private, turn.round)
            yield result.update

    def close(self) -> None:
        """Release the worker's networks."""
        self._opened = None
