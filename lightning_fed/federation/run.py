"""One live run: the rounds, who takes part, what they learn, how it is merged, measured and kept."""

import shutil
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_fed.core.aggregation import check_form
from lightning_fed.core.diverged import remedy
from lightning_fed.core.messages import Broadcast, ClientUpdate, Turn
from lightning_fed.core.module import FederatedModule
from lightning_fed.core.server import Server, ServerVerb
from lightning_fed.data import FederatedDataModule
from lightning_fed.data.client_info import SERVER, ClientInfo
from lightning_fed.engines import Engine, InProcess
from lightning_fed.engines.order import Check, carried_out
from lightning_fed.engines.preflight.shape_mismatch import refuse_unknown_tokens
from lightning_fed.engines.preflight.single_examples import refuse_lone_examples
from lightning_fed.engines.recipe import Recipe
from lightning_fed.engines.turn_loop import TrainerFactory
from lightning_fed.errors import FederationError
from lightning_fed.federation.evaluation import Evaluation
from lightning_fed.federation.meters import BestRound, Stopwatch, Target, TrafficMeter, running_totals, spread_all, training_means
from lightning_fed.seeding import COHORT, INITIAL, SERVER_ROUND, seeded
from lightning_fed.storage.checkpoint import Checkpoint, Checkpoints, Keep
from lightning_fed.storage.client_store import ClientStore, ScratchStore
from lightning_fed.storage.continuing import check_goes_on
from lightning_fed.storage.disk import in_one_line, naming
from lightning_fed.storage.manifest import Metrics, Setting
from lightning_fed.storage.settings import settings_of
from lightning_fed.tensors import check_finite


