"""The rounds: who takes part, what they learn, how it is merged, measured and kept."""

import shutil
import tempfile
import weakref
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_fed.aggregation import WeightedMean
from lightning_fed.callbacks import AdapterRanks, FederationCallback, MetricsTable, ProgressBar, Summary, TensorBoardFigures
from lightning_fed.data import FederatedDataModule
from lightning_fed.engines import Engine, InProcess
from lightning_fed.engines.worker import TrainerFactory, Turn, Worker
from lightning_fed.errors import FederationError
from lightning_fed.exchange import Broadcast, ClientInfo, ClientUpdate, State, check_fits
from lightning_fed.measure.meters import (
    Metrics,
    Stopwatch,
    TrafficMeter,
    running_totals,
    spread_all,
    target_reached,
    training_means,
    validation_selected,
)
from lightning_fed.module import FederatedModule
from lightning_fed.options import Fraction
from lightning_fed.quiet import plugins_searched_once, quiet_lightning
from lightning_fed.seeding import COHORT, INITIAL, SERVER_ROUND, seeded
from lightning_fed.storage.checkpoint import Checkpoint, Checkpoints
from lightning_fed.storage.client_store import ClientStore
from lightning_fed.storage.run_folder import load_checkpoint, new_run_folder, newest_run


class Federation:
    """Trains a federated module on the clients of a federated data module.

    ``fit``, ``validate`` and ``test`` are Lightning's verbs. A run writes to ``run_dir/version_<n>``: TensorBoard events,
    ``metrics.csv``, ``clients.csv``, for LoRA methods ``ranks.csv``, and checkpoints.

    Args:
        rounds: communication rounds.
        participation: share of the clients that take part in a round, in (0, 1]; at least one does.
        seed: seed of everything random in the run; the command line sets it to ``seed_everything``.
        evaluate_every: measure every that many rounds, and after the last one; 0: after the last one only.
        target: report the round at which the headline, on test data, first reached this value, and what had been sent and computed
            by then (``target/…``). None: no target.
        checkpoint_every: write a checkpoint every that many rounds, and after the last one; 0: never.
        run_dir: where runs are written; None writes nothing.
        store_limit_mb: memory for the clients' private states, in MiB; what exceeds it lies on disk.
        logger: where metrics go: True for TensorBoard, False for nowhere, or any of Lightning's loggers.
        progress: show a progress bar and, at the end, a table.
        callbacks: more callbacks.
        engine: where turns run; None: in this process.
        trainer: builds each client's Trainer; None: Lightning's defaults on one device. The command line builds it from the
            ``trainer`` block.
    """

    def __init__(
        self,
        rounds: PositiveInt = 100,
        participation: Fraction = 1.0,
        seed: NonNegativeInt = 0,
        evaluate_every: NonNegativeInt = 1,
        target: float | None = None,
        checkpoint_every: NonNegativeInt = 1,
        run_dir: Path | str | None = "runs",
        store_limit_mb: PositiveFloat = 2048,
        logger: Logger | bool = True,
        progress: bool = True,
        callbacks: list[FederationCallback] | None = None,
        engine: Engine | None = None,
        trainer: TrainerFactory | None = None,
    ) -> None:
        if not 0 < participation <= 1:
            raise FederationError(f"participation is {participation}: give the share of clients per round, in (0, 1].")
        if rounds < 1:
            raise FederationError(f"rounds is {rounds}: give at least 1.")
        self.rounds = rounds
        self.participation = participation
        self.seed = seed
        self.evaluate_every = evaluate_every
        self.target = target
        self.checkpoint_every = checkpoint_every
        self.run_dir = Path(run_dir) if run_dir is not None else None
        self.store_limit = int(store_limit_mb * 2**20)
        self.logger = logger
        self.callbacks = [MetricsTable(), TensorBoardFigures(), AdapterRanks(), *(callbacks or [])]
        if progress:
            self.callbacks += [ProgressBar(), Summary()]
        self.engine = engine or InProcess()
        self.new_trainer = trainer or partial(L.Trainer, devices=1)
        self.round = 0
        self.history: list[Metrics] = []
        self.results: dict[int, Metrics] = {}
        self.loggers: list[Logger] = []
        self._stopwatch, self._traffic = Stopwatch(), TrafficMeter()
        self._gathered: int | None = None  # the round of which the statistics are

    # -------------------------------------------------------------------------------------------------------------- verbs

    def fit(self, model: FederatedModule, datamodule: FederatedDataModule, ckpt_path: Path | str | None = None) -> list[Metrics]:
        """Train for ``rounds`` rounds.

        Args:
            model: the method. If its networks exist already (pretrained, say), the server starts from their shared part.
            datamodule: the clients' data.
            ckpt_path: continue from a checkpoint: ``"last"`` is the newest of the newest run in ``run_dir`` (a new run if there is
                none), else the folder of a run or of one checkpoint. A continued run ends as one that was never stopped.
                Checkpoints later than the one it continues from are dropped.

        Returns:
            The metrics of every round, as in ``metrics.csv``.

        Raises:
            FederationError: when something the user can change is wrong; what was checkpointed before stays.
        """
        with quiet_lightning(), plugins_searched_once(), isolate_rng():
            checkpoint = self._find_checkpoint(ckpt_path)
            if ckpt_path and checkpoint is None:
                print(f"No checkpoint in {self.run_dir} yet: starting a new run.")
            self._set_up(model, datamodule)
            self._open_run(checkpoint)
            try:
                self._call("on_fit_start")
                while self.round < self.rounds:
                    self.round += 1
                    self.history.append(self._play_round())
                    self._report()
                    self._save_checkpoint()
                self._call("on_fit_end")
            finally:
                self._call("teardown")
                for logger in self.loggers:
                    logger.finalize("success" if self.round == self.rounds else "failed")
        return self.history

    def validate(self, model: FederatedModule, datamodule: FederatedDataModule, ckpt_path: Path | str | None = None) -> Metrics:
        """Measure the clients of a run on their validation data; see :meth:`fit` for ``ckpt_path``, here ``"last"`` if None."""
        return self._measure(model, datamodule, ckpt_path, "val")

    def test(self, model: FederatedModule, datamodule: FederatedDataModule, ckpt_path: Path | str | None = None) -> Metrics:
        """Measure the clients of a run on their test data; see :meth:`fit` for ``ckpt_path``, here ``"last"`` if None."""
        return self._measure(model, datamodule, ckpt_path, "test")

    def export(
        self,
        model: FederatedModule,
        datamodule: FederatedDataModule,
        output: Path | str,
        client: NonNegativeInt | None = None,
        ckpt_path: Path | str | None = None,
        merged: bool = False,
    ) -> None:
        """Write a model of a run for use elsewhere; see :meth:`FederatedModule.export` for what is written.

        Args:
            model: the method.
            datamodule: the clients' data.
            output: folder to write to.
            client: whose model; None: the shared part, as the server has it.
            ckpt_path: see :meth:`fit`, here ``"last"`` if None.
            merged: write the whole network, its adapters added to the weights; see :meth:`FederatedModule.export_merged`.
        """
        self._restore(model, datamodule, ckpt_path)
        if client is not None and client >= len(self.clients):
            raise FederationError(f"There is no client {client}: ids go from 0 to {len(self.clients) - 1}.")
        if client is not None:
            model = self.client_module(client)
        else:
            with quiet_lightning(), plugins_searched_once(), isolate_rng():
                self._gather()
            broadcast = self.server.models().get("global", Broadcast(self.server.state))
            if broadcast.capacity is None:
                model.load_broadcast(broadcast)
            else:  # a version of the model that the template is not
                model = self.worker.module_of(self.data.pooled().info, broadcast)
        (model.export_merged if merged else model.export)(Path(output))

    def _measure(self, model: FederatedModule, datamodule: FederatedDataModule, ckpt_path: Path | str | None, kind: str) -> Metrics:
        with quiet_lightning(), plugins_searched_once(), isolate_rng():
            self._restore(model, datamodule, ckpt_path)
            metrics = {name: value for name, value in self._evaluate().items() if f"/{kind}_" in name}
            self._call("on_measure_end", metrics)
        return metrics

    def _restore(self, model: FederatedModule, datamodule: FederatedDataModule, ckpt_path: Path | str | None) -> None:
        """Be where a run was left."""
        checkpoint = self._find_checkpoint(ckpt_path or "last")
        if checkpoint is None:
            raise FederationError(f"There is no checkpoint in {self.run_dir}: fit first, or set ckpt_path.")
        self._set_up(model, datamodule)
        self._open_folder(checkpoint.run_folder)
        self._continue_from(checkpoint)

    def client_module(self, client: int) -> FederatedModule:
        """A client's model as it is after the last round, with the server's broadcast loaded: for use outside the federation."""
        with quiet_lightning(), plugins_searched_once(), isolate_rng():
            self._gather()
        return self.worker.module_of(self.clients[client], self.server.measured(self.clients[client]))

    # ------------------------------------------------------------------------------------------------------------- a round

    def _play_round(self) -> Metrics:
        """Broadcast, turns, updates, aggregate, measure; returns the round's metrics."""
        cohort = self._open_round()
        measure = self._is_due(self.evaluate_every)
        updates: list[ClientUpdate] = []  # without payloads
        with self._stopwatch("aggregate"):
            merging = self.server.aggregate(self._received(cohort, measure, updates))
        row = {"round": float(self.round), **training_means(updates), **merging, **self._traffic.collect()}
        row["compute/flops"] = sum(update.metrics["flops"] for update in updates)
        row |= running_totals(self.history, row)
        if measure:
            row |= spread_all("before", [update.metrics for update in updates])
            row |= self._evaluate()
            row |= validation_selected([*self.history, row], self.headline, self.metric)
        if self.target is not None:
            row |= target_reached([*self.history, row], self.headline("test"), self.target)
        return row | self._stopwatch.collect()

    def _received(self, cohort: Collection[ClientInfo], measure: bool, noted: list[ClientUpdate]) -> Iterator[ClientUpdate]:
        """The cohort's updates in client order, each counted, noted without its payload, and passed on."""
        updates = self._stopwatch.each("fit", self.engine.run(self.worker, self._turns(cohort, measure)))
        for update in in_client_order(updates, [client.id for client in cohort]):
            self._traffic.up(update)
            noted.append(ClientUpdate(update.client, update.num_examples, {}, update.metrics))
            self._call("on_turn_end", update)
            yield update

    def _turns(self, cohort: Iterable[ClientInfo], measure: bool) -> Iterator[Turn]:
        for client in cohort:
            broadcast = self.server.broadcast(client)
            self._traffic.down(client.id, broadcast)
            yield Turn("fit", client, self.round, broadcast, measure)

    def _open_round(self) -> list[ClientInfo]:
        """Who takes part, in client order: a function of (seed, round). The server prepares for them."""
        stream = np.random.default_rng([self.seed, COHORT, self.round])
        cohort = [self.clients[k] for k in sorted(stream.choice(len(self.clients), self.cohort_size, replace=False))]
        if self.model.centralised:
            cohort = [self.data.pooled().info]
        with seeded(self.seed, SERVER_ROUND, self.round):
            self.server.open_round(self.round, cohort)
        return cohort

    def _evaluate(self) -> Metrics:
        """Every client's model with the new broadcast loaded, on the client's own data; the server's models on everybody's."""
        with self._stopwatch("evaluate"):
            self._gather()
            turns = (Turn("evaluate", client, self.round, self.server.measured(client)) for client in self.clients)
            results = {update.client: update.metrics for update in self.engine.run(self.worker, turns)}
            self.results = {client.id: results[client.id] for client in self.clients}
            metrics = spread_all("after", self.results.values())
            server = self.data.pooled().info
            for name, model in self.server.models().items():
                [update] = self.engine.run(self.worker, [Turn("evaluate", server, self.round, model)])
                metrics |= {f"{name}/{column.replace('/', '_')}": value for column, value in update.metrics.items()}
        return metrics

    def _gather(self) -> None:
        """Statistics of the models as they are after this round, once."""
        if self.model.has_statistics and self._gathered != self.round:
            self.server.gather(self._statistics_of)
            self._gathered = self.round

    def _statistics_of(self, model: Broadcast) -> State:
        """Mean of all clients' statistics of a model, each batch counting the same."""
        turns = (Turn("gather", client, self.round, model) for client in self.clients)
        mean = WeightedMean()
        for update in in_client_order(self.engine.run(self.worker, turns), [client.id for client in self.clients]):
            mean.add(update.state, update.metrics["batches"])
        return mean.result()

    def _is_due(self, every: int) -> bool:
        return self.round == self.rounds or (every > 0 and self.round % every == 0)

    def _report(self) -> None:
        with self._stopwatch("report"):
            for logger in self.loggers:
                logger.log_metrics({name: value for name, value in self.history[-1].items() if name != "round"}, step=self.round)
            self._call("on_round_end")

    def _save_checkpoint(self) -> None:
        if self.checkpoints and self.checkpoint_every and self._is_due(self.checkpoint_every):
            with self._stopwatch("checkpoint"):
                self.checkpoints.save(self.round, self.identity, self.history, self.server.state_dict(), self.store)

    def _call(self, hook: str, *args: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(self, *args)

    # -------------------------------------------------------------------------------------------------------------- set-up

    def _set_up(self, model: FederatedModule, datamodule: FederatedDataModule) -> None:
        """Bring method, data and server together, as before the first round; nothing is written."""
        datamodule.prepare_data()
        datamodule.setup()
        with seeded(self.seed, INITIAL):
            model.configure_model()
        self.model, self.data, self.clients = model, datamodule, datamodule.clients
        self.method, self.metric = type(model).__name__, model.headline_metric
        self.cohort_size = 1 if model.centralised else max(1, round(self.participation * len(self.clients)))
        with seeded(self.seed, INITIAL):
            self.server = model.configure_server(self.clients)
        self.round, self.history, self.results, self.loggers = 0, [], {}, []
        self._gathered = None

    def headline(self, kind: str) -> str:
        """The column that progress, model selection and targets use, on ``"val"`` or ``"test"`` data."""
        return f"global/{kind}_{self.metric}" if self.model.headline_model == "global" else f"after/{kind}_{self.metric}/mean"

    @property
    def identity(self) -> dict[str, Any]:
        """What a run and a checkpoint that it continues from must agree on."""
        return {
            "method": self.method,
            "seed": self.seed,
            "clients": len(self.clients),
            "data": self.data.fingerprint(),
        }

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """What a logger should remember of this run's settings."""
        settings = {**self.model.hparams, "method": self.method, "rounds": self.rounds, "participation": self.participation}
        settings["seed"] = self.seed
        for phase in self.model.phases():
            defaults = phase.optimizer(phase.parameters).defaults
            settings |= {f"{phase.name}/{key}": value for key, value in defaults.items() if isinstance(value, int | float)}
        return settings

    def _open_run(self, checkpoint: Checkpoint | None) -> None:
        """Continue the run of a checkpoint, or start a new one."""
        if checkpoint is not None:
            self._open_folder(checkpoint.run_folder)
            self._continue_from(checkpoint)
            Checkpoints(checkpoint.run_folder).discard_after(self.round)
        else:
            self._open_folder(new_run_folder(self.run_dir) if self.run_dir else None)
        self.loggers = self._make_loggers()

    def _open_folder(self, folder: Path | None) -> None:
        """Where this run writes; without a folder, private states that exceed their memory go to a temporary one."""
        self.folder = folder
        self.checkpoints = Checkpoints(folder) if folder else None
        store_folder = self.checkpoints.clients_folder if self.checkpoints else self._scratch_folder()
        self.store = ClientStore(store_folder, self.store_limit)
        self.worker = Worker(self.model, self.data, self.store, self.new_trainer, self.seed)

    def _scratch_folder(self) -> Path:
        """A folder that goes when this object does: the private states can be asked for until then."""
        path = tempfile.mkdtemp(prefix="lightning_fed_")
        weakref.finalize(self, shutil.rmtree, path, ignore_errors=True)
        return Path(path)

    def _find_checkpoint(self, ckpt_path: Path | str | None) -> Checkpoint | None:
        path = Path(ckpt_path) if ckpt_path else None
        if ckpt_path == "last":
            path = newest_run(self.run_dir) if self.run_dir else None
        if path is None:
            return None
        checkpoint, passed_over = load_checkpoint(path)
        for problem in passed_over:
            print(f"{problem}. Continuing from round {checkpoint.manifest.round}.")
        return checkpoint

    def _continue_from(self, checkpoint: Checkpoint) -> None:
        """Bring server, store and history to where the checkpoint is."""
        manifest = checkpoint.manifest
        for key, mine in self.identity.items():
            if manifest.identity.get(key) != mine:
                raise FederationError(
                    f"Checkpoint {checkpoint.path} was made with {key} = {manifest.identity.get(key)!r}, this run has {mine!r}: "
                    "continue with the configuration of that run, or start a new run without --ckpt_path."
                )
        check_fits(checkpoint.server, self.server.state_dict(), f"The server state of checkpoint {checkpoint.path}")
        self.server.load_state_dict(checkpoint.server)
        self.store.restore(manifest.clients)
        self.round, self.history = manifest.round, manifest.history
        self._open_round()

    def _make_loggers(self) -> list[Logger]:
        if isinstance(self.logger, Logger):
            return [self.logger]
        if not self.logger or self.folder is None:
            return []
        # purge_step hides what a killed run had logged of rounds that are now played again.
        return [TensorBoardLogger(self.folder, name="", version="", default_hp_metric=False, purge_step=self.round + 1)]


def in_client_order(updates: Iterable[ClientUpdate], clients: Iterable[int]) -> Iterator[ClientUpdate]:
    """Pass updates on in the order of ``clients``, holding back those that arrive too early."""
    early: dict[int, ClientUpdate] = {}
    arriving = iter(updates)
    for client in clients:
        while client not in early:
            update = next(arriving, None)
            if update is None:
                raise FederationError(f"The engine returned no update of client {client}: its turn was lost.")
            early[update.client] = update
        yield early.pop(client)
