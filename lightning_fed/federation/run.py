"""A run: its rounds, participants, aggregation, evaluation and checkpoints."""

import logging
import shutil
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.loggers import Logger, TensorBoardLogger

from lightning_fed.core.client_modules import one_per_architecture
from lightning_fed.core.hparams import remedy
from lightning_fed.core.messages import ClientUpdate, Turn
from lightning_fed.core.module import FederatedModule
from lightning_fed.core.public_distillation import PublicDistillation
from lightning_fed.core.server import PRIVACY, Server
from lightning_fed.data import ClientDataModule, FederatedDataModule
from lightning_fed.data.client_info import SERVER, ClientInfo
from lightning_fed.engines import Engine, InProcess
from lightning_fed.engines.preflight.generated_answers import check_generation, refuse_long_prompts
from lightning_fed.engines.preflight.mixed_tokens import refuse_mixed_tokens
from lightning_fed.engines.preflight.shape_mismatch import refuse_unknown_tokens
from lightning_fed.engines.preflight.single_examples import refuse_single_examples
from lightning_fed.engines.preflight.wrong_targets import refuse_wrong_targets
from lightning_fed.engines.silence import torch_threads
from lightning_fed.engines.turn_loop import TrainerFactory
from lightning_fed.engines.worker_spec import WorkerSpec
from lightning_fed.errors import FederationError
from lightning_fed.federation.cohorts import Participants, dropouts
from lightning_fed.federation.evaluation import Evaluation
from lightning_fed.federation.example_privacy import protect_examples, refuse_what_tells_of_examples
from lightning_fed.federation.meters import BestRound, Stopwatch, Target, running_totals, spread_all, training_means
from lightning_fed.federation.protection import aggregate_robustly, check_attack, protect, refuse_at_sites
from lightning_fed.federation.settings import RunSettings
from lightning_fed.federation.turns import RoundTurns
from lightning_fed.privacy import ExampleDP
from lightning_fed.seeding import ATTACK, COHORT, INITIAL, SERVER_ROUND, isolated, seeded
from lightning_fed.storage.checkpoint import Checkpoint, Checkpoints
from lightning_fed.storage.client_store import ClientStore, RoundStore
from lightning_fed.storage.continuing import check_goes_on, settings_of
from lightning_fed.storage.manifest import Manifest, Metrics, Setting
from lightning_fed.system.disk import in_one_line, naming
from lightning_fed.system.signals import Preempted
from lightning_fed.tensors import State, check_finite

log = logging.getLogger(__name__)