class Run:
    """Method, data, server and engine brought together, from before the first round, or from a checkpoint, on.

    What callbacks look at: ``round``, ``history`` (a dict of metrics per round), ``results`` (the last measured metrics by client),
    ``clients``, ``data``, ``model``, ``server``, ``folder`` (the run's folder, or None) and ``loggers``.

    Args:
        model: the method. If its networks exist already (pretrained, say), the server starts from their shared part.
        data: the clients' data.
        engine: where turns run.
        new_trainer: builds the Trainer of a turn.
        rounds: how many rounds there are.
        participation: share of the clients that take part in a round.
        participants: ids of those among whom they are drawn; None: all.
        seed: of everything random.
        evaluate_every: measure every that many rounds, and after the last one; 0: after the last one only; None: every so many
            rounds as it takes a cohort to become everybody.
        target: see :class:`lightning_fed.Federation`.
        checkpoint_every: write a checkpoint every that many rounds, after the last one, and where a round is the best so far on
            validation data; 0: never.
        keep: see :class:`lightning_fed.Federation`.
        store_limit: bytes of memory for the clients' private states; as many for what the server keeps for each client, and for
            what it has of them within a round.
        folder: gives the run's folder, and makes it if need be; None keeps nothing. It is asked when all that can be refused before
            the first round has been: a run that is refused leaves nothing.
        scratch: makes the folder for clients' states that exceed their memory; asked if there is no folder of the run, or if it is
            only read.
        logger: see :class:`lightning_fed.Federation`.
        callbacks: what happens around the rounds: objects with the hooks of
            :class:`lightning_fed.callbacks.FederationCallback`.
        checkpoint: where to go on from.
        reading: whether the run is only looked at, and nothing is written to its folder, where another process may play it.
    """

    def __init__(
        self,
        model: FederatedModule,
        data: FederatedDataModule,
        engine: Engine,
        new_trainer: TrainerFactory,
        *,
        rounds: int,
        participation: float,
        participants: Collection[int] | None,
        seed: int,
        evaluate_every: int | None,
        target: float | None,
        checkpoint_every: int,
        keep: Keep,
        store_limit: int,
        folder: Callable[[], Path | None],
        scratch: Callable[[], Path],
        logger: Logger | Iterable[Logger | bool] | bool,
        callbacks: Sequence[Any],
        checkpoint: Checkpoint | None = None,
        reading: bool = False,
    ) -> None:
        self.model, self.data = model, data
        self.engine: Engine = engine
        self.rounds, self.participation, self.seed, self.checkpoint_every = rounds, participation, seed, checkpoint_every
        self.keep: Keep = keep
        self.clients = list(engine.clients(data))
        among = self._find_participants(participants)
        self.clients = [replace(client, takes_part=client.id in among) for client in self.clients]
        self.participants = [client for client in self.clients if client.takes_part]
        if model.needs_public_data:
            data.public_set()  # which says what to do if there is none
        self.cohort_size = 1 if model.centralised else max(1, round(participation * len(self.participants)))
        cohorts = 1 if model.centralised else -(-len(self.participants) // self.cohort_size)
        self.evaluate_every = cohorts if evaluate_every is None else evaluate_every
        recipe = Recipe(model, data, new_trainer, seed)
        recipe.build()
        self._recipe = replace(recipe, initial=model.initial_copies())
        with seeded(seed, INITIAL):
            self.server = model.configure_server(self.clients)
        trained_on = [data.pooled().info] if model.centralised else self.clients
        if data.at_hand:
            refuse_unknown_tokens(model, data.pooled())
            refuse_lone_examples(model, data, trained_on, seed)
        self.method, self.metric = type(model).__name__, model.headline_metric
        self.identity = {"method": self.method, "seed": seed, "clients": len(self.clients), "data": data.fingerprint()}
        self.threads = torch.get_num_threads()
        self.folder = folder()
        self.checkpoints = Checkpoints(self.folder, checkpoint) if self.folder else None
        states = self.checkpoints.clients_folder if self.checkpoints and not reading else scratch()
        self._written = (self.folder or states, states)
        self.store = ClientStore(states, store_limit)
        self.kept = ClientStore(states, store_limit, "server")
        self._scratch = ScratchStore((states if reading else self.folder or states) / "scratch", store_limit, "server")
        self._scratch.clear()
        self.server.keep_in(self.kept, self._scratch)
        self.round = 0
        self.completed = 0  # rounds of this process that are reported, and checkpointed where that is due
        self.history: list[Metrics] = []
        self.since: dict[int, int] = {}
        self._merged: dict[int, int] = {}  # entries of since that are in no checkpoint yet
        self._stopwatch, self._traffic = Stopwatch(), TrafficMeter()
        self._best, self.target = BestRound(self.headline, self.metric, model.more_is_better), target
        self._target = Target(self.headline("test"), target, model.more_is_better) if target is not None else None
        self._callbacks, self._continued = callbacks, checkpoint
        if checkpoint is not None:
            self._continue_from(checkpoint)
        self.local = self._recipe.worker()  # for models that are asked for; turns are the engine's
        self._evaluation = Evaluation(
            model, self.server, data, self.clients, self.participants, self.local, carry_out=self._carried_out
        )
        self.loggers = self._make_loggers(logger)
        engine.open(self._recipe, self.store)

    def close(self) -> None:
        """End the run on its engine. What it found can still be looked at; what that takes is computed in this process."""
        self.engine.close()
        self._scratch.clear()
        self.engine = InProcess()
        self.engine.open(self._recipe, self.store)

    # ------------------------------------------------------------------------------------------------------------ the rounds

    def play(self) -> None:
        """All rounds that are left."""
        with in_one_line(self._kept_for_later, *self._written):
            if self.checkpoints and self._continued:
                self.checkpoints.go_on_from(self._continued)
            try:
                self._call("on_fit_start")
                while self.round < self.rounds:
                    self.round += 1
                    self.history.append(self._play_round())
                    self._report()
                    self._save_checkpoint()
                    self.completed += 1
                self._call("on_fit_end")
                if self.checkpoints:
                    self.checkpoints.finish(self.keep, (self.store, self.kept))
                    if self.keep == "none":  # what is on disk only can be asked for until then
                        weakref.finalize(self, shutil.rmtree, self.checkpoints.clients_folder, ignore_errors=True)
            finally:
                self._call("teardown")
                for logger in self.loggers:
                    logger.finalize("success" if self.round == self.rounds else "failed")

    def _kept_for_later(self) -> str:
        """What there is of a run whose disk refused something."""
        try:
            newest = Checkpoints(self.folder).latest()[0] if self.folder else None
        except FederationError:
            newest = None
        if newest is None:
            return "No checkpoint of the run is there: make room, or set federation.run_dir, and start it again."
        return f"The checkpoint {newest.path} is complete: when the disk can be written to, continue with --ckpt_path last."

    def rehearse(self) -> None:
        """Take one step of the first turn, of which nothing is kept: with a client's module, its optimizers, its data and its
        Trainer, it meets all that can be wrong with them.
        """
        self.round = 1
        client, *_ = self._open_round()
        worker = replace(self._recipe, new_trainer=partial(self._recipe.new_trainer, max_steps=1)).worker()
        worker.take(Turn("fit", client, self.round, self.server.broadcast(client)), None)

    def _play_round(self) -> Metrics:
        """Broadcast, turns, updates, aggregate, measure; returns the round's metrics."""
        cohort = self._open_round()
        measure = self._is_due(self.evaluate_every)
        updates: list[ClientUpdate] = []  # without payloads
        with self._stopwatch("aggregate"):
            merging = self.server.aggregate(self._received(cohort, measure, updates))
        if type(self.server).learn is not Server.learn:
            with self._stopwatch("server"):
                merging |= self.server.learn(self._of_models)
        check_finite(self.server.state_dict(), f"The server's state after round {self.round}", remedy(self.model))
        arrived = dict.fromkeys((update.client for update in updates), self.round)
        self._merged |= arrived
        self.since |= arrived
        if type(self.server).lesson is not Server.lesson:
            updates = self._taught([client for client in cohort if client.id in arrived], updates)
        row = {"round": float(self.round), **training_means(updates), **merging, **self._traffic.collect()}
        row["compute/flops"] = sum(update.metrics["flops"] for update in updates)
        if lost := len(cohort) - len(updates):
            row["round/lost"] = float(lost)
        if measure:
            row |= spread_all("before", [update.metrics for update in updates])
            row |= self._evaluate()
        row |= running_totals(self.history[-1] if self.history else {}, row)
        row |= self._noted(row)
        return row | self._stopwatch.collect()

    def _received(self, cohort: Collection[ClientInfo], measure: bool, noted: list[ClientUpdate]) -> Iterator[ClientUpdate]:
        """The cohort's updates in client order, each checked, counted, noted without its payload, and passed on."""
        for _, update in self._stopwatch.each("fit", self._carried_out(self._turns(cohort, measure), self._check)):
            self._traffic.up(update)
            noted.append(ClientUpdate(update.client, update.num_examples, {}, update.metrics))
            self._call("on_turn_end", update)
            yield update

    def _taught(self, clients: Iterable[ClientInfo], updates: Iterable[ClientUpdate]) -> list[ClientUpdate]:
        """Give the lessons of a round to those who took part; returns their updates with what that took."""

        def turns() -> Iterator[Turn]:
            for client in clients:
                if (lesson := self.server.lesson(client)) is not None:
                    self._traffic.down(client.id, lesson)
                    yield Turn("learn", client, self.round, lesson, since=self.round)

        learned = {update.client: update.metrics for update in updates}
        for _, update in self._stopwatch.each("fit", self._carried_out(turns())):
            check_form(update, "flops")
            trained = learned[update.client]
            learned[update.client] = trained | update.metrics | {"flops": trained["flops"] + update.metrics["flops"]}
        return [replace(update, metrics=learned[update.client]) for update in updates]

    def _turns(self, cohort: Iterable[ClientInfo], measure: bool) -> Iterator[Turn]:
        for client in cohort:
            broadcast = self.server.broadcast(client)
            self._traffic.down(client.id, broadcast)
            yield Turn("fit", client, self.round, broadcast, measure, self.since.get(client.id, 0))

    def _carried_out(self, turns: Iterable[Turn], check: Check | None = None) -> Iterator[tuple[Turn, ClientUpdate]]:
        return carried_out(self.engine, turns, check)

    def _check(self, turn: Turn, update: ClientUpdate) -> None:
        self.server.check(update, turn.broadcast, turn.client)

    def _find_participants(self, ids: Collection[int] | None) -> Collection[int]:
        """Ids of the clients that may take part; None: all."""
        if ids is None:
            return range(len(self.clients))
        if self.model.centralised:
            raise FederationError(f"participants is given, but {type(self.model).__name__} trains on everybody's data.")
        if not ids or not set(ids) <= set(range(len(self.clients))):
            raise FederationError(f"participants is {list(ids)}: give some of the clients' ids, 0 to {len(self.clients) - 1}.")
        return set(ids)

    def _of_models(self, verb: ServerVerb, models: Iterable[Broadcast]) -> Iterator[ClientUpdate]:
        """What comes of the server's own turns; see :meth:`.Server.learn`."""
        info = self.data.pooled().info if verb == "evaluate" else self.data.public_set().info
        due: deque[Turn] = deque()

        def turns() -> Iterator[Turn]:
            for model in models:
                due.append(Turn(verb, info, self.round, model))
                yield due[-1]

        lost = FederationError(f"The server's own turns of round {self.round} were lost: without them it learns nothing.")
        for turn, update in self._carried_out(turns()):
            if turn is not due.popleft():
                raise lost
            check_form(update)
            yield update
        if due:
            raise lost

    def _open_round(self) -> list[ClientInfo]:
        """Who takes part, in client order: a function of (seed, round). The server prepares for them."""
        stream = np.random.default_rng([self.seed, COHORT, self.round])
        drawn = stream.choice(len(self.participants), self.cohort_size, replace=False)
        cohort = [self.participants[k] for k in sorted(drawn)]
        if self.model.centralised:
            cohort = [self.data.pooled().info]
        with seeded(self.seed, SERVER_ROUND, self.round):
            self.server.open_round(self.round, cohort)
        return cohort

    # ------------------------------------------------------------------------------------------------------------- measuring

    def measure(self, kind: str) -> Metrics:
        """Measure all clients as they are, on ``"val"`` or ``"test"`` data."""
        metrics = {name: value for name, value in self._evaluate().items() if f"/{kind}_" in name}
        self._call("on_measure_end", metrics)
        return metrics

    def headline(self, kind: str) -> str:
        """The column that progress, model selection and targets use, on ``"val"`` or ``"test"`` data."""
        of_global = self.model.headline_model == "global" and self.data.at_hand
        return f"global/{kind}_{self.metric}" if of_global else f"after/{kind}_{self.metric}/mean"

    @property
    def results(self) -> dict[int, Metrics]:
        """The last measured metrics by client."""
        return self._evaluation.results

    def _evaluate(self) -> Metrics:
        with self._stopwatch("evaluate"):
            return self._evaluation.measure(self.round, self.since, self.round == self.rounds)

    def _gather(self) -> None:
        self._evaluation.gather(self.round, self.since)

    def _noted(self, row: Metrics) -> Metrics:
        """What is kept of the best round and of the target."""
        selected = self._best.update(row)
        reached = self._target.update(row) if self._target else {}
        return (selected if self.headline("val") in row else {}) | reached

    def _is_due(self, every: int) -> bool:
        return self.round == self.rounds or (every > 0 and self.round % every == 0)

    # ------------------------------------------------------------------------------------------------- models, for elsewhere

    def client_module(self, client: int) -> FederatedModule:
        """A client's model as it is now, with the server's broadcast loaded, and adapted if it is measured so."""
        if not 0 <= client < len(self.clients):
            raise FederationError(f"There is no client {client}: ids go from 0 to {len(self.clients) - 1}.")
        if not self.data.at_hand:
            raise FederationError(f"Client {client}'s model is at its site, which has its private state: ask for it there.")
        self._gather()
        info = self.clients[client]
        module = self.local.module_of(info, self.server.measured(info), self.store.find(client))
        with isolate_rng():
            self.local.adapt(module, client, self.round)
        return module

    def server_module(self) -> FederatedModule:
        """The shared part, as the server has it: the global model where there is one. The rest is as it was drawn."""
        self._gather()
        broadcast = self.server.models().get("global", Broadcast(self.server.state))
        if broadcast.capacity is not None:  # a version of the model that the template is not
            everybody = self.data.pooled().info if self.data.at_hand else replace(self.clients[0], id=SERVER)
            private = self.store.find(SERVER) if self.data.at_hand else None
            return self.local.module_of(everybody, broadcast, private)
        self.model.load_broadcast(broadcast)
        return self.model

    # -------------------------------------------------------------------------------------------------- reports, checkpoints

    def _call(self, hook: str, *args: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, hook)(self, *args)

    def _report(self) -> None:
        with self._stopwatch("report"), naming(self._written[0]):
            if self.folder:
                self.folder.stat()  # if it is gone, it is said here: TensorBoard's thread would print a traceback
            for logger in self.loggers:
                logger.log_metrics({name: value for name, value in self.history[-1].items() if name != "round"}, step=self.round)
            self._call("on_round_end")

    def _save_checkpoint(self) -> None:
        """Where one is due, and where the round is the best so far: it is not there any more when one is due."""
        best = self._best.best
        is_best = best is not None and best.round == self.round
        if self.checkpoints and self.checkpoint_every and (self._is_due(self.checkpoint_every) or is_best):
            with self._stopwatch("checkpoint"):
                self.checkpoints.save(
                    self.round,
                    self.identity,
                    self.threads,
                    self.history,
                    self.server.state_dict(),
                    self.store,
                    self._merged,
                    best,
                    self.kept,
                    self.settings,
                    self.target,
                    self._target.reached if self._target else {},
                )
            self._merged = {}

    def _continue_from(self, checkpoint: Checkpoint) -> None:
        """Bring server, store and history to where the checkpoint is."""
        persistent = [phase.name for phase in self.model.phases() if phase.persistent]
        check_goes_on(checkpoint, self.identity, self.threads, self.settings, self.server.state_dict(), persistent)
        self.server.load_state_dict(checkpoint.server)
        for store, records in ((self.store, checkpoint.clients), (self.kept, checkpoint.kept)):
            store.restore(records, Checkpoints(checkpoint.run_folder).clients_folder)
        manifest = checkpoint.manifest
        self.round, self.history, self.since = manifest.round, checkpoint.history, checkpoint.since
        self._best.best = manifest.best
        if self._target and manifest.target == self.target:
            self._target.reached = manifest.reached
        elif self._target:  # another one, of which the checkpoint does not know
            for row in self.history:
                try:
                    self._target.update(row)
                except KeyError as missing:
                    raise FederationError(
                        f"Checkpoint {checkpoint.path} cannot be used: its history lacks {missing} in round {int(row['round'])}, "
                        f"which {self.method} reports."
                    ) from missing
        self._open_round()

    @cached_property
    def settings(self) -> dict[str, Setting]:
        """What checkpoints say of how the run was made."""
        return settings_of(self.model, self.data, self.participation)

    def _make_loggers(self, given: Logger | Iterable[Logger | bool] | bool) -> list[Logger]:
        wanted = [given] if isinstance(given, Logger | bool) else given
        return [logger for one in wanted if one for logger in ([one] if isinstance(one, Logger) else self._tensorboard())]

    def _tensorboard(self) -> list[Logger]:
        """What True stands for."""
        if self.folder is None:
            return []
        # purge_step hides what a killed run had logged of rounds that are now played again.
        return [TensorBoardLogger(self.folder, name="", version="", default_hp_metric=False, purge_step=self.round + 1)]
