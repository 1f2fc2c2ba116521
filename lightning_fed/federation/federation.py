"""A federation: its settings and the verbs that start or open a run."""

import copy
import logging
import shutil
import sys
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import lightning as L
from lightning.pytorch.loggers import Logger

from lightning_fed.callbacks import (
    AdapterRanks,
    FederationCallback,
    Hyperparameters,
    MetricsTable,
    ProgressBar,
    RoundLines,
    RunFacts,
    StartLine,
    Summary,
    TensorBoardFigures,
    TensorBoardPage,
)
from lightning_fed.core.module import FederatedModule
from lightning_fed.core.robust import Aggregation
from lightning_fed.data import FederatedDataModule
from lightning_fed.engines import Engine, InProcess
from lightning_fed.engines.compression import NONE, Compression
from lightning_fed.engines.malloc import retained_memory
from lightning_fed.engines.preflight.one_process import refuse_other_ranks
from lightning_fed.engines.preflight.trainer_options import refuse_options
from lightning_fed.engines.silence import no_second_traceback, quiet_lightning, torch_threads
from lightning_fed.engines.turn_loop import QUIET, TrainerFactory, in_one_process
from lightning_fed.errors import FederationError
from lightning_fed.federation.attacks import Attack
from lightning_fed.federation.exclusive import only_run
from lightning_fed.federation.predictions import Row, predictions, refuse_output, write_rows
from lightning_fed.federation.run import Run
from lightning_fed.federation.settings import RunSettings, Sampling
from lightning_fed.formatting import counted
from lightning_fed.options import AnySeed, ClosedUnitInterval, Fraction, NonNegativeInt, PositiveFloat, PositiveInt
from lightning_fed.privacy import ClientDP
from lightning_fed.privacy.mechanism import DifferentialPrivacy, Mechanism
from lightning_fed.seeding import isolated
from lightning_fed.storage.checkpoint import Checkpoint, Checkpoints, Keep
from lightning_fed.storage.export import write
from lightning_fed.storage.initial import initial_network
from lightning_fed.storage.manifest import Metrics
from lightning_fed.storage.owner import only_writer, temporary_folder
from lightning_fed.storage.run_folder import (
    load_checkpoint,
    new_run_folder,
    newest_run,
    refuse_run_dir,
    run_folder_of,
    without_a_round,
)
from lightning_fed.system.disk import in_one_line, naming
from lightning_fed.system.folders import from_home
from lightning_fed.system.logs import lines_shown
from lightning_fed.system.signals import preemption, stopped_by_signals
from lightning_fed.tensors import count_floats

log = logging.getLogger(__name__)


