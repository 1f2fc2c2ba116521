"""What runs turns: the contract of every engine."""

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
"""Trained parameters times examples of a batch from which on a training step gains from a second thread: 1.1 to 1.8 times,
measured by ``bench/threads.py``. What is smaller gains little, and beside other work loses much, since threads wait for each other.
"""


class Engine(ABC):
    """Runs turns somewhere and keeps the clients' private states.

    The same run gives the same numbers on every engine: a turn is a function of its inputs, and what comes of the turns is handed
    on in their order, whatever the order in which they end. An engine may serve several runs, one after the other.
    """

    threads: int | None = None
    """Torch threads of whatever computes, the server included; None: see :meth:`threads_for`. Sums depend on it."""

    def threads_for(self, model: nn.Module, batch_size: int) -> int:
        """How many torch threads a run has: those asked for; if none are, one, or as many as the process has where the steps are
        large enough to gain from them, see :data:`GAINS_FROM_THREADS`.
        """
        size = sum(parameter.numel() for parameter in model.parameters()) * batch_size
        return self.threads or (torch.get_num_threads() if size >= GAINS_FROM_THREADS else 1)

    def clients(self, data: FederatedDataModule) -> Sequence[ClientInfo]:
        """Who there is, in order of the ids. Default: the data say."""
        data.prepare_data()
        data.setup()
        return data.clients

    @abstractmethod
    def open(self, spec: WorkerSpec, states: ClientStore) -> None:
        """Get ready for a run."""

    @abstractmethod
    def run(self, turns: Iterable[Turn]) -> Iterator[ClientUpdate | TurnFailure]:
        """What comes of each turn, in the order of the turns. A turn is taken from ``turns`` when there is room for it, and starts
        from the private state that the client's last turn left; closing the iterator drops the turns that are not done.
        """

    def refused(self, turn: Turn, error: FederationError) -> TurnFailure:
        """What becomes of a turn whose update the server refuses, asked before :meth:`run` goes on. Default: the run ends.

        Args:
            turn: the turn, whose update :meth:`run` has just handed on.
            error: what is wrong with the update.

        Raises:
            FederationError: the error, where an engine does not go on without the turn.
        """
        raise error

    def close(self) -> None:  # noqa: B027 - there may be nothing to do
        """End the run; nothing of it stays in memory."""
