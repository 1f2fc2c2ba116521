"""The client side of a method: a LightningModule that trains in phases and shares part of its state with the server."""

import inspect
import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Literal, Self

from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fed.core.client_modules import ClientModules, as_before_build
from lightning_fed.core.fine_tuning import FineTuning
from lightning_fed.core.hparams import NOT_STORED, check_choices, refuse_missing, store_hyperparameters
from lightning_fed.core.phase import Phase
from lightning_fed.core.phased_module import PhasedModule, default_optimizer
from lightning_fed.core.predictions import PredictionMixin
from lightning_fed.core.schedules import Interval
from lightning_fed.core.server import Server
from lightning_fed.core.shared_state import SharedStateMixin
from lightning_fed.data.client import ClientDataModule
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.errors import FederationError
from lightning_fed.models import Adapters, Backbone, Backbones
from lightning_fed.models.answers import Answers
from lightning_fed.models.frozen import is_frozen
from lightning_fed.models.networks import Networks
from lightning_fed.nn.learn_in_float32 import learn_in_float32
from lightning_fed.nn.server_optimizers import ServerOptimizer
from lightning_fed.options import NonNegativeInt, PositiveFloat, PositiveInt
from lightning_fed.tasks.task import Loss, Metrics, TaskName
from lightning_fed.tensors import State, second_names

log = logging.getLogger(__name__)