class Run:
    """Brings together a method, data, server and engine, from before the first round or from a checkpoint.

    Callbacks may use ``round``, ``history`` (a dict of metrics per round), ``results`` (each client's last evaluation metrics),
    ``clients``, ``data``, ``model``, ``server``, ``folder`` (the run's folder, or None) and ``loggers``.

    Args:
        model: the method. If its networks are built (pretrained, for example), the server starts from their shared part.
        data: the clients' data.
        engine: runs the turns.
        new_trainer: builds the Trainer of a turn.
        settings: the federation's settings.
        folder: returns the run's folder, creating it if necessary; None: nothing is written. It is called after all checks before
            the first round, so that a run that is refused leaves nothing behind.
        temporary_folder: creates the folder for client states that exceed the memory limit; called if the run has no folder or is
            opened for reading.
        checkpoint: checkpoint to resume from.
        reading: whether the run is opened for reading: nothing is written to its folder, where another process may be running it.
    """

    def __init__(
        self,
        model: FederatedModule,
        data: FederatedDataModule,
        engine: Engine,
        new_trainer: TrainerFactory,
        settings: RunSettings,
        *,
        folder: Callable[[], Path | None],
        temporary_folder: Callable[["Run"], Path],
        checkpoint: Checkpoint | None = None,
        reading: bool = False,
    ) -> None:
        self.model, self.data = model, data
        self.engine: Engine = engine
        self.settings, self.rounds, self.seed, self.target = settings, settings.rounds, settings.seed, settings.target
        if not data.at_hand:
            refuse_at_sites(settings)
        if data.continue_epochs and type(model).evaluation_phases is not FederatedModule.evaluation_phases:
            raise FederationError(
                f"continue_epochs is set, but {type(model).__name__}'s turns differ in length, from which the next one's start is "
                "counted: leave continue_epochs out."
            )
        data.flip_labels(())  # an earlier run may have had attackers
        self._participants = who = Participants(model, data, list(engine.clients(data)), settings)
        self.clients, self.eligible_clients, self.unseen, self.attackers = who.clients, who.eligible, who.unseen, who.attackers
        self.cohort_size = who.cohort_size
        self.evaluate_every = who.rounds_for_everybody if settings.evaluate_every is None else settings.evaluate_every
        if settings.patience is not None and not any(client.num_val for client in self.clients):
            raise FederationError(
                f"patience is {settings.patience}, but no client has validation data, which it needs: set the data's val_share."
            )
        if isinstance(model, PublicDistillation):
            data.public_set()  # raises an error with instructions if there is none
        spec = WorkerSpec(model, data, new_trainer, self.seed, compression=settings.compression)
        with torch_threads(engine.threads or 1):  # weights must not depend on the number of cores
            self._trainer_settings = spec.build()
        settings.compression.check(model)
        others = () if reading else one_per_architecture(model, self.clients)  # all are built before the first round
        for each in chain((model,), (other for _, other in others)):
            each.fine_tuning_phases()  # raises an error if there is nothing of the part that is to be tuned
            if isinstance(settings.privacy, ExampleDP):
                refuse_what_tells_of_examples(each, data)
            if data.at_hand:
                refuse_unknown_tokens(each, data.pooled())
                if not reading:
                    refuse_mixed_tokens(each, data)
        self.threads = engine.threads_for(model, data.batch_size)
        torch.set_num_threads(self.threads)
        self._spec = replace(spec, initial=model.initial_originals())
        with seeded(self.seed, INITIAL):
            self.server = model.new_server(self.clients)
        if settings.attack is not None:
            check_attack(self.server, model, settings.attack)
        if settings.aggregation is not None:
            aggregate_robustly(self.server, model, settings.aggregation, self.cohort_size)
        if data.at_hand:
            check_generation(model, data)
            if not reading:
                refuse_wrong_targets(model, data.pooled())
                refuse_long_prompts(model, self._measured(), self._trainer_settings["trainer.limit_val_batches"] != 0)
            refuse_single_examples(model, data, who.trained_on, self.seed)
        self.method, self.metric = type(model).__name__, model.monitor
        self.identity = {"method": self.method, "seed": self.seed, "clients": len(self.clients), "data": data.fingerprint()}
        continued = checkpoint.manifest.identity if checkpoint else None
        self._noise = None
        if isinstance(settings.privacy, ExampleDP):
            self.server.privacy = protect_examples(model, data, who.trained_on, settings, self.identity, continued)
            self._spec = replace(self._spec, examples=self.server.privacy.training)
        else:
            self._noise = protect(self.server, model, settings, who, self.identity, self.made_with, continued, reading)
        self.folder = folder()
        self.checkpoints = Checkpoints(self.folder, checkpoint) if self.folder else None
        states = self.checkpoints.clients_folder if self.checkpoints and not reading else temporary_folder(self)
        self._written = (self.folder or states, states)
        self.store = ClientStore(states, settings.store_limit)
        self.client_state = ClientStore(states, settings.store_limit, "server")
        self._scratch = RoundStore(states / "scratch", settings.store_limit, "server")
        self._scratch.clear()
        self.server.attach_storage(self.client_state, self._scratch)
        self.round = 0
        self.completed = 0  # rounds of this process that are reported and, where due, in a checkpoint
        self.history: list[Metrics] = []
        self._stopwatch = Stopwatch()
        self._turns = RoundTurns(engine, self.server, data, self._stopwatch, settings, model, self.clients)
        self.last_rounds, self.merged_turns = self._turns.last_rounds, self._turns.merged_turns
        self._changed: set[int] = set()  # clients whose entries of these two changed after the last checkpoint
        self._best = BestRound(self.monitored, self.metric, model.higher_is_better)
        self._target = Target(self.monitored("test"), self.target, model.higher_is_better) if self.target is not None else None
        self._continued = checkpoint
        if checkpoint is not None:
            self._continue_from(checkpoint)
        self.local = self._spec.worker()  # for models on request; the engine runs the turns
        self._evaluation = Evaluation(self.server, self._honest, self.unseen, self.local, self._turns)
        self.loggers = self._make_loggers(settings.logger)
        engine.open(self._spec, self.store)

    def close(self) -> None:
        """Close the engine. Results and models stay available; they are computed in this process."""
        self.engine.close()
        self.model.cpu()  # frozen tensors stay on a GPU between turns
        self._scratch.clear()
        self.engine = self._turns.engine = InProcess()
        self.engine.open(self._spec, self.store)

    # ------------------------------------------------------------------------------------------------------------ the rounds

    def play(self, preempted: Callable[[], bool] = lambda: False) -> None:
        """Run all remaining rounds.

        Args:
            preempted: whether the process was asked to stop; the run then stops at its next checkpoint.

        Raises:
            Preempted: if it stopped before the last round.
        """
        with in_one_line(self._kept_for_later, *self._written):
            if self.checkpoints and self._continued:
                self.checkpoints.go_on_from(self._continued)
            self.model.check_rounds(self.rounds)
            try:
                self._call("on_fit_start")
                while self.round < self.rounds:
                    self.round += 1
                    self.history.append(self._play_round())
                    self._report()
                    saved = self._save_checkpoint()
                    self.completed += 1
                    if saved and preempted() and self.round < self.rounds:
                        raise Preempted
                if not self.data.at_hand:
                    self._refresh_statistics()  # of a run that had ended before; the sites cannot be asked later
                self._call("on_fit_end")
                if self.checkpoints:
                    self.checkpoints.finish(self.settings.keep, (self.store, self.client_state))
            finally:
                if self.checkpoints and self.checkpoints.is_empty:  # states on disk are available until the run is collected
                    weakref.finalize(self, shutil.rmtree, self.store.folder, ignore_errors=True)
                self._call("teardown")
                with naming(self._written[0]):
                    for logger in self.loggers:
                        logger.finalize("success" if self.round == self.rounds else "failed")

    def _kept_for_later(self) -> str:
        """What is left of a run whose disk failed, and how to continue, as a sentence."""
        try:
            newest = Checkpoints(self.folder).latest()[0] if self.folder else None
        except FederationError:
            newest = None
        if newest is None:
            return "The run has no checkpoint: free disk space, or set federation.run_dir, and start it again."
        return f"The checkpoint {newest.path} is complete: when the disk can be written to, continue with --ckpt_path last."

    def dry_run(self) -> None:
        """Run one step of the first turn and discard it: it uses a client's module, optimizers, data and Trainer, so that errors in
        any of them show up.
        """
        self.round = 1
        client, *_ = self._draw_cohort() or self.eligible_clients
        worker = self._spec.worker()
        worker.trainers.max_steps = 1
        worker.run_turn(Turn("fit", client, self.round, self.server.broadcast(client)), None)

    def _play_round(self) -> Metrics:
        """Run a round; returns its metrics."""
        cohort, due = self._draw_cohort(), self._is_due(self.evaluate_every)
        with self._stopwatch("aggregate"):
            metrics = self.server.aggregate(self._train(cohort, due))
        metrics |= self._train_on_server()
        arrived = self._note_arrivals()
        if type(self.server).public_training is not Server.public_training:
            self._turns.train_on_public(self.round, [client for client in cohort if client.id in arrived])
        row = self._with_costs(metrics, len(cohort))
        if due or self._has_spent_budget(row):
            row |= spread_all("before", [update.metrics for update in self._honest_updates])
            row |= self._evaluate() | self.server.privacy.spent()
        row |= self._compare(row)
        if self._end_early(row) and self.model.fine_tuning.when == "last":
            row |= self._evaluate()  # only now it is known that this is the last round
            row |= running_totals(self.history[-1] if self.history else {}, row)
        return row | self._stopwatch.collect()

    def _end_early(self, row: Metrics) -> bool:
        """Make this the last round if the settings say so; returns whether it is."""
        patience, best = self.settings.patience, self._best.best
        waited = patience is not None and best is not None and self.monitored("val") in row and self.round - best.round >= patience
        reached = self.settings.stop_at_target and self._target is not None and bool(self._target.reached)
        if early := self.round < self.rounds and (waited or reached or self._has_spent_budget(row)):
            self.rounds = self.round
        return early

    @property
    def _honest_updates(self) -> list[ClientUpdate]:
        """The round's updates without those of attackers, without their payload."""
        return [update for update in self._turns.updates if update.client not in self.attackers]

    def _has_spent_budget(self, row: Metrics) -> bool:
        """Whether another round with the same traffic would exceed the budget."""
        if self.settings.budget is None:
            return False
        totals = row if "traffic/total_bytes" in row else running_totals(self.history[-1] if self.history else {}, row)
        another = totals["traffic/total_bytes"] + row["traffic/down_bytes"] + row["traffic/up_bytes"]
        return another > self.settings.budget * 2**20

    @property
    def _honest(self) -> list[ClientInfo]:
        """The clients that are measured: those that are no attackers."""
        return [client for client in self.clients if client.id not in self.attackers]

    def _measured(self) -> Iterator[ClientDataModule]:
        """The data that models are measured on: each client's, and those of all for the server's models."""
        yield from (self.data.client(client.id) for client in self._honest)
        if self.server.global_models():
            yield self.data.pooled()

    def _draw_cohort(self) -> list[ClientInfo]:
        """The participants in client order, a function of (seed, round). Also starts the server's round."""
        keys = [self.seed, COHORT, self.round] if self._noise is None else self._noise.cohort_stream(self.round)
        cohort = self._participants.draw(self.round, keys)
        with seeded(self.seed, SERVER_ROUND, self.round):
            self.server.on_round_start(self.round, cohort)
        return cohort

    def _train(self, cohort: Collection[ClientInfo], measure: bool) -> Iterator[ClientUpdate]:
        """Yields the cohort's updates as they are merged."""
        away = dropouts(list(cohort), self.settings.dropout, self.settings.quorum, self.seed, self.round)
        updates = self._turns.train(self.round, cohort, measure, away)
        if self.settings.attack is not None:
            stream = np.random.default_rng([self.seed, ATTACK, self.round])
            updates = self.settings.attack.sent(updates, self.attackers, self.server.state, stream)
        for update in updates:
            self._call("on_turn_end", update)
            yield update

    def _train_on_server(self) -> Metrics:
        """Train on the server, for methods that do; returns metrics."""
        metrics: Metrics = {}
        if type(self.server).train_on_public is not Server.train_on_public:
            with self._stopwatch("server"):
                metrics = self.server.train_on_public(self._turns.run_on_server(self.round))
        check_finite(self.server.state_dict(), f"The server's state after round {self.round}", remedy(self.model))
        return metrics

    def _note_arrivals(self) -> Collection[int]:
        """Record whose updates were merged in this round, and what that cost in privacy; returns their ids."""
        arrived = dict.fromkeys((update.client for update in self._turns.updates), self.round)
        self.last_rounds |= arrived
        self.merged_turns |= {client: self.merged_turns.get(client, 0) + 1 for client in arrived}
        self._changed |= arrived.keys()
        self.server.privacy.note(self.round, self._turns.updates)
        return arrived.keys()

    def _with_costs(self, metrics: Metrics, cohort_size: int) -> Metrics:
        """The honest participants' mean training metrics, the server's metrics, and the costs of the round."""
        updates = self._turns.updates
        row = {"round": float(self.round), **training_means(self._honest_updates), **metrics, **self._turns.traffic.collect()}
        row["compute/flops"] = sum(update.metrics["flops"] for update in updates)
        if self.settings.sampling == "poisson":
            row["round/clients"] = float(cohort_size)
        if lost := cohort_size - len(updates):
            row["round/failed_clients"] = float(lost)
        return row

    def _compare(self, row: Metrics) -> Metrics:
        """Total costs, the best round so far, and the costs of reaching the target."""
        totals = running_totals(self.history[-1] if self.history else {}, row)
        best = self._best.update(row)
        reached = self._target.update(row | totals) if self._target else {}
        return totals | (best if self.monitored("val") in row else {}) | reached

    # ------------------------------------------------------------------------------------------------------------- measuring

    def measure(self, kind: str) -> Metrics:
        """Evaluate all clients, without training, on ``"val"`` or ``"test"`` data."""
        metrics = {name: value for name, value in self._evaluate().items() if f"/{kind}_" in name}
        self._call("on_measure_end", metrics)
        return metrics

    def monitored(self, kind: str) -> str:
        """Column of the monitored metric, which progress, model selection and targets use, on ``"val"`` or ``"test"`` data."""
        of_global = self.model.monitor_model == "global" and self.data.at_hand
        return f"global/{kind}_{self.metric}" if of_global else f"after/{kind}_{self.metric}/mean"

    @property
    def results(self) -> dict[int, Metrics]:
        """Each client's last evaluation metrics."""
        return self._evaluation.results

    def _evaluate(self) -> Metrics:
        with self._stopwatch("evaluate"):
            return self._evaluation.evaluate(self.round, self.round == self.rounds)

    def _refresh_statistics(self) -> None:
        self._evaluation.refresh_statistics(self.round)

    def _is_due(self, every: int) -> bool:
        return self.round == self.rounds or (every > 0 and self.round % every == 0)

    # ------------------------------------------------------------------------------------------------- models, for elsewhere

    def client_module(self, client: int) -> FederatedModule:
        """A client's current model with the server's broadcast loaded, fine-tuned if it is evaluated fine-tuned."""
        if client not in range(len(self.clients)):
            raise FederationError(f"There is no client {client!r}: ids go from 0 to {len(self.clients) - 1}.")
        if not self.data.at_hand:
            raise FederationError(f"Client {client}'s model is at its site, which has its private state: ask for it there.")
        self._refresh_statistics()
        info = self.clients[client]
        module = self.local.module_of(info, self.server.evaluation_broadcast(info), self.store.find(client))
        with isolated():
            self.local.prepare(module, client, self.round)
        return module.cpu()

    def measure_across(self, client: int) -> dict[int, Metrics]:
        """Metrics of a client's model on the data of each client, by id, and on the pooled data (-1)."""
        module = self.client_module(client)
        tested = {other.id: self.data.client(other.id) for other in self.clients} | {SERVER: self.data.pooled()}
        with isolated():
            return {other: self.local.metrics_of(module, data) for other, data in tested.items()}

    def server_module(self) -> FederatedModule:
        """The server's shared part, which may be a global model. The rest has its initial weights."""
        self._refresh_statistics()
        broadcast = self.server.global_models().get("global", self.server.common_broadcast())
        if broadcast.model_size is not None:  # another size of the model than the template's
            everybody = self.data.pooled().info if self.data.at_hand else replace(self.clients[0], id=SERVER)
            private = self.store.find(SERVER) if self.data.at_hand else None
            return self.local.module_of(everybody, broadcast, private).cpu()
        module = self.local.clients.of_architecture(None)
        module.load_initial(self.local.initial or broadcast.state)
        module.load_broadcast(broadcast)
        return module.cpu()

    # -------------------------------------------------------------------------------------------------- reports, checkpoints

    def _call(self, hook: str, *args: Any) -> None:
        with naming(self._written[0]):
            for callback in self.settings.callbacks:
                getattr(callback, hook)(self, *args)

    def _report(self) -> None:
        with self._stopwatch("report"), naming(self._written[0]):
            if self.folder:
                self.folder.stat()  # if it is missing, fail here: TensorBoard's thread would print a traceback
            for callback in self.settings.callbacks:
                added = callback.round_metrics(self) or {}  # a hook without a return statement adds none
                self.history[-1] |= {name: float(value) for name, value in added.items()}
            row = {name: value for name, value in self.history[-1].items() if name != "round"}
            for logger in self.loggers:
                try:
                    logger.log_metrics(row, step=self.round)
                except ValueError as error:  # Lightning converts any error of TensorBoard, also a full disk
                    if isinstance(error.__cause__, OSError):
                        raise error.__cause__ from None
                    raise
            self._call("on_round_end")

    def _save_checkpoint(self) -> bool:
        """Save a checkpoint if one is due or the round is the best so far (its state is not kept otherwise); returns whether."""
        best = self._best.best
        is_best = best is not None and best.round == self.round
        every = self.settings.checkpoint_every
        is_written = self.checkpoints is not None and every > 0 and (self._is_due(every) or is_best)
        if self.checkpoints and is_written:
            with self._stopwatch("checkpoint"):
                manifest = Manifest(
                    self.round,
                    self.identity,
                    self.threads,
                    best=best,
                    target=self.target,
                    reached=self._target.reached if self._target else {},
                    settings=self.made_with,
                )
                server = self.server.state_dict() | self._ledger
                last_rounds, turns = (
                    {client: of[client] for client in self._changed} for of in (self.last_rounds, self.merged_turns)
                )
                self.checkpoints.save(manifest, self.history, server, self.store, last_rounds, self.client_state, turns)
            self._changed = set()
        return is_written

    def _continue_from(self, checkpoint: Checkpoint) -> None:
        """Restore server, client states and history from a checkpoint."""
        persistent = [phase.name for phase in self.model.phases() if phase.persistent]
        own = {name: tensor for name, tensor in checkpoint.server.items() if not name.startswith(PRIVACY)}
        ledger = {name.removeprefix(PRIVACY): t for name, t in checkpoint.server.items() if name.startswith(PRIVACY)}
        expected = self.server.expected_state(own) | self._ledger
        check_goes_on(checkpoint, self.identity, self.threads, self.made_with, expected, persistent)
        self.server.load_state_dict(own)
        self.server.privacy.load_state_dict(ledger)
        for store, records in ((self.store, checkpoint.clients), (self.client_state, checkpoint.client_state)):
            store.restore(records, Checkpoints(checkpoint.run_folder).clients_folder)
        manifest = checkpoint.manifest
        self.round, self.history = manifest.round, checkpoint.history
        self.last_rounds |= checkpoint.last_rounds
        self.merged_turns |= checkpoint.merged_turns
        if same_metric := manifest.settings.get("metric") == self.made_with.get("metric"):
            self._best.best = manifest.best
        else:
            for row in self.history:
                self._best.update(row)
        if self._target and same_metric and manifest.target == self.target:
            self._target.reached = manifest.reached
        elif self._target:  # another target or metric than the checkpoint's
            for row in self.history:
                for name in [name for name in row if name.startswith("target/")]:
                    del row[name]
                try:
                    row |= self._target.update(row)
                except KeyError as missing:
                    raise FederationError(
                        f"Checkpoint {checkpoint.path} cannot be used: its history lacks {missing} in round {int(row['round'])}, "
                        f"which {self.method} reports."
                    ) from missing
        if self.history:
            self._end_early(self.history[-1])
        self._draw_cohort()

    @property
    def _ledger(self) -> State:
        """What has been spent in privacy, as checkpoints name it, whatever the server keeps."""
        return {f"{PRIVACY}{name}": tensor for name, tensor in self.server.privacy.state_dict().items()}

    @cached_property
    def made_with(self) -> dict[str, Setting]:
        """The settings that checkpoints record."""
        return settings_of(
            self.model,
            self.data,
            participation=self.settings.participation,
            eligible_clients=sorted(self.settings.eligible_clients or ()) or None,
            sampling=self.settings.sampling,
            dropout=self.settings.dropout,
            quorum=self.settings.quorum,
            aggregation=repr(self.settings.aggregation),
            attack=repr(self.settings.attack),
            compression=asdict(self.settings.compression),
            **self._trainer_settings,
        )

    def _make_loggers(self, given: Logger | Iterable[Logger | bool] | bool) -> list[Logger]:
        wanted = [given] if isinstance(given, Logger | bool) else given
        return [logger for one in wanted if one for logger in ([one] if isinstance(one, Logger) else self._tensorboard())]

    def _tensorboard(self) -> list[Logger]:
        """The logger that ``True`` stands for."""
        if self.folder is None:
            return []
        # purge_step hides what an interrupted run logged for rounds that are repeated now.
        return [TensorBoardLogger(self.folder, name="", version="", default_hp_metric=False, purge_step=self.round + 1)]
