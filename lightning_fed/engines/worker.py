"""One client's turn: load its state, run its Lightning Trainer, harvest what it learned."""

import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import OutOfMemoryError, Tensor

from lightning_fed.core.diverged import remedy
from lightning_fed.core.flops import FlopMeter
from lightning_fed.core.messages import Broadcast, ClientUpdate, Outcome, Turn
from lightning_fed.core.module import OUTPUTS, FederatedModule
from lightning_fed.core.phased_module import Phase
from lightning_fed.data import ClientDataModule, FederatedDataModule
from lightning_fed.data.client_info import SERVER, ClientInfo
from lightning_fed.engines.on_public import BestOnValidation, OutputsPass
from lightning_fed.engines.preflight.shape_mismatch import misfit
from lightning_fed.engines.review import Review
from lightning_fed.engines.turn_loop import TrainerFactory, Trainers
from lightning_fed.errors import FederationError
from lightning_fed.nn.static_batch_norm import StatisticsPass
from lightning_fed.seeding import ADAPT, LESSON, PUBLIC, TURN, seed_all
from lightning_fed.tensors import State, check_finite


class Worker:
    """Takes the turns of many clients, one at a time, with one module per architecture in memory.

    A turn is a function of its inputs: every random draw comes from the stream of (seed, round, client). Turns leave the global
    random state changed; whoever runs them restores it, once.

    Args:
        template: the method, built; it is copied, never trained.
        data: the clients' data.
        new_trainer: builds the Trainers of turns; see :class:`.Trainers`.
        seed: the run's seed.
        initial: what new clients' private states begin with copies of; None: what the template has.
    """

    def __init__(
        self,
        template: FederatedModule,
        data: FederatedDataModule,
        new_trainer: TrainerFactory,
        seed: int,
        initial: State | None = None,
    ) -> None:
        self.template = template
        self.data = data
        self.trainers = Trainers(new_trainer)
        self.seed = seed
        self.initial = template.initial_copies() if initial is None else initial
        self.flops = FlopMeter()
        self._modules: dict[Hashable, FederatedModule] = {}
        self._activity = ""  # what a turn is at, besides training

    def take(self, turn: Turn, private: State | None) -> Outcome:
        """Carry out a turn. An evaluate turn gives an update without a payload.

        Args:
            turn: what to do.
            private: the client's private state, None if it has none yet.

        Raises:
            FederationError: for what the user can change, naming client, round and phase; any other exception has a note that does.
        """
        with self._named(turn):
            self._activity = ""
            module = self.load(turn.client, turn.broadcast, private)
            if turn.verb in ("predict", "learn"):
                return self._on_public(module, turn)
            learned = self._lesson(module, turn) if turn.verb == "fit" else {}
            data = self.data.pooled() if turn.client.id == SERVER else self.data.client(turn.client.id)
            costs = self.adapt(module, turn.client.id, turn.round) if turn.verb == "evaluate" and turn.adapt else {}
            data.order_seed = seed_all(self.seed, TURN, turn.round, turn.client.id)
            if turn.verb == "evaluate":
                metrics = self._evaluate(module, data) | module.inspect() | costs
                return Outcome(ClientUpdate(turn.client.id, turn.client.num_train, {}, metrics))
            if turn.verb == "gather":
                return Outcome(self._gather(module, data))
            update = self._fit(module, data, turn, learned)
            kept = self._kept(module)
            if turn.evaluate:
                if module.has_statistics:
                    self._gather(module, data)  # of this client's own data, for its own model
                update = replace(update, metrics=update.metrics | self._evaluate(module, data))
            return Outcome(update, kept)

    def module_of(self, client: ClientInfo, broadcast: Broadcast, private: State | None) -> FederatedModule:
        """A module of the client's own, which no later turn changes."""
        module = self.template.for_architecture(replace(client, capacity=broadcast.capacity), self.seed)
        self._load(module, broadcast, private)
        return module

    def adapt(self, module: FederatedModule, client: int, round: int) -> dict[str, float]:
        """Adapt a client's model to its training data before it is measured in a round, if the method is asked to; returns what
        that cost. The server's models are measured as they are.
        """
        phases = module.adaptation()
        if client == SERVER or not phases:
            return {}
        data = self.data.client(client)
        data.order_seed = seed_all(self.seed, ADAPT, round, client)
        self._train(module, data, phases, round - 1)
        costs = {"adapt/flops": float(self.flops.collect())}
        if module.has_statistics:
            self._gather(module, data)  # of this client's own data, for its own model
        module._trainer = None
        return costs

    def load(self, client: ClientInfo, broadcast: Broadcast, private: State | None) -> FederatedModule:
        """The working module of the client's architecture with the client's private state and the broadcast until the next call."""
        client = replace(client, capacity=broadcast.capacity)
        architecture = self.template.architecture(client)
        if architecture not in self._modules:
            self._modules[architecture] = self.template.for_architecture(client, self.seed)
        module = self._modules[architecture]
        module.client = client
        module.progress.phase = None  # of an earlier turn
        self._load(module, broadcast, private)
        return module

    def _load(self, module: FederatedModule, broadcast: Broadcast, private: State | None) -> None:
        """Make a module that of its client: all that it does not share with everybody of its architecture."""
        assert module.client is not None
        if private is not None:
            module.load_private_state(private)
        elif module.has_private_state:
            # What it starts from is drawn or copied, not stored: clients that never take part cost no memory.
            module.load_private_state(self.template.for_client(module.client, self.seed).private_state())
            module.start_copies(self.initial or broadcast.state)
        module.load_broadcast(broadcast)

    def _fit(self, module: FederatedModule, data: ClientDataModule, turn: Turn, learned: dict[str, float]) -> ClientUpdate:
        metrics = learned | self._train(module, data, module.phases(), turn.round - 1)
        found = self._review(module, data) if module.reviews else {}
        if module.asked is not None:
            found |= {OUTPUTS: self._ask(module, self.data.public_set(module.public_batch_size, module.asked))}
        module.after_training(found)
        self._activity = ""
        metrics["flops"] = float(self.flops.collect())
        return ClientUpdate(turn.client.id, turn.client.num_train, module.update_state(), metrics)

    @staticmethod
    def _kept(module: FederatedModule) -> State | None:
        kept = module.private_state() or None
        if kept is not None:
            check_finite(kept, "The private state", remedy(module))
        return kept

    def _on_public(self, module: FederatedModule, turn: Turn) -> Outcome:
        """Ask a model about the public data, or train it on them."""
        client, size = turn.client.id, turn.client.num_train
        if turn.verb == "learn" and client != SERVER:
            metrics = self._lesson(module, turn)
            return Outcome(ClientUpdate(client, size, {}, metrics | {"flops": float(self.flops.collect())}), self._kept(module))
        data = self.data.public_set(module.public_batch_size, None if turn.verb == "predict" else module.lesson_examples)
        data.order_seed = seed_all(self.seed, PUBLIC, turn.round, int(turn.broadcast.capacity or 0))
        if turn.verb == "predict":
            said = {OUTPUTS: self._ask(module, data)}
            return Outcome(ClientUpdate(client, size, said, {"flops": float(self.flops.collect())}))
        best = None
        if module.server_validation is not None and data.info.num_val:
            every, patience = module.server_validation
            best = BestOnValidation(f"val/{module.headline_metric}", module.more_is_better, every, patience)
        metrics = self._train(module, data, module.server_phases(), turn.round - 1, best)
        metrics["flops"] = float(self.flops.collect())
        return Outcome(ClientUpdate(client, size, module.shared_state(), metrics))

    def _lesson(self, module: FederatedModule, turn: Turn) -> dict[str, float]:
        """Train a client on public data, if there is anything to learn from them."""
        if not (phases := module.lesson_phases()):
            return {}
        data = self.data.public_set(module.public_batch_size, module.lesson_examples)
        data.order_seed = seed_all(self.seed, LESSON, turn.round, turn.client.id)
        return self._train(module, data, phases, turn.round - 1)

    def _ask(self, module: FederatedModule, data: ClientDataModule) -> Tensor:
        self._activity = "asked about public data"
        asking = OutputsPass(module, self.flops, data.info.num_train)
        self.trainers.for_measuring().predict(asking, datamodule=data, return_predictions=False)
        return asking.result()

    def _train(
        self,
        module: FederatedModule,
        data: ClientDataModule,
        phases: Sequence[Phase],
        rounds: int,
        best: BestOnValidation | None = None,
    ) -> dict[str, float]:
        with module.playing(phases):
            if not (epochs := module.num_epochs(len(data.train_dataloader()))):
                return {}
            if best is None:
                trainer = self.trainers.for_fit(epochs, [self.flops])
            else:
                trainer = self.trainers.for_fit(epochs, [self.flops, best], **best.trainer_options)
            module.rounds_before = rounds
            try:
                trainer.fit(module, datamodule=data)
            except (RuntimeError, IndexError) as error:
                if trainer.global_step > 0 or isinstance(error, OutOfMemoryError):
                    raise
                raise misfit(error, module, data) from error
            module.progress.phase = None
        if trainer.global_step == 0:
            raise FederationError(
                "no step was trained: check the trainer's limit_train_batches, max_steps, max_time and fast_dev_run, which apply "
                "to each turn."
            )
        for optimizer in trainer.optimizers:
            # A Trainer is full of reference cycles: moments as large as the network would stay until Python collects them.
            optimizer.state.clear()
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()} | {"steps": float(trainer.global_step)}
        self._refuse_divergence(metrics, module, trainer)
        return metrics

    def _review(self, module: FederatedModule, data: ClientDataModule) -> State:
        self._activity = "reviewing its data"
        review = Review(module, self.flops)
        self.trainers.for_measuring(gradients=True).predict(review, datamodule=data, return_predictions=False)
        return review.result()

    def _gather(self, module: FederatedModule, data: ClientDataModule) -> ClientUpdate:
        self._activity = "gathering statistics"
        batches = self.trainers.for_measuring().predict(StatisticsPass(module), datamodule=data) or []
        return ClientUpdate(data.info.id, data.info.num_train, module.statistics(), {"batches": float(len(batches))})

    def _evaluate(self, module: FederatedModule, data: ClientDataModule) -> dict[str, float]:
        self._activity = "measured"
        trainer = self.trainers.for_measuring()
        results = []
        if data.info.num_val:
            results += trainer.validate(module, datamodule=data, verbose=False)
        results += trainer.test(module, datamodule=data, verbose=False)
        return {name: float(value) for result in results for name, value in result.items()}

    @staticmethod
    def _refuse_divergence(metrics: dict[str, float], module: FederatedModule, trainer: L.Trainer) -> None:
        for name, value in metrics.items():
            if not math.isfinite(value):
                rates = [f"{group['lr']:g}" for optimizer in trainer.optimizers for group in optimizer.param_groups]
                option = next((key for key, given in vars(module).items() if given is module.phase.optimizer), "optimizer")
                rate = f"the learning rate of model.{option}, which is {' and '.join(dict.fromkeys(rates))}"
                raise FederationError(
                    f"{name} is {value}: the training diverged; {remedy(module, rate)}. The last checkpoint is from before this "
                    "round."
                )

    @contextmanager
    def _named(self, turn: Turn) -> Iterator[None]:
        """Say of whatever goes wrong in a turn whose turn it was."""
        try:
            yield
        except Exception as error:
            place = self._place(turn)
            if isinstance(error, FederationError):
                raise FederationError(f"{place}: {error}") from error
            if isinstance(error, MisconfigurationException):  # of Lightning, for what only shows when a Trainer runs
                raise FederationError(
                    f"{place}: Lightning refuses the trainer's settings: {' '.join(str(error).split())}"
                ) from error
            error.add_note(f"In this turn: {place}.")
            raise

    def _place(self, turn: Turn) -> str:
        who = "The server" if turn.client.id == SERVER else f"Client {turn.client.id}"
        client = replace(turn.client, capacity=turn.broadcast.capacity)
        module = self._modules.get(self.template.architecture(client))
        phase = f"phase {module.progress.phase}" if module is not None and module.progress.phase else ""
        return ", ".join(filter(None, (f"{who} in round {turn.round}", self._activity or phase)))