class Federation:
    """Trains a federated module on the clients of a federated data module.

    ``fit``, ``validate`` and ``test`` are Lightning's verbs. A run writes to ``run_dir/version_<n>``: TensorBoard events,
    ``metrics.csv``, ``clients.csv``, ``run.json``, ``ranks.csv`` for LoRA methods, and checkpoints.

    Args:
        rounds: number of communication rounds.
        participation: share of the clients that take part in a round, in (0, 1]; at least one client.
        eligible_clients: ids of the clients that may take part. The others, which join later or cannot hold the model for example,
            are only evaluated. None: all.
        sampling: client sampling: ``fixed``, every round has the same number of clients, drawn without replacement; ``poisson``,
            each client takes part with probability ``participation``, independently, so a round may have no clients at all.
        dropout: probability that a participant drops out of a round: it receives the model, but its update does not arrive and its
            private state does not change.
        quorum: share of a round's participants that must not drop out. With fewer, the round's updates are discarded.
        aggregation: robust aggregation rule, which weights all clients equally, for methods whose server averages:
            :class:`.Median`, :class:`.TrimmedMean`, :class:`.Krum`, :class:`.MultiKrum`, :class:`.GeometricMedian`,
            :class:`.ClippedMean`. None: the mean.
        privacy: differential privacy: client-level, :class:`.ClientDP`, for methods whose server averages; or example-level,
            :class:`.ExampleDP`, for methods whose clients send trained parameters only. None: none.
        attack: simulated attack by some clients, for tests and benchmarks: :class:`.SignFlip`, :class:`.GaussianNoise`,
            :class:`.LittleIsEnough`, :class:`.InnerProduct`, :class:`.LabelFlip`. Only the other clients are evaluated, but the
            pooled data of ``global/…`` have the examples of all. None: no attack.
        unseen: share or ids of clients that never take part in training. They are evaluated separately, as clients that join after
            training (``unseen/…``). None: no client.
        seed: seed of all randomness in the run; the command line sets it to ``seed_everything``.
        evaluate_every: evaluate all clients every N rounds (by default as many as it takes for the cohorts to add up to all
            clients) and after the last one; 0: only after the last one. None: that default, 1 at full participation and 10 at
            0.1, so that evaluation does not cost more than training.
        target: value of the monitored metric on test data. The run reports the round that first reaches it, and what was sent and
            computed by then (``target/…``). None: no target.
        patience: stop the run this many rounds after the round that was best on validation data. None: run all rounds.
        stop_at_target: stop the run at the round that reaches ``target``.
        budget: maximum traffic in MiB, up and down together. The run stops when another round like the last one would exceed it,
            but not before the first round. FlowerTune's leaderboard: 200000. None: no limit.
        checkpoint_every: save a checkpoint every N rounds, after the last one, and after each round that is the best so far
            on validation data; 0: never. The last two and the best are kept.
        keep: what a finished run keeps on disk besides its tables: ``all``, the last two checkpoints and the best one, with the
            clients' private states; ``last``, the last one; ``none``: the run cannot be tested, exported or continued.
        init_from: start all clients' networks, shared and private parts, from the network of another run's server. The folder
            of a run, of a run and ``/best``, or of one checkpoint; or a ``.safetensors`` file. None: networks start as they are
            built.
        run_dir: folder of the runs. None: nothing is written.
        store_limit_mb: memory for the clients' private states, in MiB; the rest is stored on disk. Methods whose server keeps
            something for each client (FedAMP, FedCAC, FD) may use the same amount twice more: for that, and for a round's updates.
        compression: quantization or sparsification of what is sent. None: no compression. Traffic counts what is sent.
        logger: where metrics are logged: True: to TensorBoard, in the run's folder; False: nowhere; a Lightning logger, or a list
            of loggers, in which True stands for TensorBoard.
        progress: print what is run, show a progress bar (without a terminal: a line per round) and a table at the end. The
            commands ``validate`` and ``test`` always print theirs.
        callbacks: additional callbacks; see :class:`.FederationCallback`.
        engine: runs the turns. None: in this process, :class:`lightning_fed.engines.InProcess`.
        trainer: builds each client's Trainer. None: Lightning's defaults on one device. The command line builds it from the
            ``trainer`` block. Options of a ``partial(L.Trainer, …)`` that would have no effect are refused.
    """

    def __init__(
        self,
        rounds: PositiveInt = 100,
        participation: Fraction = 1.0,
        eligible_clients: list[NonNegativeInt] | None = None,
        sampling: Sampling = "fixed",
        dropout: ClosedUnitInterval = 0.0,
        quorum: ClosedUnitInterval = 0.0,
        aggregation: Aggregation | None = None,
        privacy: DifferentialPrivacy | None = None,
        attack: Attack | None = None,
        unseen: ClosedUnitInterval | list[NonNegativeInt] | None = None,
        seed: AnySeed = 0,
        evaluate_every: NonNegativeInt | None = None,
        target: float | None = None,
        patience: PositiveInt | None = None,
        stop_at_target: bool = False,
        budget: PositiveFloat | None = None,
        checkpoint_every: NonNegativeInt = 1,
        keep: Keep = "all",
        init_from: Path | str | None = None,
        run_dir: Path | str | None = "runs",
        store_limit_mb: PositiveFloat = 2048,
        compression: Compression | None = None,
        logger: Logger | list[Logger | bool] | bool = True,
        progress: bool = True,
        callbacks: list[FederationCallback] | None = None,
        engine: Engine | None = None,
        trainer: TrainerFactory | None = None,
    ) -> None:
        key = privacy.key if isinstance(privacy, ClientDP) else None
        self.init_from = from_home(init_from) if init_from is not None else None
        self.run_dir = from_home(run_dir) if run_dir is not None else None
        if key is not None and self.run_dir is not None and from_home(key).resolve().is_relative_to(self.run_dir.resolve()):
            raise FederationError(f"privacy.key is {key}, inside run_dir: keep it outside, so that no run is copied with it.")
        if wrong := [given for given in callbacks or [] if not isinstance(given, FederationCallback)]:
            raise FederationError(
                f"callbacks has {_called(wrong[0])}, which is not a FederationCallback: pass Lightning callbacks to the clients' "
                "Trainers, trainer=partial(L.Trainer, devices=1, callbacks=[…])."
            )
        if isinstance(trainer, L.Trainer):
            raise FederationError("trainer is a Trainer, but each client needs new ones: pass partial(L.Trainer, devices=1, …).")
        if isinstance(trainer, partial) and trainer.func is L.Trainer:
            refuse_options(trainer.keywords, QUIET)
        always = [MetricsTable(), RunFacts(), Hyperparameters(), TensorBoardPage(), TensorBoardFigures(), AdapterRanks()]
        shown = [StartLine(), ProgressBar() if sys.stdout.isatty() else RoundLines(), Summary()] if progress else []
        self.settings = RunSettings(
            rounds=rounds,
            participation=participation,
            eligible_clients=eligible_clients,
            sampling=sampling,
            dropout=dropout,
            quorum=quorum,
            aggregation=aggregation,
            privacy=privacy,
            attack=attack,
            unseen=unseen,
            seed=seed,
            evaluate_every=evaluate_every,
            target=target,
            patience=patience,
            stop_at_target=stop_at_target,
            budget=budget,
            checkpoint_every=checkpoint_every,
            keep=keep,
            logger=logger,
            compression=compression or NONE,
            store_limit_mb=store_limit_mb,
            callbacks=[*always, *(callbacks or []), *shown],
        )
        self.engine = engine or InProcess()
        self.new_trainer = in_one_process(trainer or partial(L.Trainer, devices=1))
        self._newest: Run | None = None

    @property
    def seed(self) -> int:
        """Seed of all randomness in the run."""
        return self.settings.seed

    @property
    def callbacks(self) -> list[FederationCallback]:
        """The callbacks; more can be added until a run starts."""
        return self.settings.callbacks

    @property
    def run(self) -> Run:
        """The newest run with its results: ``history``, ``results``, ``server``, ``folder`` and more. Raises
        :class:`FederationError` if there is none yet.
        """
        if self._newest is None:
            raise FederationError("There is no run yet: fit, validate or test first.")
        return self._newest

    @lines_shown()
    def fit(self, model: FederatedModule, datamodule: FederatedDataModule, ckpt_path: Path | str | None = None) -> list[Metrics]:
        """Run all rounds: the clients train, and the server merges their updates.

        Args:
            model: the method. If its networks are built (pretrained, for example), the server starts from their shared part.
            datamodule: the clients' data.
            ckpt_path: checkpoint to continue from: ``"last"``, the newest checkpoint of this method's newest run in ``run_dir`` (a
                new run if there is none); ``"best"``, that of this run's best round on validation data; or the folder of a run, of
                a run and ``/best``, or of one checkpoint. A continued run gives the same result as an uninterrupted one.
                Checkpoints later than the chosen one are deleted once the continued run has saved its first.

        Returns:
            The metrics of every round, as in ``metrics.csv``.

        Raises:
            FederationError: if something that the user can change is wrong; earlier checkpoints are kept.
        """
        if self.run_dir is not None and str(ckpt_path or "last") in ("last", "best"):
            refuse_run_dir(self.run_dir)
        path = self._existing_path(ckpt_path, model) if str(ckpt_path) == "best" else self._find_checkpoint(ckpt_path, model)
        if path is not None:
            with only_writer(run_folder_of(path)):
                return self._fit(model, datamodule, self._load(path))
        if ckpt_path:
            log.info(f"No checkpoint of {type(model).__name__} in {self.run_dir} yet: starting a new run.")
        if self.run_dir and (empty := without_a_round(self.run_dir)):
            log.warning(
                f"No round was finished in {', '.join(map(str, empty))}: a run was killed before that, or is still in its first. "
                "Starting a new run; delete the folders of runs that are no longer running."
            )
        return self._fit(model, datamodule, None)

    def _fit(self, model: FederatedModule, datamodule: FederatedDataModule, checkpoint: Checkpoint | None) -> list[Metrics]:
        rounds = self.settings.rounds
        if checkpoint is not None and checkpoint.manifest.round > rounds:
            raise FederationError(
                f"Checkpoint {checkpoint.path} is of round {checkpoint.manifest.round}, but rounds is {rounds}: set rounds to at "
                "least that, or continue from an earlier checkpoint."
            )
        with preemption() as preempted, self._opened(model, datamodule, checkpoint) as run:
            run.play(preempted)
        return run.history

    @lines_shown()
    def dry_run(self, model: FederatedModule, datamodule: FederatedDataModule) -> None:
        """Do what ``fit`` does, up to and including the first client's first step, without writing: errors show up within seconds.

        Args:
            model: the method.
            datamodule: the clients' data.

        Raises:
            FederationError: if something that the user can change is wrong.
        """
        with self._unwritten()._opened(model, datamodule, None) as run:
            run.dry_run()

    @lines_shown()
    def privacy(self, model: FederatedModule, datamodule: FederatedDataModule) -> dict[int, float]:
        """Report the privacy cost of a configuration's rounds and whether it can be expected to learn; nothing is trained.

        Args:
            model: the method.
            datamodule: the clients' data.

        Returns:
            ε by round, at ten rounds up to the last.

        Raises:
            FederationError: if something that the user can change is wrong, or there is no privacy setting.
        """
        with self._unwritten()._opened(model, datamodule, None) as run:
            mechanism = run.server.privacy
            if not isinstance(mechanism, Mechanism):
                raise FederationError("The run has no privacy setting: set federation.privacy (class_path: ClientDP or ExampleDP).")
            rounds = self.settings.rounds
            spent = {round: mechanism.epsilon(round) for round in sorted({-(-rounds * tenth // 10) for tenth in range(1, 11)})}
            for round, value in spent.items():
                log.info(f"after {counted(round, 'round')}: ε = {value:.3f}")
            log.info(mechanism.forecast(count_floats(run.server.state), rounds))
        return spent

    def _unwritten(self) -> "Federation":
        """A copy of this federation that writes nothing."""
        tried = copy.copy(self)
        tried.run_dir, tried.engine = None, InProcess()
        tried.settings = replace(self.settings, logger=False)
        if isinstance(private := self.settings.privacy, ClientDP):
            tried.settings = replace(tried.settings, privacy=replace(private, noise="seeded", key=None))
        return tried

    @lines_shown()
    def load(self, model: FederatedModule, datamodule: FederatedDataModule, ckpt_path: Path | str | None = None) -> Run:
        """Open a run for its history and models. Nothing is evaluated: ``results`` is empty.

        Args:
            model: the method.
            datamodule: the clients' data.
            ckpt_path: checkpoint: ``"last"``, ``"best"`` on validation data, or a folder, see :meth:`fit`. None: ``"last"``.
        """
        checkpoint = self._existing_checkpoint(ckpt_path, model)
        with self._opened(model, datamodule, checkpoint, reading=True, engine=InProcess()) as run:
            return run

    @lines_shown()
    def validate(self, model: FederatedModule, datamodule: FederatedDataModule, ckpt_path: Path | str | None = None) -> Metrics:
        """Evaluate the clients of a run on their validation data.

        Args:
            model: the method.
            datamodule: the clients' data.
            ckpt_path: checkpoint: ``"last"``, ``"best"`` on validation data, or a folder, see :meth:`fit`. None: ``"last"``.
        """
        with self._opened(model, datamodule, self._existing_checkpoint(ckpt_path, model), reading=True) as run:
            return run.measure("val")

    @lines_shown()
    def test(self, model: FederatedModule, datamodule: FederatedDataModule, ckpt_path: Path | str | None = None) -> Metrics:
        """Evaluate the clients of a run on their test data.

        Args:
            model: the method.
            datamodule: the clients' data.
            ckpt_path: checkpoint: ``"last"``, ``"best"`` on validation data, or a folder, see :meth:`fit`. None: ``"last"``.
        """
        with self._opened(model, datamodule, self._existing_checkpoint(ckpt_path, model), reading=True) as run:
            return run.measure("test")

    @lines_shown()
    def predict(
        self, model: FederatedModule, datamodule: FederatedDataModule, output: Path | str, ckpt_path: Path | str | None = None
    ) -> list[Row]:
        """Write each client's predictions for its own test examples to a file, one row per example; see :func:`.predictions`.

        Args:
            model: the method.
            datamodule: the clients' data.
            output: a file that ends in ``.csv`` or, with the extra ``hub``, ``.parquet``; an existing file is replaced.
            ckpt_path: checkpoint: ``"last"``, ``"best"`` on validation data, or a folder, see :meth:`fit`. None: ``"last"``.

        Returns:
            The rows.
        """
        output = from_home(output)
        refuse_output(output)
        with self._opened(model, datamodule, self._existing_checkpoint(ckpt_path, model), reading=True) as run:
            rows = predictions(run, self.new_trainer)
        with in_one_line(lambda: "Give another output.", output), naming(output):
            write_rows(rows, output)
        of_clients = counted(len({row["client"] for row in rows}), "client")
        log.info(f"{output}: {counted(len(rows), 'prediction')} of {of_clients}, with the models after round {run.round}.")
        return rows

    @lines_shown()
    def export(
        self,
        model: FederatedModule,
        datamodule: FederatedDataModule,
        output: Path | str,
        client: Literal["all"] | NonNegativeInt | None = None,
        ckpt_path: Path | str | None = None,
        merged: bool = False,
        format: Literal["safetensors", "onnx"] = "safetensors",
    ) -> None:
        """Write a model of a run for use elsewhere, and a ``config.json`` that describes it.

        Args:
            model: the method.
            datamodule: the clients' data.
            output: folder to write to.
            client: id of the client whose model to write; ``"all"``: all models, each in a folder of ``output`` named after
                its id. None: the server's state, which is the shared part or a whole model.
            ckpt_path: checkpoint: ``"last"``, ``"best"`` on validation data, or a folder, see :meth:`fit`. None: ``"last"``.
            merged: for methods with adapters: write the whole network with the adapters merged into the weights, instead of the
                adapters.
            format: ``safetensors``, in the layout of peft or transformers if they can load the model; or ``onnx``, a whole model
                from inputs to logits, for any batch size and text length.
        """
        output = from_home(output)
        with self._opened(model, datamodule, self._existing_checkpoint(ckpt_path, model), reading=True) as run:
            for one in [known.id for known in run.clients] if client == "all" else [client]:
                exported = run.server_module() if one is None else run.client_module(one)
                facts = {"method": run.method, "round": run.round, "client": one, "seed": run.seed}
                folder = output / str(one) if client == "all" else output
                with in_one_line(lambda: "Give another output.", output), naming(output):
                    write(folder, exported, datamodule, facts, merged, format)
            owner = "each client" if client == "all" else "the server" if client is None else f"client {client}"
            what = "model" if client is not None or exported.shares_whole_model else "shared part of the model"
            log.info(f"{output}: {owner}'s {what} after round {run.round}.")

    def client_module(self, client: int) -> FederatedModule:
        """A client's model after the last round, with the server's broadcast loaded, for use outside the federation."""
        with self._surroundings(), torch_threads(self.run.threads):
            return self.run.client_module(client)

    def server_module(self) -> FederatedModule:
        """The server's shared part after the last round, which may be a whole model; the rest has its initial weights."""
        with self._surroundings(), torch_threads(self.run.threads):
            return self.run.server_module()

    # -------------------------------------------------------------------------------------------------------------- a run

    @contextmanager
    def _opened(
        self,
        model: FederatedModule,
        datamodule: FederatedDataModule,
        checkpoint: Checkpoint | None,
        reading: bool = False,
        engine: Engine | None = None,
    ) -> Iterator[Run]:
        """A run, new, continued or opened for reading; its engine is by default the federation's."""
        for name, given, kind, such in (
            ("model", model, FederatedModule, "FedAvg(backbone)"),
            ("datamodule", datamodule, FederatedDataModule, "InMemory(inputs, labels)"),
        ):
            if not isinstance(given, kind):
                raise FederationError(
                    f"{name} is {_called(given)}, expected an object of a subclass of {kind.__name__}, such as {such}."
                )
        refuse_other_ranks()
        with ExitStack() as stack, self._surroundings(), stopped_by_signals():
            model, seen_before = self._started(model, datamodule)
            made: list[Path] = []

            def folder() -> Path | None:
                if checkpoint is not None or self.run_dir is None:
                    return checkpoint.run_folder if checkpoint is not None else None
                made.append(new_run_folder(self.run_dir))
                stack.enter_context(only_writer(made[0]))
                return made[0]

            run: Run | None = None
            try:
                self._newest = run = Run(
                    model,
                    datamodule,
                    engine or self.engine,
                    self.new_trainer,
                    self.settings,
                    folder=folder,
                    temporary_folder=self._temporary_folder,
                    checkpoint=checkpoint,
                    reading=reading,
                )
                if seen_before not in (None, run.identity["data"]):
                    log.warning(
                        f"{self.init_from}, which this run starts from, has other data, clients, or another split: it may have "
                        "been trained on examples that this run tests on."
                    )
                try:
                    yield run
                finally:
                    run.close()
            except BaseException:
                if made and not (run and run.completed) and not Checkpoints(made[0]).paths():
                    shutil.rmtree(made[0], ignore_errors=True)  # no round was finished, so it could not be continued
                raise

    def _started(self, model: FederatedModule, datamodule: FederatedDataModule) -> tuple[FederatedModule, str | None]:
        """The method with the network that the run starts from, and the checksum of the data of the run that it is from, if any."""
        model = model if model.is_built else model.unbuilt_copy()  # runs must not see each other's networks
        model.know_classes(datamodule.num_classes)
        model.know_task(datamodule.problem)
        model.know_data(datamodule)
        if self.init_from is None:
            return model, None
        network, data = initial_network(self.init_from)
        return model.with_initial_weights(network, f"The network of init_from={self.init_from}"), data

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        """The context in which all code of a run executes."""
        with ExitStack() as stack:
            if stack.enter_context(only_run()):
                for surrounding in (quiet_lightning(), no_second_traceback(), retained_memory()):
                    stack.enter_context(surrounding)
            stack.enter_context(isolated())
            stack.enter_context(torch_threads(self.engine.threads))
            yield

    @staticmethod
    def _temporary_folder(run: Run) -> Path:
        """A folder that is deleted with the run; private states are available until then."""
        stack = ExitStack()
        path = stack.enter_context(temporary_folder())
        weakref.finalize(run, stack.close)
        return path

    def _find_checkpoint(self, ckpt_path: Path | str | None, model: FederatedModule) -> Path | None:
        """The path that ``ckpt_path`` refers to; None if there is nothing to continue."""
        if (word := str(ckpt_path)) not in ("last", "best"):
            return from_home(word) if ckpt_path else None
        path = newest_run(self.run_dir, type(model).__name__) if self.run_dir else None
        return path / "best" if path and word == "best" else path

    def _load(self, path: Path) -> Checkpoint:
        """Load a checkpoint, and warn about damaged files of the run."""
        checkpoint, passed_over = load_checkpoint(path)
        for problem in passed_over:
            log.warning(f"{problem}. Continuing from round {checkpoint.manifest.round}.")
        if missing := checkpoint.missing_rounds:
            rounds = ", ".join(map(str, missing[:3])) + ", …" * (len(missing) > 3)
            lost = f"the metrics of {counted(len(missing), 'round')} ({rounds})"
            log.warning(f"{checkpoint.run_folder} has lost {lost}: metrics.csv goes on without these rows.")
        return checkpoint

    def _existing_checkpoint(self, ckpt_path: Path | str | None, model: FederatedModule) -> Checkpoint:
        return self._load(self._existing_path(ckpt_path, model))

    def _existing_path(self, ckpt_path: Path | str | None, model: FederatedModule) -> Path:
        path = self._find_checkpoint(ckpt_path or "last", model)
        if path is None:
            raise FederationError(
                f"There is no checkpoint of {type(model).__name__} in {self.run_dir}: fit first (a finished run has one "
                "unless keep is none), or set ckpt_path."
            )
        return path


def _called(given: object) -> str:
    return f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"
