"""What a module predicts, and how predictions are evaluated."""

import warnings
from typing import Any

import lightning as L
from torch import Tensor
from torchmetrics import MetricCollection

from lightning_fed.core.phased_module import with_signature
from lightning_fed.errors import FederationError
from lightning_fed.models import Transformer
from lightning_fed.models.answers import Answers
from lightning_fed.tasks.metrics import WideMetrics
from lightning_fed.tasks.task import TASKS, Loss, Metrics, Task, TaskName

TARGET_NAMES = {"labels", "start_positions"}
"""Keys of a batch that is a dict, if it holds targets."""


class PredictionMixin(L.LightningModule):
    """A LightningModule's task: its network's predictions, their loss, and Lightning's validation and test steps."""

    needs_classes: str | None = None
    """For methods that only work on one class of several: why, and the alternative, as the end of an error. None: any task."""

    needs_cross_entropy: str | None = None
    """The same for methods that work on a softmax, whose loss has to be a cross-entropy. None: any loss."""

    task: Task
    answers: Answers
    val_metrics: MetricCollection
    test_metrics: MetricCollection
    monitor: str
    accumulate: int
    _metrics_are_checked: bool
    _task_is_known: bool
    _num_classes: int | None

    def set_task(
        self,
        num_classes: int | None,
        task: TaskName | None = None,
        loss: Loss | None = None,
        metrics: Metrics | None = None,
        metric: str | None = None,
    ) -> None:
        """Set the task before the networks are built; the arguments are those of :class:`.FederatedModule`."""
        self.task = TASKS[task or "multiclass"](loss, metrics, metric)
        self._task_is_known = task is not None
        self._num_classes = num_classes

    def know_data(self, datamodule: Any) -> None:
        """Take the number of classes and the task from the data module, if it has them, before the networks are built."""
        if self._num_classes is None and (known := getattr(datamodule, "num_classes", None)):
            self.know_classes(known)
        if (task := getattr(datamodule, "problem", None)) is not None:
            self.know_task(task)

    @property
    def predictor(self) -> Any:
        """The network that a client predicts with. Default: its backbone."""
        return getattr(self, "backbone", None)

    def forward(self, x: Any) -> Tensor:
        """Logits ``(B, num_classes)`` that a client predicts with."""
        logits: Tensor = self.predictor(x)
        return logits

    def unpack(self, batch: Any) -> tuple[Any, Tensor]:
        """Split a batch into the network's inputs and the targets; see :meth:`.Task.unpack`."""
        return self.task.unpack(batch, self.predictor)

    def loss_terms(self, batch: Any) -> float:
        """Number of terms that the loss of a batch is the mean over; see :meth:`.Task.terms`."""
        return self.task.terms(self.unpack(batch)[1])

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of outputs and targets: the given loss, or the task's."""
        return self.task.criterion(outputs, targets)

    @property
    def num_classes(self) -> int:
        """Number of classes, labels or values to predict. Raises :class:`FederationError` while it is unknown."""
        if self._num_classes is None:
            raise FederationError(
                f"{type(self).__name__} does not know how many classes there are: give num_classes, or train on data that say it."
            )
        return self._num_classes

    def know_classes(self, num_classes: int) -> None:
        """Set the number of classes to that of the data, before the networks are built.

        Raises:
            FederationError: if the module was made for another number of classes.
        """
        if self._num_classes not in (None, num_classes):
            raise FederationError(
                f"{type(self).__name__} got num_classes={self._num_classes}, but the data have {num_classes}: leave it out."
            )
        if self._num_classes is None:
            self._num_classes = self.hparams["num_classes"] = num_classes

    def know_task(self, name: TaskName) -> None:
        """Set the task to that of the data, unless a task was given.

        Raises:
            FederationError: if networks for another task are built; see also :meth:`check_task`.
        """
        if self._task_is_known or name == self.task.name:
            return
        if self.is_built:
            raise FederationError(
                f"{type(self).__name__} has been built to predict {self.task.name}, but the task of the data is {name}: give it "
                f"task={name!r}."
            )
        self.task, self.hparams["task"] = self.task.copied(name), name
        self.check_task()

    def check_task(self) -> None:
        """Refuse tasks and losses that the method does not support, as :attr:`needs_classes` and :attr:`needs_cross_entropy` say.

        Called by the constructor of the base class, and again when the data determine the task.
        """
        if self.needs_classes is not None:
            self.task.need_classes(type(self).__name__, self.needs_classes)
        if self.needs_cross_entropy is not None:
            self.task.need_cross_entropy(type(self).__name__, self.needs_cross_entropy)
        if self.accumulate > 1 and not self.task.adds_up:
            raise FederationError(
                "accumulate is for losses that are means over examples, which a partial likelihood is not: leave it out."
            )

    def make_metrics(self) -> None:
        """Create the metrics of validation and test data, once the networks are built."""
        metrics = self.configure_metrics()
        self.val_metrics, self.test_metrics = (
            WideMetrics([metrics.clone()], prefix=prefix, compute_groups=False) for prefix in ("val/", "test/")
        )
        self.monitor = self.choose_monitor()
        self._metrics_are_checked = False

    @property
    def _measured_network(self) -> Transformer | None:
        """The network, if it determines its own metrics: those of classes or of texts."""
        return self.predictor if self.task.name == "multiclass" and isinstance(self.predictor, Transformer) else None

    def configure_metrics(self) -> MetricCollection:
        """Metrics of validation and test data. Default: those of the network or the task (accuracy for classes), the monitored
        metric, and the given ones.
        """
        return self.task.configure_metrics(self.num_classes, self._measured_network)

    def choose_monitor(self) -> str:
        """Name of the metric that progress, tables and model selection use; called once, when the metrics exist. Default: the given
        one, else the network's or the task's first.
        """
        return self.task.choose_monitor(self.test_metrics, self._measured_network)

    @property
    def higher_is_better(self) -> bool:
        """Whether larger values of the monitored metric are better."""
        return self.task.higher_is_better(self.monitor, self.test_metrics, self._measured_network)

    def check_values(self, targets: Tensor) -> None:
        """Refuse targets that the task's metrics would take for others, see :meth:`.Task.check_values`. A module that measures
        something else may have any.
        """
        if self.task.measures.keys() & set(self.test_metrics.keys(keep_base=True)):
            self.task.check_values(targets)

    def inspect(self) -> dict[str, float]:
        """Additional results of a client's model, by name, collected when the client is evaluated. Default: none."""
        return {}

    def update_metrics(self, metrics: MetricCollection, batch: Any) -> None:
        """Update the metrics with a batch."""
        x, y = self.unpack(batch)
        if metrics:  # some networks are evaluated by their generated answers only
            outputs = self(x)
            self.task.check_targets(outputs, y, self.num_classes)
            metrics.update(*self.task.measured(outputs, y))
            self.log_loss(metrics, outputs, y)
        self.answers.add(self.predictor, x, y)

    def log_loss(self, metrics: MetricCollection, outputs: Tensor, y: Tensor) -> None:
        """Log the loss of a batch during a Trainer's evaluation. Batches are weighted by their :meth:`.Task.terms`."""
        if self._trainer is not None:
            loss, terms = self.criterion(outputs, y), self.task.terms(y)
            # Lightning only multiplies by it and divides by the sum.
            self.log(f"{metrics.prefix}loss", loss, on_step=False, on_epoch=True, batch_size=terms)  # type: ignore[arg-type]

    @with_signature
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Update ``val/…`` metrics and ``val/loss``, the mean over examples (of texts: over learned tokens)."""
        self._measure(self.val_metrics, batch)

    @with_signature
    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Update ``test/…`` metrics and ``test/loss``."""
        self._measure(self.test_metrics, batch)

    def _measure(self, metrics: MetricCollection, batch: Any) -> None:
        self.log_dict(metrics, on_step=False, on_epoch=True)
        targets = self.unpack(batch)[1]
        self.check_values(targets)
        if self.task.learned(targets):  # otherwise all its targets are ignored
            self.update_metrics(metrics, batch)
            if not self._metrics_are_checked:
                self._check_metrics(metrics)

    def _check_metrics(self, metrics: MetricCollection) -> None:
        """Refuse metrics that give more than one number, by what they give for the first batch.

        Raises:
            FederationError: names one.
        """
        self._metrics_are_checked = True
        for name, metric in metrics.items(keep_base=True, copy_state=False):
            try:
                with warnings.catch_warnings(action="ignore"):
                    value = metric.clone().compute()
            except Exception:  # too few examples for it; the next batch will show
                self._metrics_are_checked = False
                continue
            if not (isinstance(value, Tensor) and value.numel() == 1):
                given = f"tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise FederationError(
                    f"The metric {name!r}, a {type(metric).__name__}, gives a {given}, expected a tensor of one number: give a "
                    "metric for each number to report, such as the mean over the classes (average='macro')."
                )

    @with_signature
    def predict_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        """Outputs of a batch, which may hold inputs only or inputs and targets."""
        if isinstance(batch, list | tuple) and len(batch) == 1:  # of a TensorDataset
            [batch] = batch
        alone = isinstance(batch, Tensor) or (isinstance(batch, dict) and not TARGET_NAMES & batch.keys())
        outputs: Tensor = self(batch if alone else self.unpack(batch)[0])
        return outputs

    def on_validation_epoch_end(self) -> None:
        """Log the ``val/…`` scores of generated texts."""
        self._log_scores("val/")

    def on_test_epoch_end(self) -> None:
        """Log the ``test/…`` scores of generated texts."""
        self._log_scores("test/")

    def _log_scores(self, stage: str) -> None:
        scores = self.answers.score(getattr(self.trainer, "datamodule", None))
        self.log_dict({f"{stage}{name}": value for name, value in scores.items()})
