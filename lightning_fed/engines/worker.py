"""Runs a client's turn: loads its state, trains or evaluates with a Lightning Trainer, and collects the results."""

import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_fed.core.client_modules import ClientModules, UnsavedBuffers
from lightning_fed.core.flops import FlopMeter
from lightning_fed.core.hparams import remedy
from lightning_fed.core.messages import STAGES, Broadcast, ClientUpdate, Turn, TurnResult
from lightning_fed.core.module import FederatedModule
from lightning_fed.core.phase import Phase
from lightning_fed.core.phased_module import PhasedModule
from lightning_fed.core.public_distillation import OUTPUTS, PublicDistillation
from lightning_fed.data import ClientDataModule, FederatedDataModule
from lightning_fed.data.client_info import SERVER, ClientInfo
from lightning_fed.engines.best_on_validation import BestOnValidation
from lightning_fed.engines.compression import ERROR, NONE, Compression
from lightning_fed.engines.passes import OutputsPass, PostTrainingPass
from lightning_fed.engines.preflight.shape_mismatch import explained
from lightning_fed.engines.turn_loop import TrainerFactory, Trainers
from lightning_fed.errors import FederationError, one_line
from lightning_fed.nn.norms import StatisticsPass
from lightning_fed.privacy.example_dp import ExampleTraining
from lightning_fed.seeding import COMPRESSION, FINE_TUNE, ORDER, PUBLIC, PUBLIC_TRAINING, TURN, derive_seed, seed_all
from lightning_fed.tensors import State, check_finite