class FederatedModule(PredictionMixin, SharedStateMixin, PhasedModule):
    """A client's model and its training procedure. All defaults are those of federated averaging.

    Hooks in the order in which a round calls them:

    1. :meth:`build` creates networks: once per architecture in each worker, for a module that the clients of that architecture use
       in turn, and again wherever the initial private state of a client is drawn.
    2. :meth:`load_private_state` and :meth:`load_shared_state` load the client's state and the server's state.
    3. :meth:`phases` returns the training phases, each with its own loss, once per turn to train. It is also called outside turns,
       to describe or check the training, and then ``self.client`` may be None: it must have no side effects.
    4. :meth:`post_training_step`, if the method has one, gets each batch of the training data once more; :meth:`after_training`
       gets the results.
    5. :meth:`shared_state` and :meth:`payload` are sent to the server; :meth:`private_state` stays with the client.

    :class:`.SharedStateMixin` describes shared and private state, :class:`.PredictionMixin` outputs, loss and metrics.

    Most methods override :meth:`build`, :meth:`shared_names` and :meth:`phases`; bilevel methods override
    :meth:`compute_gradients`. Avoid overriding ``training_step``, ``configure_model`` or ``configure_optimizers``: they run the
    phases.

    The module also trains without a federation: ``L.Trainer(max_epochs=2).fit(module, data.client(0))`` trains one client. It
    runs the phases in order and starts over until the Trainer stops.

    Args:
        backbone: network that every client trains: a class or function that builds one for a number of classes (a
            :class:`Backbone`, ``torchvision.models.resnet18``), its dotted path, or a network, which is copied for each client; or
            a list of these, of which client ``k`` gets entry ``k mod len(list)``. See :func:`.backbone_of`.
        num_classes: number of classes, or of predicted labels or values. None: taken from the data.
        optimizer: client optimizer. Default: SGD, lr 0.01.
        epochs: local epochs per round.
        steps: local optimizer steps per round, instead of epochs.
        persistent: whether each client keeps its optimizer state (moments) between rounds; otherwise every turn starts without.
        weighting: weights of the updates at the server: number of training ``examples``, or ``uniform``. None: the method's own.
        server_optimizer: server optimizer, which steps towards the mean of the received parameters, with momentum for example
            (:class:`.ServerSGD`); only for methods whose server averages. None: the mean replaces the parameters.
        gradient_clip: maximum gradient norm of a step. None: no clipping.
        accumulate: number of batches per optimizer step; the gradient is that of the mean over all their examples. With
            class weights, what a method adds to the loss counts by them, too.
        loss: loss of outputs and targets, such as ``torch.nn.CrossEntropyLoss`` with label smoothing. Its class weights move with
            the module; its parameters are trained, or refused if no phase trains them. Targets that it ignores are measured
            without if it has an attribute ``ignore_index``, or is a ``functools.partial`` with it. None: the task's.
        metrics: additional metrics of outputs and targets, by name, each of one number.
        metric: monitored metric: the name of one of the task's metrics or of an entry of ``metrics``. None: the task's first.
        task: kind of prediction: one of several classes, any number of labels, or numbers; see :mod:`lightning_fed.tasks`. None:
            taken from the data.
        lr_scheduler: builds a learning-rate schedule from an optimizer: one of ``torch.optim.lr_scheduler``. None: the learning
            rate is constant.
        lr_interval: unit that the schedule counts: rounds of the federation, or epochs or steps of a phase within a round.
        adapters: low-rank adapters to train in place of the backbone. The backbone is frozen; the adapters and the head are
            trained, shared or kept private. None: the whole network is trained.
        fine_tuning: how a client's model is fine-tuned on its training data before it is evaluated or exported. None: no
            fine-tuning.
    """

    monitor_model: Literal["clients", "global"] = "clients"
    """The model that :attr:`monitor` refers to: ``clients``, the mean over the clients' models on their own test data, or
    ``global``, the global model on the test data of all clients.
    """

    heterogeneous = False
    """Whether clients may have different networks; False for methods that average the networks themselves."""

    local_baseline: str | None = "Standalone"
    """The method that trains the same networks without sharing, as a baseline; None: there is none."""

    weighting: Literal["examples", "uniform"] = "examples"
    """How the server weights updates; see :class:`Server`."""

    refuses_adapters = ""
    """Why the method's networks take no ``adapters``, as the rest of a sentence. Empty: they take them."""

    flops_without_values = True
    """Whether a step can be counted on tensors without values; False if the method reads values."""

    centralized = False
    """Whether the method trains on the pooled data of all clients, as if one client held them, instead of on a cohort's."""

    def __init__(
        self,
        backbone: Backbones,
        num_classes: PositiveInt | None = None,
        optimizer: OptimizerCallable = default_optimizer,
        epochs: NonNegativeInt = 1,
        steps: NonNegativeInt | None = None,
        persistent: bool = False,
        weighting: Literal["examples", "uniform"] | None = None,
        server_optimizer: ServerOptimizer | None = None,
        gradient_clip: PositiveFloat | None = None,
        accumulate: PositiveInt = 1,
        loss: Loss | None = None,
        metrics: Metrics | None = None,
        metric: str | None = None,
        task: TaskName | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: Interval = "round",
        fine_tuning: FineTuning | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        super().__init__(gradient_clip, lr_scheduler, lr_interval, accumulate)
        check_choices(self, inspect.currentframe())
        self._not_stored = store_hyperparameters(self, inspect.currentframe())
        self.set_task(num_classes, task, loss, metrics, metric)
        self.fine_tuning = fine_tuning or FineTuning(epochs=0)
        self.fine_tuning.check(self)
        self.networks = Networks(backbone, adapters, type(self))
        if isinstance(optimizer, Optimizer):
            raise FederationError(
                f"optimizer is an object of {type(optimizer).__name__}, but each client needs its own: pass a class, or "
                f"functools.partial(torch.optim.{type(optimizer).__name__}, lr=…)."
            )
        self.optimizer = optimizer
        self.epochs, self.steps, self.persistent = epochs, steps, persistent
        self.weighting = weighting or type(self).weighting
        self.server_optimizer = server_optimizer
        self.client: ClientInfo | None = None
        self.check_task()

    def _begin(self) -> None:
        super()._begin()
        self.frozen_names: frozenset[str] = frozenset()
        self._shared = self._private = self._statistics = self._payload = self._built = self.given_attributes = self.frozen_names
        self._second_names: dict[str, str] = {}
        self._keeps_moments: bool | None = None  # not asked yet
        self.is_built = False
        self.answers = Answers()
        self._clients: dict[int, ClientModules[Self]] = {}
        self.frozen_by_architecture: dict[tuple[int, Hashable], dict[str, nn.Parameter]] = {}

    # ------------------------------------------------------------------------------------------------- networks and state

    def build(self) -> None:
        """Create the networks of ``self.client``.

        Build the backbone first: networks that are added after ``super().build()`` then do not shift its initial weights.
        ``self.client`` holds the client's label counts and the number of clients; it is None outside a federation.
        """
        self.backbone: Backbone = self.new_backbone()

    def new_backbone(self, given: Any = None) -> Backbone:
        """Another network with its own initial weights; with adapters, only these are new and the rest is shared in memory.

        Args:
            given: factory of the network, from ``backbone`` or added to ``self.networks``. None: the client's.
        """
        if given is None:
            return self.networks.new(self._factory, self.num_classes, self.place)
        return self.networks.new(given, self.num_classes)

    def without_adapters(self) -> Any:
        """The client's frozen network, before adapters are attached."""
        return self.networks.without_adapters(self._factory, self.num_classes)

    @property
    def place(self) -> int:
        """Index of the client's network in ``backbone``."""
        return self.client.id % len(self.networks.factories) if self.client else 0

    @property
    def _factory(self) -> Any:
        return self.networks.factories[self.place]

    def network_factory(self) -> tuple[Callable[..., nn.Module], dict[str, Any]]:
        """The factory of the network that this module trains, and its arguments besides the number of classes."""
        return self._factory, {}

    def architecture(self, client: ClientInfo | None) -> Hashable:
        """Key of the network that a client trains, and its size. Clients of the same architecture share one module in memory."""
        return (client.id % len(self.networks.factories), client.model_size) if client else (0, None)

    @property
    def model_size(self) -> float | None:
        """Size of the client's version of the model, see :attr:`.ClientInfo.model_size`. None: the whole model, or no client."""
        return self.client.model_size if self.client else None

    def for_client(self, client: ClientInfo, seed: int = 0) -> Self:
        """A new module for ``client``, whose initial weights are drawn from the client's own random stream.

        Frozen tensors that are neither shared nor private are the same objects for all clients of an architecture. Layers that were
        made in ``__init__`` (rather than in :meth:`build`) are copied, so that all clients begin with the same weights.
        """
        if self.is_built:
            return ClientModules(self, seed).of(client)
        if seed not in self._clients:  # a seed has its own template
            self._clients[seed] = ClientModules(self, seed)
        return self._clients[seed].of(client)

    def unbuilt_copy(self) -> Self:
        """This method without built networks, to draw them anew. Networks that were passed to ``__init__`` stay."""
        module = as_before_build(self)
        module.networks = self.networks.fresh()
        return module

    def with_initial_weights(self, network: State, what: str = "The network") -> Self:
        """This method with networks that start from the given weights.

        Args:
            network: all tensors of a network, by their names in it.
            what: subject of the error message.

        Raises:
            FederationError: if the clients' networks have other tensors, or tensors of other shapes.
        """
        module = self.unbuilt_copy()
        module.networks = self.networks.with_weights(network, self.num_classes, what)
        return module

    def configure_model(self) -> None:
        """Lightning's hook for late model creation; calls :meth:`build` once."""
        if self.is_built:
            return
        datamodule = getattr(self._trainer, "datamodule", None)
        if self.client is None and isinstance(datamodule, ClientDataModule):
            self.client = datamodule.info  # without a federation the Trainer knows whose data it has
        self.know_data(datamodule)
        self.given_attributes = frozenset({*vars(self), *self._parameters, *self._buffers, *self._modules})
        if self.networks.frozen:  # before any draw that depends on the client
            self.networks.load(self.num_classes)
        self.build()
        learn_in_float32(self)  # what a method has added
        self.make_metrics()
        self.frozen_names = self.find_frozen()
        self._second_names, self._payload = second_names(self), frozenset(self.payload())
        self._shared, self._statistics = self.first_names(self.shared_names()), self.first_names(self.recomputed_buffers())
        self._private = self.first_names(self.private_names()) - self._shared
        self.check_names()
        if self.initialized_from():
            self.check_tensors()
            self.load_initial(self.update_state())
        self.is_built = True
        if idle := self._idle_of_loss():
            raise FederationError(
                f"{type(self).__name__} does not train parameters of the loss, but {type(self.task.loss).__name__} has {idle[0]}: "
                "choose another loss, or set requires_grad=False."
            )

    def _idle_of_loss(self) -> list[str]:
        """Names of the loss's parameters that no phase trains."""
        if not (learning := [(name, p) for name, p in self.task.named_parameters() if p.requires_grad]):
            return []
        trained = {id(p) for phase in self.phases() for p in phase.parameters}
        return [name.removeprefix("loss.") for name, p in learning if id(p) not in trained]

    def find_frozen(self) -> frozenset[str]:
        """See :meth:`.PhasedModule.find_frozen`; includes the statistics of frozen batch normalisation layers."""
        norms = ((name, layer) for name, layer in self.named_modules(remove_duplicate=False) if is_frozen(layer))
        statistics = {f"{name}.{own}" for name, layer in norms for own in layer.state_dict()}
        return super().find_frozen() | statistics

    def learning_parameters(self, network: nn.Module) -> list[nn.Parameter]:
        """The parameters of ``network`` that are not frozen."""
        frozen = {id(p) for name, p in self.named_parameters(remove_duplicate=False) if name in self.frozen_names}
        return [p for p in network.parameters() if id(p) not in frozen]

    def frozen_layers(self) -> Iterable[nn.Module]:
        """Batch normalisation layers whose statistics are frozen."""
        return filter(is_frozen, self.modules())

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        """The server for these clients, which starts from this module's shared state and payload. Default: the average, weighted by
        :attr:`weighting`. If nothing is private to the clients, the server holds a whole model, which can be measured.
        """
        return Server(self.update_state(), self.weighting, holds_model=self.shares_whole_model)

    def cohort(self, clients: Sequence[ClientInfo], round: int, seed: int) -> Sequence[ClientInfo] | None:
        """The participants of a round, for methods that choose them: a function of its arguments. Default: None, clients are
        sampled as the federation's ``participation`` says.

        Args:
            clients: clients that may take part.
            round: from 1.
            seed: the run's seed.
        """
        return None

    def check_rounds(self, rounds: int) -> None:
        """Warn about a run with too few rounds for this method, and about options without effect; called before the first round.

        Args:
            rounds: number of rounds of the run.
        """
        if self.steps is not None and (epochs := self.hparams.get("epochs", 1)) != 1:
            log.warning(
                f"{type(self).__name__} trains for {self.steps} steps in a round (steps), so epochs={epochs} has no effect: set "
                "steps to null to train in epochs."
            )

    def new_server(self, clients: Sequence[ClientInfo]) -> Server:
        """The server of a run: that of :meth:`configure_server`, with ``server_optimizer`` if it is set.

        Raises:
            FederationError: for a ``weighting`` or a ``server_optimizer`` that this server does not have, for what would
                be sent and is no tensor of real numbers, and for what would be kept and is no tensor.
        """
        self.check_tensors()
        shared = {name: entry for name, entry in self.state_dict().items() if name in self._shared}
        for name, entry in (shared | self.payload()).items():
            if not isinstance(entry, Tensor) or entry.is_complex():
                kind = "complex" if isinstance(entry, Tensor) else f"a {type(entry).__name__}"
                raise FederationError(
                    f"{type(self).__name__} would send {name!r}, which is {kind}, and servers compute with real tensors: let the "
                    "network's state have such ones only (torch.view_as_real of complex ones)."
                )
        server = self.configure_server(clients)
        if self.weighting != server.weighting:
            raise FederationError(
                f"{type(self).__name__}'s server has weighting={server.weighting!r}, but got weighting={self.weighting!r}: leave "
                "weighting out."
            )
        if self.server_optimizer is not None:
            parameters = {name for name, _ in self.named_parameters(remove_duplicate=False)}
            server.optimize_with(self.server_optimizer, parameters, type(self).__name__)
        return server

    # ------------------------------------------------------------------------------------------------------------ learning

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call :meth:`forward`. Builds the module if it is not built yet."""
        if not self.is_built:
            if self._num_classes is None and (outputs := self.networks.num_outputs) is not None:
                self.know_classes(outputs)
            self.configure_model()
        return super().__call__(*args, **kwargs)

    def client_loss(self, batch: Any) -> Tensor:
        """The loss of a batch: :meth:`criterion` of outputs and targets."""
        x, y = self.unpack(batch)
        return self.criterion(self(x), y)

    def phases(self) -> list[Phase]:
        """The phases of a round's local training. Default: one :meth:`local_phase` of all parameters on :meth:`client_loss`."""
        return [self.local_phase("local", list(self.parameters()), self.client_loss)]

    def local_phase(self, name: str, parameters: Sequence[nn.Parameter], loss: Callable[[Any], Tensor], **options: Any) -> Phase:
        """A phase of ``epochs`` epochs or ``steps`` steps; takes the arguments of :class:`.Phase`."""
        defaults: dict[str, Any] = {"optimizer": self.optimizer, "persistent": self.persistent}
        length = {"epochs": self.epochs} if self.steps is None else {"steps": self.steps}
        return Phase(name, parameters, loss, **defaults | length | options)

    def post_training_step(self, batch: Any) -> State:
        """Process a batch of the client's training data once more after training.

        Batches come in order and without augmentation, the module is in eval mode and gradients are off (``torch.enable_grad()``
        turns them on). Methods that override this hook get one such pass per turn; its FLOPs count as training.

        Returns:
            Tensors by name. They are summed over the batches and passed to :meth:`after_training`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no post_training_step(): override it.")

    @property
    def has_post_training_step(self) -> bool:
        """Whether the method overrides :meth:`post_training_step`."""
        return type(self).post_training_step is not FederatedModule.post_training_step

    def after_training(self, sums: State) -> None:
        """Called once per turn after a client's training, before its update and its private state are taken. Default: nothing.

        Args:
            sums: sums of the tensors that :meth:`post_training_step` returned, on the CPU; empty without that hook.
        """

    def evaluation_phases(self) -> list[Phase]:
        """The phases with which every evaluation and export of a client's model begins, before those of :meth:`fine_tuning_phases`,
        if these run, on one random stream. The result is discarded. Default: none.
        """
        return []

    def fine_tuning_phases(self) -> list[Phase]:
        """The phases that fine-tune a client's model before it is evaluated or exported, on the random stream of
        (seed, round, client). The result is discarded. Default: those of ``fine_tuning``; empty: no fine-tuning.
        """
        return self.fine_tuning.phases(self)

    # ------------------------------------------------------------------------------------------------------------ checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Record which arguments of ``__init__`` could not be stored."""
        super().on_save_checkpoint(checkpoint)
        checkpoint[NOT_STORED] = self._not_stored

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Self:
        """The module of a Trainer's checkpoint, with the arguments that it was created with.

        Raises:
            FederationError: if an argument could not be stored (a lambda, an object without a name): pass it again.
        """
        try:
            return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)
        except Exception as error:
            refuse_missing(cls, checkpoint_path, kwargs, error)
            raise
