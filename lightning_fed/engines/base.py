"""The interface of all engines, which run turns."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from lightning_fed.core.messages import ClientUpdate, Turn, TurnFailure
from lightning_fed.data import FederatedDataModule
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.engines.worker_spec import WorkerSpec
from lightning_fed.errors import FederationError
from lightning_fed.storage.client_store import ClientStore

GAINS_FROM_THREADS = 20_000_000
"""Trained parameters times examples per batch from which a training step gains from a second thread: 1.1 to 1.8 times faster,
measured by ``bench/threads.py``. Smaller steps gain little and slow down under other load, because threads wait for each other.
"""


class Engine(ABC):
    """Runs turns and stores the clients' private states.

    The same run gives the same results on every engine: a turn is a function of its inputs, and results are returned in the order
    of the turns, whatever the order in which they end. An engine may serve several runs, one after the other.
    """

    threads: int | None = None
    """Torch threads of all computation, including the server's; None: see :meth:`threads_for`. Sums depend on it."""

    def threads_for(self, model: nn.Module, batch_size: int) -> int:
        """Number of torch threads of a run: the number that was set; else one, or all of the process if steps are large enough to
        gain from them, see :data:`GAINS_FROM_THREADS`.
        """
        size = sum(parameter.numel() for parameter in model.parameters()) * batch_size
        return self.threads or (torch.get_num_threads() if size >= GAINS_FROM_THREADS else 1)

    def clients(self, data: FederatedDataModule) -> Sequence[ClientInfo]:
        """The clients, in order of their ids. Default: those of the data."""
        data.prepare_data()
        data.setup()
        return data.clients

    @abstractmethod
    def open(self, spec: WorkerSpec, states: ClientStore) -> None:
        """Prepare a run."""

    @abstractmethod
    def run(self, turns: Iterable[Turn]) -> Iterator[ClientUpdate | TurnFailure]:
        """Yield the result of each turn, in the order of the turns. A turn is taken from ``turns`` when a worker can take it, and
        starts from the private state of the client's last turn; closing the iterator drops unfinished turns.
        """

    def refused(self, turn: Turn, error: FederationError) -> TurnFailure:
        """What happens to a turn whose update the server refuses; called before :meth:`run` continues. Default: the run ends.

        Args:
            turn: the turn whose update :meth:`run` has just yielded.
            error: what is wrong with the update.

        Raises:
            FederationError: the error, if the engine does not continue without the turn.
        """
        raise error

    def close(self) -> None:  # noqa: B027 - there may be nothing to do
        """End the run and release its memory."""