class Worker:
    """Runs the turns of many clients, one at a time, with one module per architecture in memory.

    A turn is a function of its inputs: all random draws come from the stream of (seed, round, client). Turns change the global
    random state; whoever runs them restores it once at the end.

    Args:
        template: the method, built; it is copied, never trained.
        data: the clients' data.
        new_trainer: builds the Trainers of turns; see :class:`.Trainers`.
        seed: the run's seed.
        initial: originals that new clients' private states are copied from. None: those of the template.
        compression: compression of messages.
        examples: how clients train with example-level privacy. None: without.
    """

    def __init__(
        self,
        template: FederatedModule,
        data: FederatedDataModule,
        new_trainer: TrainerFactory,
        seed: int,
        initial: State | None = None,
        compression: Compression = NONE,
        examples: ExampleTraining | None = None,
    ) -> None:
        self.template = template
        self.data = data
        self.clients = ClientModules(template, seed)
        self.trainers = Trainers(new_trainer)
        self.seed = seed
        self.compression = compression
        self.examples = examples
        self.initial = template.initial_originals() if initial is None else initial
        self.flops = FlopMeter()
        self._modules: dict[Hashable, FederatedModule] = {}
        self._unsaved: dict[Hashable, UnsavedBuffers] = {}
        self._trained: list[FederatedModule] = []  # of these, those that were trained once
        self.activity = ""  # what the turn is doing, besides training

    def run_turn(self, turn: Turn, private: State | None) -> TurnResult:
        """Run a turn. The update of an evaluate turn has no payload.

        Args:
            turn: the turn.
            private: the client's private state. None: it has none yet.

        Raises:
            FederationError: for what the user can change, with client, round and phase; other exceptions get them as a note.
        """
        with self._named(turn):
            self.activity = ""
            self.flops.collect()  # what a turn has left that failed
            trains = turn.client.id != SERVER and turn.verb in ("fit", "personalize", "train_on_public")
            if trains:  # its broadcast is compressed, see RoundTurns
                state = self.compression.expand_broadcast(turn.broadcast.state)
                turn = replace(turn, broadcast=replace(turn.broadcast, state=state))
            module = self.load(turn.client, turn.broadcast, private)
            module.rounds_before = turn.round - 1  # phases may depend on it
            result: TurnResult = getattr(self, turn.verb)(module, turn)
            return self._compressed(result, turn, private or {}, module) if trains else result

    def _compressed(self, result: TurnResult, turn: Turn, before: State, module: FederatedModule) -> TurnResult:
        """Compress the client's update, which :class:`.RoundTurns` expands; what was not sent is added to the private state."""
        owed = {name.removeprefix(ERROR): tensor for name, tensor in before.items() if name.startswith(ERROR)}
        update = result.update
        if turn.verb == "fit" and self.compression.up != "none":
            seed_all(self.seed, COMPRESSION, turn.round, turn.client.id)
            names = module.continued_names() if self.compression.up == "topk" else update.state.keys() - module.buffer_names()
            state, owed = self.compression.compress_update(update.state, turn.broadcast.state, owed, names)
            update = replace(update, state=state)
        if not owed or (turn.verb != "fit" and result.private is None):
            return TurnResult(update, result.private)
        return TurnResult(update, (result.private or {}) | {f"{ERROR}{name}": tensor for name, tensor in owed.items()})

    def fit(self, module: FederatedModule, turn: Turn) -> TurnResult:
        """Train a client's model: returns the update and the private state."""
        metrics = self._learn_from_public(module, turn)
        data = self._data_of(turn)
        phases = module.phases()
        if self.data.continue_epochs:
            length = len(data.train_dataloader())
            data.order_seed = derive_seed(self.seed, ORDER, turn.client.id)
            data.start = turn.turns * sum(phase.num_batches(length, module.batches_per_step) for phase in phases)
        with nullcontext() if self.examples is None else self.examples.of(module, data, turn):
            metrics |= self.train(module, data, phases)
        module.after_training(self._passes_after_training(module, data))
        self.activity = ""
        metrics["flops"] = float(self.flops.collect())
        state, private = module.update_state(), checked_private_state(module)
        if turn.evaluate:
            if module.has_statistics:
                self._pass_over(module, data)  # of this client's data only, for its own model
            metrics |= self.metrics_of(module, data)
        return TurnResult(ClientUpdate(turn.client.id, turn.client.num_train, state, metrics), private)

    def evaluate(self, module: FederatedModule, turn: Turn) -> TurnResult:
        """Evaluate a model: returns metrics only."""
        costs = self.prepare(module, turn.client.id, turn.round, turn.fine_tune)
        metrics = self.metrics_of(module, self._data_of(turn)) | module.inspect() | costs
        return TurnResult(ClientUpdate(turn.client.id, turn.client.num_train, {}, metrics))

    def personalize(self, module: FederatedModule, turn: Turn) -> TurnResult:
        """Evaluate what a client gets that never takes part in training: the received model; the personalized model, with the
        private state of one turn of training; and the model with everything that the turn trained.
        """
        assert turn.evaluated_with is not None
        trained = self.fit(module, replace(turn, evaluate=True))
        received = self.metrics_of(self.load(turn.client, turn.evaluated_with, None), self._data_of(turn))
        own = self.load(turn.client, turn.evaluated_with, trained.private)
        personalized = self.evaluate(own, replace(turn, broadcast=turn.evaluated_with)).update.metrics
        metrics = {"flops": trained.update.metrics["flops"] + personalized.get("fine_tune/flops", 0.0)}
        for stage, found in zip(STAGES, (received, personalized, trained.update.metrics), strict=True):
            metrics |= {f"{stage}/{name}": value for name, value in found.items() if name.startswith(("val/", "test/"))}
        return TurnResult(ClientUpdate(turn.client.id, turn.client.num_train, {}, metrics))

    def compute_statistics(self, module: FederatedModule, turn: Turn) -> TurnResult:
        """Compute the statistics of a model on the client's training data."""
        batches = self._pass_over(module, self._data_of(turn))
        return TurnResult(ClientUpdate(turn.client.id, turn.client.num_train, module.statistics(), {"batches": float(batches)}))

    def predict_public(self, module: FederatedModule, turn: Turn) -> TurnResult:
        """A model's outputs for each public example."""
        assert isinstance(module, PublicDistillation)  # only their servers have such turns
        outputs = {OUTPUTS: self._outputs(module, self._public_data(module, turn, None))}
        return TurnResult(ClientUpdate(turn.client.id, turn.client.num_train, outputs, {"flops": float(self.flops.collect())}))

    def train_on_public(self, module: FederatedModule, turn: Turn) -> TurnResult:
        """Train the server's model, which is sent back, or a client's, which is not."""
        assert isinstance(module, PublicDistillation)
        state, private = {}, None
        if turn.client.id == SERVER:
            data = self._public_data(module, turn, module.public_examples)
            metrics = self.train(module, data, module.server_phases(), _best(module, data))
            state = module.shared_state()
        else:
            metrics = self._learn_from_public(module, turn)
            private = checked_private_state(module)
        metrics["flops"] = float(self.flops.collect())
        return TurnResult(ClientUpdate(turn.client.id, turn.client.num_train, state, metrics), private)

    def module_of(self, client: ClientInfo, broadcast: Broadcast, private: State | None) -> FederatedModule:
        """A separate module for a client, which later turns do not change."""
        module = self.clients.of_architecture(replace(client, model_size=broadcast.model_size))
        self._load(module, broadcast, private)
        return module

    def prepare(self, module: FederatedModule, client: int, round: int, fine_tune: bool = True) -> dict[str, float]:
        """Run the phases that precede an evaluation of a client's model and, if it is to be fine-tuned, those of its fine-tuning;
        returns the costs. The server's models are evaluated as they are.
        """
        if client == SERVER:
            return {}
        if not (phases := [*module.evaluation_phases(), *(module.fine_tuning_phases() if fine_tune else [])]):
            return {}
        data = self.data.client(client)
        data.order_seed = seed_all(self.seed, FINE_TUNE, round, client)
        module.rounds_before = round - 1
        self.train(module, data, phases)
        costs = {"fine_tune/flops": float(self.flops.collect())}
        if module.has_statistics:
            self._pass_over(module, data)  # of this client's data only, for its own model
        module._trainer = None
        return costs

    def load(self, client: ClientInfo, broadcast: Broadcast, private: State | None) -> FederatedModule:
        """The working module of the client's architecture, with the client's private state and the broadcast loaded. The next call
        reuses it.
        """
        client = replace(client, model_size=broadcast.model_size)
        architecture = self.template.architecture(client)
        if architecture not in self._modules:
            self._modules[architecture] = module = self.clients.of_architecture(client)
            self._unsaved[architecture] = UnsavedBuffers(module)
        module = self._modules[architecture]
        self._unsaved[architecture].restore()
        module.client = client
        module.progress.phase = None  # not that of an earlier turn
        self._load(module, broadcast, private)
        return module

    def _load(self, module: FederatedModule, broadcast: Broadcast, private: State | None) -> None:
        """Load all of a client's state into a module, except what all clients of its architecture share."""
        assert module.client is not None
        own = {name: tensor for name, tensor in (private or {}).items() if not name.startswith(ERROR)}
        if own or private == {}:  # an empty state comes from a damaged file
            module.load_private_state(own)
        elif module.has_private_state:
            # The initial state is drawn or copied, not stored: clients that never take part cost no memory.
            module.load_private_state(self.clients.of(module.client).private_state() if module.has_private_tensors else {})
            module.load_initial(self.initial or broadcast.state)
        module.load_broadcast(broadcast)

    def _data_of(self, turn: Turn) -> ClientDataModule:
        """The data of a turn. Seeds all randomness that follows with the turn's stream."""
        data = self.data.pooled() if turn.client.id == SERVER else self.data.client(turn.client.id)
        data.order_seed = seed_all(self.seed, TURN, turn.round, turn.client.id)
        return data

    def train(
        self, module: FederatedModule, data: ClientDataModule, phases: Sequence[Phase], best: BestOnValidation | None = None
    ) -> dict[str, float]:
        """Train a model; returns what its Trainer logged, and the number of steps.

        Args:
            module: the module to train.
            data: the data to train on.
            phases: the phases to run; empty: no training.
            best: selects the best model of this training. None: the last one is kept.
        """
        with module.training_on(phases):
            length = len(data.train_dataloader())
            if not (epochs := module.num_epochs(length)):
                return {}
            callbacks = [self.flops] if best is None else [self.flops, best]
            trainer = self.trainers.for_fit(epochs, callbacks, **({} if best is None else best.trainer_options))
            if isinstance(limit := trainer.limit_train_batches, int) or limit != 1.0:  # 1 is one batch, 1.0 all of them
                if data.start is not None:
                    raise FederationError(
                        f"limit_train_batches is {limit}, but continue_epochs counts whole epochs: leave one of them out."
                    )
                limited = min(length, limit) if isinstance(limit, int) else int(length * limit)
                trainer.fit_loop.max_epochs = module.num_epochs(max(1, limited))  # of steps, these are more
            with explained(trainer, module, data):
                trainer.fit(module, datamodule=data)
            module.progress.phase = None
        if module not in self._trained:
            module.refuse_late_layers()
            self._trained.append(module)
        if trainer.global_step == 0 and type(module).training_step is not PhasedModule.training_step:
            raise FederationError(
                f"no training step was made: {type(module).__name__} overrides training_step, which runs the phases. Override "
                "client_loss, or phases, instead."
            )
        if trainer.global_step == 0:
            raise FederationError(
                "no training step was made: check the trainer's limit_train_batches and fast_dev_run, which apply to each turn."
            )
        for optimizer in trainer.optimizers:
            # A Trainer is full of reference cycles: large optimizer states would stay in memory until Python collects them.
            optimizer.state.clear()
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()} | {"steps": float(trainer.global_step)}
        self._refuse_divergence(metrics, module, trainer)
        return metrics

    def _learn_from_public(self, module: FederatedModule, turn: Turn) -> dict[str, float]:
        """Train a client on public data, if its method does so; returns metrics."""
        if not isinstance(module, PublicDistillation) or not (phases := module.public_phases()):
            return {}
        data = self.data.public_set(module.public_batch_size, module.public_examples)
        data.order_seed = seed_all(self.seed, PUBLIC_TRAINING, turn.round, turn.client.id)
        return self.train(module, data, phases)

    def _passes_after_training(self, module: FederatedModule, data: ClientDataModule) -> State:
        """What :meth:`.FederatedModule.after_training` gets, if its method needs any of it."""
        found: State = {}
        if module.has_post_training_step:
            self.activity = "in the pass over the data after training"
            after = PostTrainingPass(module, self.flops)
            self.trainers.for_evaluating(gradients=True).predict(after, datamodule=data, return_predictions=False)
            found = after.result()
        if isinstance(module, PublicDistillation) and module.predict_public is not None:
            found[OUTPUTS] = self._outputs(module, self.data.public_set(module.public_batch_size, module.predict_public))
        return found

    def _public_data(self, module: PublicDistillation, turn: Turn, examples: Tensor | None) -> ClientDataModule:
        data = self.data.public_set(module.public_batch_size, examples)
        data.order_seed = seed_all(self.seed, PUBLIC, turn.round, int(turn.broadcast.model_size or 0))
        return data

    def _outputs(self, module: PublicDistillation, data: ClientDataModule) -> Tensor:
        self.activity = "predicting public data"
        outputs = OutputsPass(module, self.flops, data.info.num_train)
        self.trainers.for_evaluating().predict(outputs, datamodule=data, return_predictions=False)
        return outputs.result()

    def _pass_over(self, module: FederatedModule, data: ClientDataModule) -> int:
        """Pass the training data through a model to compute its statistics; returns the number of batches."""
        self.activity = "gathering statistics"
        return len(self.trainers.for_evaluating().predict(StatisticsPass(module), datamodule=data) or [])

    def metrics_of(self, module: FederatedModule, data: ClientDataModule) -> dict[str, float]:
        """Evaluate a model on validation data, if there are any, and on test data."""
        self.activity = "during evaluation"
        trainer = self.trainers.for_evaluating()
        results = []
        if data.info.num_val and trainer.limit_val_batches:
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
        """Add client, round and activity to any error of a turn."""
        try:
            yield
        except Exception as error:
            place = self._place(turn)
            if isinstance(error, FederationError):
                raise FederationError(f"{place}: {error}") from error
            if isinstance(error, MisconfigurationException):  # raised by Lightning only when a Trainer runs
                raise FederationError(f"{place}: Lightning refuses the trainer's settings: {one_line(error)}") from error
            error.add_note(f"In this turn: {place}.")
            raise

    def _place(self, turn: Turn) -> str:
        who = "The server" if turn.client.id == SERVER else f"Client {turn.client.id}"
        client = replace(turn.client, model_size=turn.broadcast.model_size)
        module = self._modules.get(self.template.architecture(client))
        phase = f"phase {module.progress.phase}" if module is not None and module.progress.phase else ""
        return ", ".join(filter(None, (f"{who} in round {turn.round}", self.activity or phase)))


def _best(module: PublicDistillation, data: ClientDataModule) -> BestOnValidation | None:
    if module.server_validation is None or not data.info.num_val:
        return None
    return BestOnValidation(f"val/{module.monitor}", module.higher_is_better, *module.server_validation)


def checked_private_state(module: FederatedModule) -> State | None:
    """A client's private state after a turn; None if there is none. Raises :class:`FederationError` if it is not finite."""
    state = module.private_state() or None
    if state is not None:
        check_finite(state, "The private state", remedy(module))
    return state
