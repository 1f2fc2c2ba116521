"""What a module is to learn and how it is measured: the loss of a batch, metrics, and which of them is the headline."""

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_fed.core.phased_module import PhasedModule
from lightning_fed.data.batches import EXAMPLE
from lightning_fed.errors import FederationError
from lightning_fed.models import Transformer
from lightning_fed.tasks.task import TASKS, TaskName

if TYPE_CHECKING:
    Loss = Callable[[Tensor, Tensor], Tensor]
    Metrics = dict[str, Metric]
else:
    # The command line would list all subclasses of a narrower type, and know no function.
    Loss = Callable[..., Any]
    Metrics = dict[str, Callable[..., Any]]


class MeasuredModule(PhasedModule):
    """A module that learns in phases, with a loss and metrics of outputs and targets. A :class:`lightning_fed.models.Transformer`
    knows itself what is to be predicted, how that is measured, and what it answers in texts, whatever the method.

    Args:
        num_classes: number of classes, or of labels or values that are predicted; None: as many as the data have.
        loss: of outputs and targets; None: the task's.
        metrics: more metrics of outputs and targets, by name.
        metric: the headline: the name of one of the task's or the network's metrics or of those in ``metrics``. None: their first.
        task: what is predicted, see :mod:`lightning_fed.tasks`; None: what the data say, and one class of several until then.
        **kwargs: see :class:`.PhasedModule`.
    """

    headline_metric = ""
    """The metric of :meth:`configure_metrics` that progress, tables and model selection use, if no other was chosen; empty: the
    task's, accuracy of classes.
    """

    val_metrics: MetricCollection
    test_metrics: MetricCollection

    def __init__(
        self,
        num_classes: int | None,
        loss: Loss | None,
        metrics: Metrics | None,
        metric: str | None,
        task: TaskName | None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if task not in (None, *TASKS):
            raise FederationError(f"task is {task!r}: give one of {', '.join(TASKS)}.")
        self._num_classes = num_classes
        self._task = task
        self.loss_function = of_its_own(loss)
        self.more_metrics = dict(metrics or {})
        if wrong := [name for name, value in self.more_metrics.items() if not isinstance(value, Metric)]:
            raise FederationError(f"metrics has {wrong[0]!r}, which is no torchmetrics.Metric: give objects of its subclasses.")
        self.metric = metric
        self._answers: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)

    @property
    def task(self) -> TaskName:
        """What is predicted."""
        return self._task or "multiclass"

    def know_task(self, task: TaskName) -> None:
        """Predict what the data say, before networks are built, unless something was asked for.

        Raises:
            FederationError: see :meth:`check_task`.
        """
        if self._task is None and task != self.task:
            self._task = self.hparams["task"] = task
            self.check_task()

    def check_task(self) -> None:
        """Refuse a task, and a loss, for which the method is not defined. The constructor of such a method calls this; it is called
        again when data say what is predicted. Default: anything goes.
        """

    @property
    def predictor(self) -> Any:
        """The network that a client predicts with. Default: its backbone."""
        return getattr(self, "backbone", None)

    @property
    def _transformer(self) -> Transformer | None:
        return self.predictor if isinstance(self.predictor, Transformer) else None

    @property
    def _measuring(self) -> Transformer | None:
        """The network, if it says how its predictions are measured: which are of classes, or of texts."""
        return self._transformer if self.task == "multiclass" else None

    @property
    def num_classes(self) -> int:
        """How many classes, labels or values are predicted. Raises :class:`FederationError` while nobody has said it."""
        if self._num_classes is None:
            raise FederationError(
                f"{type(self).__name__} does not know how many classes there are: give num_classes, or train on data that say it."
            )
        return self._num_classes

    def know_classes(self, num_classes: int) -> None:
        """Predict as many classes as the data have, before networks are built.

        Raises:
            FederationError: if it was made for another number of classes.
        """
        if self._num_classes not in (None, num_classes):
            raise FederationError(
                f"{type(self).__name__} got num_classes={self._num_classes}, but the data have {num_classes}: leave it out."
            )
        if self._num_classes is None:
            self._num_classes = self.hparams["num_classes"] = num_classes

    # ------------------------------------------------------------------------------------------------------------ loss

    def unpack(self, batch: Any) -> tuple[Any, Tensor]:
        """What a network takes of a batch, and what it is to predict. A batch is a pair of these; or a dict of what a network takes
        by name and ``labels``, or what else the library calls what the network is to predict, as collators of the transformers
        library make it.
        """
        if not isinstance(batch, Mapping):
            inputs, targets = batch
            return inputs, targets
        inputs, network = dict(batch), self._transformer
        try:
            targets = inputs.pop("labels") if network is None else network.targets_of(inputs)
        except KeyError as error:
            raise FederationError(
                f"A batch has {', '.join(batch)}, but no {error.args[0]}: give what is to be predicted under that name."
            ) from error
        return next(iter(inputs.values())) if inputs.keys() == {"pixel_values"} else inputs, targets

    def client_loss(self, batch: Any) -> Tensor:
        """The loss of a batch: :meth:`criterion` of outputs and targets."""
        x, y = self.unpack(batch)
        return self.criterion(self(x), y)

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of outputs: the one that was given, or the task's."""
        task = TASKS[self.task]
        prepared = task.prepared(outputs, targets)
        return task.loss(*prepared) if self.loss_function is None else self.loss_function(*prepared)

    def needs_cross_entropy(self, why: str) -> None:
        """Refuse a loss that is no cross-entropy of classes, for methods that are defined by what they do to a softmax.

        Args:
            why: what that is, and how to do without, to complete the error.
        """
        given = self.loss_function
        if self.task != "multiclass" or not (given is None or isinstance(given, nn.CrossEntropyLoss)):
            what = f"task {self.task!r}" if given is None or self.task != "multiclass" else f"the loss {type(given).__name__}"
            raise FederationError(f"{type(self).__name__} got {what}, but {why}")

    # ------------------------------------------------------------------------------------------------------------ metrics

    def configure_metrics(self) -> MetricCollection:
        """Metrics of validation and test data. Default: the network's or the task's usual ones (accuracy of classes), the headline,
        and those that were given.
        """
        if (network := self._measuring) is not None:
            metrics = network.metrics(self._headline_of(network))
        else:
            task = TASKS[self.task]
            names = dict.fromkeys((*task.always, *(name for name in task.measures if name == self.metric)))
            metrics = {name: task.measures[name](self.num_classes) for name in names}
        return MetricCollection({**metrics, **self.more_metrics}, compute_groups=False)

    def choose_headline(self) -> str:
        """The name of the headline. Asked once, when the metrics are there. Default: the one that was asked for, else the network's
        first, which the data may measure; else :attr:`headline_metric`, else the task's; where these are not measured, any that is.
        """
        network, measured = self._measuring, [str(name) for name in self.test_metrics.keys(keep_base=True)]
        known = dict.fromkeys((*(TASKS[self.task].measures if network is None else network.measures), *self.more_metrics))
        if self.metric is not None and self.metric not in (measured if network is None else known):
            raise FederationError(
                f"metric is {self.metric!r}, but what can be measured is {', '.join(known)}: choose one of these, or give yours in "
                "metrics."
            )
        if network is not None:
            return self._headline_of(network)
        wanted = (self.metric, type(self).headline_metric, TASKS[self.task].always[0], *measured)
        return next(name for name in wanted if name in measured)

    @property
    def more_is_better(self) -> bool:
        """Whether the headline is to be large; an error, say, is not. Metrics know, or the network where the data measure it."""
        if (network := self._measuring) is not None and self._headline_of(network) in network.less_is_better:
            return False
        metrics = dict(self.test_metrics.items(keep_base=True, copy_state=False))
        return getattr(metrics.get(self.headline_metric), "higher_is_better", None) is not False

    def _headline_of(self, network: Transformer) -> str:
        return self.metric or network.measures[0]

    def inspect(self) -> dict[str, float]:
        """What else there is to know of a client's model when it is measured, by name: it goes into the results of the client.
        Default: nothing.
        """
        return {}

    def update_metrics(self, metrics: MetricCollection, batch: Any) -> None:
        """Take a batch into the metrics."""
        x, y = self.unpack(batch)
        if metrics:  # some networks are measured by their answers alone
            metrics.update(*TASKS[self.task].measured(self(x), y))
        self.keep_answers("", x, y)

    def keep_answers(self, prefix: str, inputs: Any, targets: Tensor) -> None:
        """Keep what the network answers to a batch, where it answers in texts: they are scored together.

        Args:
            prefix: what the names of the scores begin with.
            inputs: of the batch. One that does not say to which examples it belongs is not from data that can score texts.
            targets: of the batch.
        """
        network = self._transformer
        if network is None or isinstance(inputs, Tensor) or EXAMPLE not in inputs:
            return
        answers = network.predict(inputs, targets)
        if answers is not None:
            self._answers[prefix].append((inputs[EXAMPLE].cpu(), answers.cpu()))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Update ``val/…`` metrics."""
        self.update_metrics(self.val_metrics, batch)
        self.log_dict(self.val_metrics, on_step=False, on_epoch=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Update ``test/…`` metrics."""
        self.update_metrics(self.test_metrics, batch)
        self.log_dict(self.test_metrics, on_step=False, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        """Log ``val/…`` scores of texts."""
        self._log_scores("val/")

    def on_test_epoch_end(self) -> None:
        """Log ``test/…`` scores of texts."""
        self._log_scores("test/")

    def _log_scores(self, stage: str) -> None:
        score = getattr(getattr(self.trainer, "datamodule", None), "score", None)
        for prefix, answers in self._answers.items():
            if score is None:
                raise FederationError("Texts are scored by the data: give the Trainer a datamodule that can, a client's.")
            self.log_dict({f"{stage}{prefix}{name}": value for name, value in score(answers).items()})
        self._answers.clear()


def of_its_own(loss: Loss | None) -> Loss | None:
    """A loss that a module can hold: a copy whose buffers (class weights) go where the module goes, and are in no state dict."""
    if not isinstance(loss, nn.Module):
        return loss
    loss = copy.deepcopy(loss)
    for module in loss.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, buffer, persistent=False)
    return loss
