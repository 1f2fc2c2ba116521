"""Hooks into the rounds of a run."""

from pathlib import Path
from typing import Literal, Protocol

from lightning.pytorch.loggers import Logger, TensorBoardLogger

from lightning_fed.core.messages import ClientUpdate
from lightning_fed.core.module import FederatedModule
from lightning_fed.core.server import Server
from lightning_fed.data import FederatedDataModule
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.engines import Engine
from lightning_fed.storage.client_store import ClientStore


class RunView(Protocol):
    """What a callback sees of a run: of :class:`lightning_fed.federation.run.Run`.

    Attributes:
        round: number of the current round, from 1; 0 before the first.
        rounds: how many there are.
        seed: the run's seed.
        method: name of the method.
        metric: name of the monitored metric.
        target: value of the monitored metric that is waited for; None: there is none.
        evaluate_every: after how many rounds clients are measured; 0: after the last one.
        cohort_size: how many clients take part in a round.
        history: the metrics of each round.
        clients: all clients.
        data: their data.
        model: the method.
        server: its server.
        engine: where turns run.
        threads: torch threads of whatever computes.
        store: the clients' private states.
        folder: the run's folder; None: nothing is written.
        loggers: where metrics go.
    """

    round: int
    rounds: int
    seed: int
    method: str
    metric: str
    target: float | None
    evaluate_every: int
    cohort_size: int
    history: list[dict[str, float]]
    clients: list[ClientInfo]
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
        """The last measured metrics by client."""

    def measure_across(self, client: int) -> dict[int, dict[str, float]]:
        """What a client's model comes to on the data of each client, by id, and on everybody's (-1)."""

    def monitored(self, kind: Literal["val", "test"]) -> str:
        """The column that progress, model selection and targets use, on validation or test data."""


class FederationCallback:
    """Does something at certain moments of a run; every hook does nothing by default.

    What there is to look at is in :class:`RunView`.
    """

    def on_fit_start(self, run: RunView) -> None:
        """Before the first round, after a checkpoint was loaded."""

    def on_turn_end(self, run: RunView, update: ClientUpdate) -> None:
        """After a participant's update was received."""

    def on_round_end(self, run: RunView) -> None:
        """After a round was measured; its metrics are ``run.history[-1]``."""

    def on_fit_end(self, run: RunView) -> None:
        """After the last round."""

    def on_measure_end(self, run: RunView, metrics: dict[str, float]) -> None:
        """After ``validate`` or ``test`` measured all clients."""

    def teardown(self, run: RunView) -> None:
        """At the very end, also when the run fails or is interrupted."""


def boards(run: RunView) -> list[TensorBoardLogger]:
    """Those of the run's loggers that are TensorBoard's."""
    return [logger for logger in run.loggers if isinstance(logger, TensorBoardLogger)]


def due(run: RunView, every: int) -> bool:
    """Whether the clients were measured in this round, and it is one of every so many, or the last."""
    return run.monitored("test") in run.history[-1] and (run.round % every == 0 or run.round == run.rounds)
