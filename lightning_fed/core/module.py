"""What a method is on the client: a LightningModule that learns in phases and knows which part of its state travels."""

import inspect
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Literal, Self

from jsonargparse.typing import PositiveFloat
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fed.core.client_modules import ClientModules, unbuilt_copy
from lightning_fed.core.fine_tuning import FineTuning
from lightning_fed.core.hparams import NOT_STORED, refuse_missing, store_hyperparameters
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
from lightning_fed.models.frozen import is_frozen
from lightning_fed.models.networks import Networks
from lightning_fed.nn.learn_in_float32 import learn_in_float32
from lightning_fed.nn.server_optimizers import ServerOptimizer
from lightning_fed.options import NonNegativeInt, PositiveInt
from lightning_fed.tasks.task import Loss, Metrics, TaskName
from lightning_fed.tensors import State


class FederatedModule(PredictionMixin, SharedStateMixin, PhasedModule):
    """One client's model and how it learns. Every default is federated averaging's.

    The story of a round, in the order in which the hooks are called:

    1. :meth:`for_client` makes the module of a client that takes part for the first time; :meth:`build` creates its networks.
    2. :meth:`load_private_state` and :meth:`load_shared_state` bring it to where the client and the server are.
    3. :meth:`phases` says how it trains; each phase has its own loss. It is asked once.
    4. :meth:`post_training_step`, where a method has one, sees each batch of the training data once more; :meth:`after_training`
       gets what came of it.
    5. :meth:`shared_state` and :meth:`payload` are sent to the server, :meth:`private_state` stays with the client.

    What is shared and what is private: :class:`.SharedStateMixin`; outputs, loss and metrics: :class:`.PredictionMixin`.

    A method usually overrides :meth:`build`, :meth:`shared_names` and :meth:`phases`; a bilevel one :meth:`compute_gradients`.
    Almost never override ``training_step``, ``configure_model`` or ``configure_optimizers``: they run the phases.

    It needs no federation: ``L.Trainer(max_epochs=2).fit(module, data.client(0))`` trains one client, running the phases one
    after the other and again from the first until the Trainer stops.

    Args:
        backbone: the network that every client trains: a class or function that builds one for a number of classes (a
            :class:`Backbone`, ``torchvision.models.resnet18``), its dotted path, or a network itself, of which each client gets a
            copy; or a list of such, of which client ``k`` gets entry ``k mod len(list)``. See :func:`.backbone_of`.
        num_classes: number of classes, or of labels or values that are predicted; None: as many as the data have.
        optimizer: how a client steps. Default: SGD, lr 0.01.
        epochs: local epochs per round.
        steps: optimizer steps per round, instead of epochs.
        persistent: whether the optimizer's state (moments) stays with the client between its turns; else each begins with none.
        weighting: how the server weights updates, by training ``examples`` or ``uniform``; None: as the method does.
        server_optimizer: how the server steps to the mean of the parameters that it was sent, with momentum, say
            (:class:`.ServerSGD`); for methods whose server averages. None: it takes the mean.
        gradient_clip: largest gradient norm of a step; None does not clip.
        accumulate: batches whose gradients make a step, that of the mean over all of their examples.
        loss: of outputs and targets, as ``torch.nn.CrossEntropyLoss`` with label smoothing; what it has of class weights moves with
            the module, and what it has of parameters is trained, or refused. None: the task's.
        metrics: more metrics of outputs and targets, by name.
        metric: the monitored metric: the name of one of the task's metrics or of those in ``metrics``. None: the task's first.
        task: what is predicted: one class of several, any number of labels, or numbers; see :mod:`lightning_fed.tasks`. None: what
            the data say.
        lr_scheduler: builds the schedule of the learning rate from an optimizer: one of ``torch.optim.lr_scheduler``. None: the
            rate is constant.
        lr_interval: what the schedule counts: the rounds of the federation, or the epochs or steps of a phase of a round.
        adapters: low-rank adapters that learn in the backbone's place: the network is frozen, its head learns with them, and what
            travels, stays and is optimized is theirs. None: the whole network learns.
        fine_tuning: how a client's model is tuned to its own training data before it is measured or exported; None: it is measured
            as it is.
    """

    monitor_model: Literal["clients", "global"] = "clients"
    """Whose :attr:`monitor` that is: the mean over the clients' models on their own test data, or that of the global
    model on everybody's.
    """

    heterogeneous = False
    """Whether clients may have different networks: not where the networks themselves are averaged."""

    local_baseline: str | None = "Standalone"
    """The method that trains the same networks without sharing anything, if there is one: what sharing has to beat."""

    weighting: Literal["examples", "uniform"] = "examples"
    """How the server weights updates; see :class:`Server`."""

    refuses_adapters = ""
    """Why ``adapters`` cannot be put on the method's networks, as the rest of a sentence; empty: they can."""

    flops_on_meta = True
    """Whether a step can be counted on the meta device; not where a network looks at numbers (attention masks)."""

    centralized = False
    """Whether everybody's pooled data are trained on, as if one client held them, instead of a cohort's."""

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
        self._not_stored = store_hyperparameters(self, inspect.currentframe())
        self.set_task(num_classes, task, loss, metrics, metric)
        self.fine_tuning = fine_tuning or FineTuning(epochs=0)
        self.fine_tuning.check(self)
        self.networks = Networks(backbone, adapters, type(self))
        if isinstance(optimizer, Optimizer):
            raise FederationError(
                f"optimizer is a {type(optimizer).__name__} of parameters that exist already: give what makes one, its class or "
                f"partial(torch.optim.{type(optimizer).__name__}, lr=…), since each client has its own."
            )
        self.optimizer = optimizer
        self.epochs, self.steps, self.persistent = epochs, steps, persistent
        self.weighting = weighting or type(self).weighting
        self.server_optimizer = server_optimizer
        self.client: ClientInfo | None = None
        self.frozen_names: frozenset[str] = frozenset()
        self._shared = self._private = self._statistics = self._payload = self.given_attributes = self.frozen_names
        self._keeps_moments: bool | None = None  # not asked yet
        self.is_built = False
        self._clients: dict[int, ClientModules[Self]] = {}
        self.frozen_by_architecture: dict[tuple[int, Hashable], dict[str, nn.Parameter]] = {}
        self.check_task()

    # ------------------------------------------------------------------------------------------------- networks and state

    def build(self) -> None:
        """Create the networks of ``self.client``, the backbone first: what a method adds after ``super().build()`` then cannot
        shift the backbone's initial weights. ``self.client`` says whose network it is, with its label counts and how many clients
        there are; it is None where there is no client.
        """
        self.backbone: Backbone = self.new_backbone()

    def new_backbone(self, given: Any = None) -> Backbone:
        """Another network, with initial weights of its own; with adapters, these are the adapters' and the rest is in memory once.

        Args:
            given: what makes it, of ``backbone`` or added to ``self.networks``; None: what makes the client's.
        """
        if given is None:
            return self.networks.new(self._factory, self.num_classes, self.place)
        return self.networks.new(given, self.num_classes)

    def without_adapters(self) -> Any:
        """The client's network as it is frozen, before anything is put on it."""
        return self.networks.without_adapters(self._factory, self.num_classes)

    @property
    def place(self) -> int:
        """Which entry of ``backbone`` the client's network is."""
        return self.client.id % len(self.networks.factories) if self.client else 0

    @property
    def _factory(self) -> Any:
        return self.networks.factories[self.place]

    def network_factory(self) -> tuple[Callable[..., nn.Module], dict[str, Any]]:
        """What makes the network that this module trains, and what it is given besides the number of classes."""
        return self._factory, {}

    def architecture(self, client: ClientInfo | None) -> Hashable:
        """Which network a client trains, and in which size. Clients of one architecture take turns on one module in memory."""
        return (client.id % len(self.networks.factories), client.model_size) if client else (0, None)

    @property
    def model_size(self) -> float | None:
        """How large a version of the model the client has, see :attr:`.ClientInfo.model_size`. None: the whole, or no client."""
        return self.client.model_size if self.client else None

    def for_client(self, client: ClientInfo, seed: int = 0) -> Self:
        """A new module for ``client``, whose initial weights come from a random stream of the client's own. What is frozen, and
        neither travels nor stays, is no client's: all of an architecture have the same tensors.

        Hyperparameters, and networks that ``__init__`` was given rather than :meth:`build` made, are shared, not copied.
        """
        if self.is_built:
            return ClientModules(self, seed).of(client)
        if seed not in self._clients:  # which has a template of its own
            self._clients[seed] = ClientModules(self, seed)
        return self._clients[seed].of(client)

    def unbuilt_copy(self) -> Self:
        """This method as it was before its networks were built, to be drawn anew. Networks that ``__init__`` was given stay."""
        module = unbuilt_copy(self)
        module.networks = self.networks.fresh()
        return module

    def with_initial_weights(self, network: State, what: str = "The network") -> Self:
        """This method with networks that begin with the given weights instead of those that they are built with.

        Args:
            network: all tensors of a network, by their names in it.
            what: what that is, the subject of an error's sentence.

        Raises:
            FederationError: if the clients' networks have other tensors, or tensors of another shape.
        """
        module = self.unbuilt_copy()
        module.networks = self.networks.with_weights(network, self.num_classes, what)
        return module

    def configure_model(self) -> None:
        """Lightning's hook for late model creation: calls :meth:`build` once."""
        if self.is_built:
            return
        datamodule = getattr(self._trainer, "datamodule", None)
        if self.client is None and isinstance(datamodule, ClientDataModule):
            self.client = datamodule.info  # trained alone: the Trainer knows whose data it has
        self.know_data(datamodule)
        self.given_attributes = frozenset({*vars(self), *self._parameters, *self._buffers, *self._modules})
        if self.networks.frozen:  # before anything is drawn that depends on the client
            self.networks.load(self.num_classes)
        self.build()
        learn_in_float32(self)
        self.make_metrics()
        self.frozen_names = self.find_frozen()
        self._shared, self._private = frozenset(self.shared_names()), frozenset(self.private_names())
        self._statistics, self._payload = frozenset(self.recomputed_buffers()), frozenset(self.payload())
        if clash := sorted(self._payload & self.state_dict().keys()):
            raise FederationError(
                f"The payload of {type(self).__name__} names {clash[0]!r}, which is in the state dict: rename it."
            )
        self.load_initial(self.update_state() if self.initialized_from() else {})
        self.is_built = True
        if idle := self._idle_of_loss():
            raise FederationError(
                f"{type(self).__name__} trains no parameters of a loss, but {type(self.task.loss).__name__} has {idle[0]}: give "
                "another loss, or let it require no gradients."
            )

    def _idle_of_loss(self) -> list[str]:
        """The parameters of the loss that no phase trains."""
        if not (learning := [(name, p) for name, p in self.task.named_parameters() if p.requires_grad]):
            return []
        trained = {id(p) for phase in self.phases() for p in phase.parameters}
        return [name.removeprefix("loss.") for name, p in learning if id(p) not in trained]

    def find_frozen(self) -> frozenset[str]:
        """See :meth:`.PhasedModule.find_frozen`; statistics of batch normalisation that is frozen are, too."""
        norms = ((name, layer) for name, layer in self.named_modules(remove_duplicate=False) if is_frozen(layer))
        statistics = {f"{name}.{own}" for name, layer in norms for own in layer.state_dict()}
        return super().find_frozen() | statistics

    def learning_parameters(self, network: nn.Module) -> list[nn.Parameter]:
        """The parameters of one of the networks that are not frozen."""
        frozen = {id(p) for name, p in self.named_parameters(remove_duplicate=False) if name in self.frozen_names}
        return [p for p in network.parameters() if id(p) not in frozen]

    def frozen_layers(self) -> Iterable[nn.Module]:
        """Batch normalisation whose statistics are frozen."""
        return filter(is_frozen, self.modules())

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        """The server of these clients, holding this module's shared state and payload. Default: the average, weighted by
        :attr:`weighting`. It is a whole model, to be measured as such, if nothing stays with the clients.
        """
        return Server(self.update_state(), self.weighting, holds_model=self.shares_whole_model)

    def cohort(self, clients: Sequence[ClientInfo], round: int, seed: int) -> Sequence[ClientInfo] | None:
        """Who takes part in a round, where a method says it: a function of its arguments. Default: None, as many are drawn as the
        federation's ``participation`` says.

        Args:
            clients: those that may take part.
            round: from 1.
            seed: the run's.
        """
        return None

    def check_rounds(self, rounds: int) -> None:
        """Called before the first round of a run, which is to have so many, to say in a line what these are too few for. Default:
        nothing.
        """

    def new_server(self, clients: Sequence[ClientInfo]) -> Server:
        """The server of a run: :meth:`configure_server`'s, with the ``server_optimizer`` if there is one."""
        server = self.configure_server(clients)
        if self.server_optimizer is not None:
            parameters = {name for name, _ in self.named_parameters(remove_duplicate=False)}
            server.optimize_with(self.server_optimizer, parameters, type(self).__name__)
        return server

    # ------------------------------------------------------------------------------------------------------------ learning

    def forward(self, x: Any) -> Tensor:
        """Outputs ``(B, num_classes)``, what a client predicts with. A module that nobody has trained is built for that."""
        if not self.is_built:
            if self._num_classes is None and (outputs := self.networks.num_outputs) is not None:
                self.know_classes(outputs)
            self.configure_model()
        return super().forward(x)

    def client_loss(self, batch: Any) -> Tensor:
        """The loss of a batch: :meth:`criterion` of outputs and targets."""
        x, y = self.unpack(batch)
        return self.criterion(self(x), y)

    def phases(self) -> list[Phase]:
        """The local procedure of a round. Default: :meth:`local_phase` of everything on :meth:`client_loss`."""
        return [self.local_phase("local", list(self.parameters()), self.client_loss)]

    def local_phase(self, name: str, parameters: Sequence[nn.Parameter], loss: Callable[[Any], Tensor], **options: Any) -> Phase:
        """A phase of ``epochs`` epochs or ``steps`` steps; the arguments are those of :class:`.Phase`."""
        defaults: dict[str, Any] = {"optimizer": self.optimizer, "persistent": self.persistent}
        length = {"epochs": self.epochs} if self.steps is None else {"steps": self.steps}
        return Phase(name, parameters, loss, **defaults | length | options)

    def post_training_step(self, batch: Any) -> State:
        """Look at a batch of the client's training data once more, when it has trained: in order, not augmented, with the module in
        eval mode and without gradients (``torch.enable_grad()`` brings them back). A method that has this step gets such a pass in
        each of its turns; its FLOPs count as training.

        Returns:
            Tensors by name, which are summed over the batches and given to :meth:`after_training`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not review its data: it would have to override post_training_step()."
        )

    @property
    def has_post_training_step(self) -> bool:
        """Whether there is a :meth:`post_training_step`."""
        return type(self).post_training_step is not FederatedModule.post_training_step

    def after_training(self, reviewed: State) -> None:
        """What is left to do between a client's training and its update: called in a federation, once per turn, before the update
        and the private state are taken. Default: nothing.

        Args:
            reviewed: the sums of what :meth:`post_training_step` returned, on the CPU; empty without it.
        """

    def fine_tuning_phases(self) -> list[Phase]:
        """How a federation tunes a client's model before it is measured or exported: like training, from the random stream of
        (seed, round, client). What comes of it is thrown away. Default: as ``fine_tuning`` says; empty: as it is.
        """
        return self.fine_tuning.phases(self)

    # ------------------------------------------------------------------------------------------------------------ checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what the module was made with that could not be stored."""
        super().on_save_checkpoint(checkpoint)
        checkpoint[NOT_STORED] = self._not_stored

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Self:
        """The module of a Trainer's checkpoint; nothing that it was made with has to be given again.

        Raises:
            FederationError: where something was a lambda, an object or the like, which has no name: give it again.
        """
        try:
            return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)
        except Exception as error:
            refuse_missing(cls, checkpoint_path, kwargs, error)
            raise
