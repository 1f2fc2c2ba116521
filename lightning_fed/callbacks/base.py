"""Hooks into the rounds of a run."""

from pathlib import Path
from typing import Any, Literal, Protocol

from lightning.pytorch.loggers import Logger, TensorBoardLogger
from torch import Tensor

from lightning_fed.core.messages import ClientUpdate
from lightning_fed.core.module import FederatedModule
from lightning_fed.core.server import Server
from lightning_fed.data import FederatedDataModule
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.engines import Engine
from lightning_fed.storage.client_store import ClientStore


class RunView(Protocol):
    """The part of a :class:`lightning_fed.federation.run.Run` that callbacks use.

    Attributes:
        round: number of the current round, from 1; 0 before the first.
        rounds: number of rounds.
        seed: the run's seed.
        method: name of the method.
        identity: what must agree when the run is continued: its method, seed, number of clients, and the checksum of its data.
        metric: name of the monitored metric.
        target: target of the monitored metric; None: there is none.
        evaluate_every: number of rounds between evaluations of the clients; 0: only after the last one.
        cohort_size: number of participants of a round.
        history: the metrics of each round.
        clients: all clients.
        unseen: ids of those that never take part in training.
        data: their data.
        model: the method.
        server: its server.
        engine: runs the turns.
        threads: number of torch threads of all computation.
        store: the clients' private states.
        folder: the run's folder; None: nothing is written.
        loggers: loggers of the metrics.
    """

    round: int
    rounds: int
    seed: int
    method: str
    identity: dict[str, Any]
    metric: str
    target: float | None
    evaluate_every: int
    cohort_size: int
    history: list[dict[str, float]]
    clients: list[ClientInfo]
    unseen: frozenset[int]
    data: FederatedDataModule
    model: FederatedModule
    server: Server
    engine: Engine
    threads: int
    store: ClientStore
    folder: Path | None
    loggers: list[Logger]

    @property
    def results(self) -> dict[int, dict[str, float]]:
        """Each client's last evaluation metrics."""

    def measure_across(self, client: int) -> dict[int, dict[str, float]]:
        """Metrics of a client's model on the data of each client, by id, and on the pooled data (-1)."""

    def monitored(self, kind: Literal["val", "test"]) -> str:
        """Column of the monitored metric, which progress, model selection and targets use, on validation or test data."""


class FederationCallback:
    """Called at certain points of a run; every hook does nothing by default.

    :class:`RunView` describes the run that hooks get.
    """

    def on_fit_start(self, run: RunView) -> None:
        """Before the first round, after a checkpoint was loaded."""

    def on_turn_end(self, run: RunView, update: ClientUpdate) -> None:
        """After a participant's update was received."""

    def round_metrics(self, run: RunView) -> dict[str, float]:
        """Further metrics of a round, after its evaluation: they are logged, and are columns of ``metrics.csv``. Default: none."""
        return {}

    def on_round_end(self, run: RunView) -> None:
        """After a round and its evaluation; its metrics are ``run.history[-1]``."""

    def on_fit_end(self, run: RunView) -> None:
        """After the last round."""

    def on_measure_end(self, run: RunView, metrics: dict[str, float]) -> None:
        """After ``validate`` or ``test`` evaluated all clients."""

    def teardown(self, run: RunView) -> None:
        """At the very end, also when the run fails or is interrupted."""


def boards(run: RunView) -> list[TensorBoardLogger]:
    """The TensorBoard loggers of a run."""
    return [logger for logger in run.loggers if isinstance(logger, TensorBoardLogger)]


def majority_baseline(run: RunView) -> Tensor | None:
    """Accuracy on test data of each measured client's most frequent label, without unseen clients and attackers; None if the
    monitored metric is another one, or no client was measured.
    """
    majority = run.data.majority_accuracy() if run.metric == "accuracy" else None
    measured = [client for client, result in run.results.items() if "test/accuracy" in result]
    return majority[measured] if majority is not None and measured else None


def due(run: RunView, every: int) -> bool:
    """Whether the clients were evaluated in this round, and it is every ``every``-th round or the last."""
    return run.monitored("test") in run.history[-1] and (run.round % every == 0 or run.round == run.rounds)
