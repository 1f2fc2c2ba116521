"""What a method is on the client: a LightningModule that learns in phases and knows which part of its state travels."""

import copy
import inspect
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self

import torch
from jsonargparse.typing import PositiveFloat
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from lightning_fed.core.exported import ExportedModule
from lightning_fed.core.hparams import StoredHyperparameters
from lightning_fed.core.measured import Loss, Metrics
from lightning_fed.core.messages import Broadcast
from lightning_fed.core.phased_module import CHECKPOINT, MOMENTS, Phase, Progress, default_optimizer
from lightning_fed.core.schedules import Interval
from lightning_fed.core.server import Server
from lightning_fed.data.client import ClientDataModule
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.errors import FederationError
from lightning_fed.models import Backbone, Backbones, Transformer, Wrapped, backbone_of
from lightning_fed.models.pretrained import with_weights
from lightning_fed.nn.buffer_dict import BufferDict
from lightning_fed.nn.learn_in_float32 import learn_in_float32
from lightning_fed.options import NonNegativeInt, PositiveInt
from lightning_fed.seeding import INITIAL, seeded
from lightning_fed.tasks.task import TaskName
from lightning_fed.tensors import State, check_dtypes, check_fits

OUTPUTS = "outputs"
"""The name of what a model says of public examples, ``(M, C)``."""


class FederatedModule(StoredHyperparameters, ExportedModule):
    """One client's model and how it learns. Every default is federated averaging's.

    The story of a round, in the order in which the hooks are called:

    1. :meth:`for_client` makes the module of a client that takes part for the first time; :meth:`build` creates its networks.
    2. :meth:`load_private_state` and :meth:`load_shared_state` bring it to where the client and the server are.
    3. :meth:`phases` says how it trains; each phase has its own loss. It is asked once.
    4. :meth:`review_step`, where a method has one, sees each batch of the training data once more; :meth:`after_training` gets what
       came of it.
    5. :meth:`shared_state` and :meth:`payload` are sent to the server, :meth:`private_state` stays with the client.

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
        gradient_clip: largest gradient norm of a step; None does not clip.
        loss: of outputs and targets, as ``torch.nn.CrossEntropyLoss`` with label smoothing; what it has of class weights moves with
            the module, and what it has of parameters is trained. None: the task's.
        metrics: more metrics of outputs and targets, by name.
        metric: the headline: the name of one of the task's metrics or of those in ``metrics``. None: the task's first.
        task: what is predicted: one class of several, any number of labels, or numbers; see :mod:`lightning_fed.tasks`. None: what
            the data say.
        lr_scheduler: builds the schedule of the learning rate from an optimizer: one of ``torch.optim.lr_scheduler``. None: the
            rate is constant.
        lr_interval: what the schedule counts: the rounds of the federation, or the epochs or steps of a phase of a round.
        adapt_epochs: before a client is measured or exported, its model is trained for so many epochs on its own training data; see
            :meth:`adaptation`. 0: it is measured as it is.
        adapt_steps: the same in optimizer steps.
        adapt_layers: what is adapted: everything that learns, the head alone, or what is private and learns.
        adapt_when: before every measurement; or ``last``: clients are measured as they are, and in the last round a second time,
            adapted (``adapted/…``), as papers tune everybody's head at the end. An export is adapted in both cases.
        adapt_optimizer: how. Default: ``optimizer``.
    """

    headline_model: Literal["clients", "global"] = "clients"
    """Whose :attr:`headline_metric` that is: the mean over the clients' models on their own test data, or that of the global
    model on everybody's.
    """

    heterogeneous = False
    """Whether clients may have different networks: not where the networks themselves are averaged."""

    alone: str | None = "Standalone"
    """The method that trains the same networks without sharing anything, if there is one: what sharing has to beat."""

    weighting: Literal["examples", "uniform"] = "examples"
    """How the server weights updates; see :class:`Server`."""

    flops_on_meta = True
    """Whether a step can be counted on the meta device; not where a network looks at numbers (attention masks)."""

    centralised = False
    """Whether everybody's pooled data are trained on, as if one client held them, instead of a cohort's."""

    keeps_received = False
    """Whether there is :attr:`received`."""

    received: BufferDict
    """Copies of the shared parameters that learn, by name, as they were when the fit began: as the server sent them, in a
    federation.
    """

    payload_varies = False
    """Whether names or shapes of :meth:`payload` differ between clients and rounds. :meth:`load_payload` then checks what comes,
    and the server says what it :meth:`expects <.Server.expected>`.
    """

    needs_public_data = False
    """Whether there have to be inputs that belong to nobody; see :meth:`.FederatedDataModule.public_set`."""

    public_batch_size: int | None = None
    """Size of the batches of public data; None: that of training."""

    server_validation: tuple[int, int | None] | None = None
    """Where the server trains: after how many steps it validates, and after how many steps that made it no better it stops (None:
    not before the end). The model that was best stays. None: the last one stays.
    """

    public_table_limit: float = math.inf
    """Bytes that what a model says of the public data may have in float32; what is larger is in bfloat16."""

    asked: Tensor | None = None
    """Numbers of the public examples about which a client is asked when it has trained: what its model says of them comes to
    :meth:`after_training`, under :data:`OUTPUTS`. None: it is not asked.
    """

    lesson_examples: Tensor | None = None
    """Numbers of the public examples on which :meth:`server_phases` and :meth:`lesson_phases` train; None: all."""

    copies_of: Literal["initial", "first_broadcast"] = "initial"
    """What :meth:`copied_names` are copies of: the shared part as it was before the first round, or as the client first gets it."""

    def __init__(
        self,
        backbone: Backbones,
        num_classes: PositiveInt | None = None,
        optimizer: OptimizerCallable = default_optimizer,
        epochs: NonNegativeInt = 1,
        gradient_clip: PositiveFloat | None = None,
        loss: Loss | None = None,
        metrics: Metrics | None = None,
        metric: str | None = None,
        task: TaskName | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: Interval = "round",
        adapt_epochs: NonNegativeInt = 0,
        adapt_steps: NonNegativeInt = 0,
        adapt_layers: Literal["all", "head", "private"] = "all",
        adapt_when: Literal["always", "last"] = "always",
        adapt_optimizer: OptimizerCallable | None = None,
    ) -> None:
        super().__init__(
            adapt_epochs=adapt_epochs,
            adapt_steps=adapt_steps,
            adapt_layers=adapt_layers,
            adapt_when=adapt_when,
            adapt_optimizer=adapt_optimizer,
            num_classes=num_classes,
            loss=loss,
            metrics=metrics,
            metric=metric,
            task=task,
            gradient_clip=gradient_clip,
            lr_scheduler=lr_scheduler,
            lr_interval=lr_interval,
        )
        self.store_hyperparameters(inspect.currentframe())
        self.backbone_factories: list[Any] = backbone if isinstance(backbone, list) else [backbone]
        if not self.backbone_factories:
            raise FederationError("backbone is an empty list: name at least one network.")
        if len(self.backbone_factories) > 1 and not self.heterogeneous:
            raise FederationError(
                f"{type(self).__name__} got {len(self.backbone_factories)} different backbones, but it averages their weights: "
                "give one backbone, or use a method for heterogeneous models (PFedLoRA, LGFedAvg, Standalone)."
            )
        self.optimizer = optimizer
        self.epochs = epochs
        self.client: ClientInfo | None = None
        self.frozen_names: frozenset[str] = frozenset()
        self._shared = self._private = self._statistics = self._payload = self._given = self.frozen_names
        self._keeps_moments: bool | None = None  # not asked yet
        self._built = False
        self._templates: dict[int, Self] = {}
        self._frozen: dict[tuple[int, Hashable], dict[str, nn.Parameter]] = {}

    # ------------------------------------------------------------------------------------------------- networks and state

    def build(self) -> None:
        """Create the networks of ``self.client``, the backbone first: what a method adds after ``super().build()`` then cannot
        shift the backbone's initial weights. ``self.client`` says whose network it is, with its label counts and how many clients
        there are; it is None where there is no client.
        """
        self.backbone: Backbone = self.new_backbone()

    def new_backbone(self) -> Backbone:
        """Another network of the client's architecture, with initial weights of its own."""
        return backbone_of(self._factory, self.num_classes)

    @property
    def _factory(self) -> Any:
        return self.backbone_factories[self.client.id % len(self.backbone_factories) if self.client else 0]

    def network_factory(self) -> tuple[Callable[..., nn.Module], dict[str, Any]]:
        """What makes the network that this module trains, and what it is given besides the number of classes."""
        return self._factory, {}

    def architecture(self, client: ClientInfo | None) -> Hashable:
        """Which network a client trains. Clients of one architecture take turns on one module in memory."""
        return client.id % len(self.backbone_factories) if client else 0

    def for_client(self, client: ClientInfo, seed: int = 0) -> Self:
        """A new module for ``client``, whose initial weights come from a random stream of the client's own. What is frozen, and
        neither travels nor stays, is no client's: all of an architecture have the same tensors, see :meth:`for_architecture`.

        Hyperparameters, and networks that ``__init__`` was given rather than :meth:`build` made, are shared, not copied.
        """
        return self._template(seed)._made(client, seed, client.id)

    def for_architecture(self, client: ClientInfo, seed: int = 0) -> Self:
        """A new module of the architecture of ``client``, in which nothing is the client's yet: all of it is drawn on the stream
        from which the federation's own module is drawn, and its frozen tensors are that one's, if it is of this architecture.
        """
        return self._template(seed)._made(client, seed)

    def _template(self, seed: int) -> Self:
        """This module, if its networks exist; else one with networks as a federation draws them."""
        if self._built:
            return self
        if seed not in self._templates:
            template = self.fresh()
            with seeded(seed, INITIAL):
                template.configure_model()
            self._templates[seed] = template
        return self._templates[seed]

    def _made(self, client: ClientInfo, seed: int, *own: int) -> Self:
        """A module with the frozen tensors of its architecture; the rest is drawn on the stream of (seed, initial, ``*own``)."""
        module, architecture = self._drawn(client, seed, *own), self.architecture(client)
        if module.frozen_parameters():
            if architecture == self.architecture(self.client):
                frozen = self.frozen_parameters()
            elif (frozen := self._frozen.get((seed, architecture), {})) == {}:
                frozen = (self._drawn(client, seed) if own else module).frozen_parameters()
                self._frozen[seed, architecture] = frozen
            module.take_frozen(frozen)
        return module

    def _drawn(self, client: ClientInfo, seed: int, *own: int) -> Self:
        module = self._copy()
        module.client = client
        with seeded(seed, INITIAL, *own):
            module.configure_model()
        if self.dtype != torch.float32:  # what a Trainer of another precision has made of the template
            module.to(self.dtype)
        return module

    def _copy(self) -> Self:
        """A module with the same attributes, to be built."""
        module = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, dict | set):  # where nn.Module keeps parameters, buffers and children
                vars(module)[name] = copy.copy(value)
        module._trainer, module._built, module._templates, module._frozen = None, False, {}, {}
        return module

    def blank(self) -> Self:
        """This method as it was before its networks were built, to be built again elsewhere. Networks that ``__init__`` was given
        stay.
        """
        module = self._copy()
        if self._built:
            for name in vars(self).keys() - self._given:
                del vars(module)[name]
            for place in ("_parameters", "_buffers", "_modules"):
                vars(module)[place] = {name: value for name, value in vars(self)[place].items() if name in self._given}
        module.progress, module._phase, module._phases, module._moments, module._schedules = Progress(), None, [], {}, {}
        return module

    def fresh(self) -> Self:
        """The same, to be drawn anew: of what has been drawn nothing is left. Default: :meth:`blank`."""
        return self.blank()

    def for_data(self, num_classes: int, task: TaskName) -> Self:
        """The module of a run on data of so many classes: this one, if its networks exist already; else a copy, so that no run
        finds what another one has drawn.

        Args:
            num_classes: of the data.
            task: what they say is predicted; what the module was made with goes before.

        Raises:
            FederationError: if it was made for another number of classes, built for another task, or is not defined for this one.
        """
        module = self if self._built else self.fresh()
        module.know_classes(num_classes)
        if self._built and self._task is None and task != self.task:
            raise FederationError(
                f"{type(self).__name__} has been built to predict {self.task}, but the data are of {task}: give it task={task!r}."
            )
        module.know_task(task)
        return module

    def of_other_networks(self, clients: Sequence[ClientInfo]) -> Iterator[tuple[ClientInfo, Self]]:
        """The first client of each further architecture with a module of its own: what has to fit this one's can be looked at
        before the first round.
        """
        return ((client, self.for_client(client)) for client in clients[1 : len(self.backbone_factories)])

    def starting_from(self, network: State, what: str = "The network") -> Self:
        """This method with networks that begin with the given weights instead of those that they are built with.

        Args:
            network: all tensors of a network, by their names in it.
            what: what that is, the subject of an error's sentence.

        Raises:
            FederationError: if the clients' networks have other tensors, or tensors of another shape.
        """
        module = self.fresh()
        networks = [backbone_of(factory, self.num_classes) for factory in self.backbone_factories]
        module.backbone_factories = [with_weights(each, network, what) for each in networks]
        return module

    def configure_model(self) -> None:
        """Lightning's hook for late model creation: calls :meth:`build` once."""
        if self._built:
            return
        datamodule = getattr(self._trainer, "datamodule", None)
        if self.client is None and isinstance(datamodule, ClientDataModule):
            self.client = datamodule.info  # trained alone: the Trainer knows whose data it has
        if self._num_classes is None and (known := getattr(datamodule, "num_classes", None)):
            self.know_classes(known)
        if (task := getattr(datamodule, "problem", None)) is not None:
            self.know_task(task)
        self._given = frozenset({*vars(self), *self._parameters, *self._buffers, *self._modules})
        self.build()
        learn_in_float32(self)
        self.val_metrics = self.configure_metrics().clone(prefix="val/")
        self.test_metrics = self.configure_metrics().clone(prefix="test/")
        self.headline_metric = self.choose_headline()
        if any(isinstance(module, Wrapped | Transformer) for module in self.modules()):
            self.flops_on_meta = False  # nobody knows what these networks look at
        self.frozen_names = self.find_frozen()
        self._shared, self._private = frozenset(self.shared_names()), frozenset(self.private_names())
        self._statistics, self._payload = frozenset(self.statistics_names()), frozenset(self.payload())
        if clash := sorted(self._payload & self.state_dict().keys()):
            raise FederationError(
                f"The payload of {type(self).__name__} names {clash[0]!r}, which is in the state dict: rename it."
            )
        if self.keeps_received:
            self.received = BufferDict(self._learning_shared(), persistent=False)
        self.start_copies(self.update_state() if self.copied_names() else {})
        self._built = True

    def shared_names(self) -> set[str]:
        """Names of the state-dict entries that travel. Default: all that are neither frozen nor statistics. Asked once, when the
        networks have been built.
        """
        return self.state_dict().keys() - self.frozen_names - self.statistics_names()

    def statistics_names(self) -> set[str]:
        """Names of the state-dict entries that neither travel nor stay: before each measurement they are gathered anew from all
        clients (static batch norm; see :mod:`lightning_fed.nn.static_batch_norm`). Default: none.
        """
        return set()

    def private_names(self) -> set[str]:
        """Names of the state-dict entries that stay with the client: what is neither shared nor frozen nor gathered."""
        return self.state_dict().keys() - self.frozen_names - self.statistics_names() - self.shared_names()

    def copied_names(self) -> dict[str, str]:
        """Names of the private entries that begin as copies of what travels, shared part or payload, each with the name of its
        original; see :attr:`copies_of`. A client that never took part keeps none: they are copied whenever it is measured. Default:
        none, each client draws what it keeps.
        """
        return {}

    def start_copies(self, shared: State) -> None:
        """Set what begins as a copy, from what travels."""
        if copies := self.copied_names():
            self.load_state_dict({name: shared[original] for name, original in copies.items()}, strict=False)

    def initial_copies(self) -> State:
        """What of the shared state, as it is now, new clients begin with copies of; empty where that is the broadcast's."""
        if self.copies_of != "initial" or not (copies := self.copied_names()):
            return {}
        originals = set(copies.values())
        return {name: tensor for name, tensor in self.update_state().items() if name in originals}

    def payload(self) -> State:
        """What travels beside the shared part, under names of its own, which are no entries of the state dict (prototypes, logits,
        control variates). Names and shapes are the same at any time, from when the networks are built: they are those that the
        server starts from, sends, and accepts; unless :attr:`payload_varies`. Default: nothing.
        """
        return {}

    def load_payload(self, payload: State) -> None:
        """Take over what the server sent under the names of :meth:`payload`. Default: nothing to do."""

    def frozen_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that nobody learns, sends or keeps, by their names in the state dict: they are no client's."""
        common = self.frozen_names - self._shared - self._private
        return {name: p for name, p in self.named_parameters(remove_duplicate=False) if name in common}

    def take_frozen(self, frozen: Mapping[str, nn.Parameter]) -> None:
        """Have these parameters themselves, and not copies of them, as :meth:`frozen_parameters`.

        Raises:
            FederationError: if other parameters are frozen here, or their shapes differ.
        """
        own = self.frozen_parameters()
        check_fits(dict(own), dict(frozen), f"What is frozen in {type(self).__name__}, which depends on the architecture alone,")
        taken = {id(p): frozen[name] for name, p in own.items()}
        for module in self.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and id(parameter) in taken:
                    setattr(module, name, taken[id(parameter)])  # which recurrent layers notice
        for name, parameter in own.items():
            parameter.data = frozen[name].data  # for whoever refers to it without having registered it

    def shared_state(self) -> State:
        """The part of the state dict that travels: a copy, on the CPU."""
        return self._state(self._shared)

    def update_state(self) -> State:
        """All that is sent to the server, :meth:`shared_state` and :meth:`payload`: a copy, on the CPU."""
        return self.shared_state() | {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.payload().items()}

    def private_state(self) -> State:
        """What the client keeps between its turns, the state of persistent optimizers included: a copy, on the CPU."""
        return self._state(self._private) | self._moments

    def load_shared_state(self, state: State) -> None:
        """Take over what the server sent. Raises :class:`FederationError` if it does not fit :meth:`shared_names`."""
        self._load_state(state, self._shared, "shared")

    def load_private_state(self, state: State) -> None:
        """Take over the client's own state. Raises :class:`FederationError` if it does not fit :meth:`private_names`."""
        moments = {name: tensor for name, tensor in state.items() if name.startswith(MOMENTS)}
        parameters = dict(self.named_parameters())
        if strange := [name for name in moments if name.split("/")[-2] not in parameters]:
            raise FederationError(
                f"The private state for {type(self).__name__} has moments of what is no parameter: {strange[0]!r}."
            )
        own = {name: tensor for name, tensor in state.items() if name not in moments}
        self._load_state(own, self._private, "private")
        self._moments = moments

    def statistics(self) -> State:
        """The entries of :meth:`statistics_names`: a copy, on the CPU."""
        return self._state(self._statistics)

    def load_statistics(self, state: State) -> None:
        """Take over what was gathered. Raises :class:`FederationError` if it does not fit :meth:`statistics_names`."""
        self._load_state(state, self._statistics, "statistics")

    def load_broadcast(self, broadcast: Broadcast) -> None:
        """Take over what the server sent, with payload and statistics if there are any."""
        state = broadcast.state
        if self._payload or self.payload_varies:
            payload = {name: tensor for name, tensor in state.items() if name not in self._shared}
            if not self.payload_varies:
                check_fits(payload, self.payload(), f"The payload for {type(self).__name__}")
            state = {name: tensor for name, tensor in state.items() if name in self._shared}
            self.load_payload(payload)
        self.load_shared_state(state)
        if broadcast.statistics:
            self.load_statistics(broadcast.statistics)

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        """The server of these clients, holding this module's shared state and payload. Default: the average, weighted by
        :attr:`weighting`. It is a whole model, to be measured as such, if nothing stays with the clients.
        """
        return Server(self.update_state(), self.weighting, holds_model=self.shares_whole_model)

    @property
    def has_private_state(self) -> bool:
        """Whether anything stays with the client between its turns."""
        if self._keeps_moments is None:
            self._keeps_moments = any(phase.persistent for phase in self.phases())
        return bool(self._private) or self._keeps_moments

    @property
    def has_statistics(self) -> bool:
        """Whether anything is to be gathered before a measurement."""
        return bool(self._statistics)

    def _state(self, names: frozenset[str]) -> State:
        return {name: t.detach().to("cpu", copy=True) for name, t in self.state_dict().items() if name in names}

    def _load_state(self, state: State, names: frozenset[str], kind: str) -> None:
        expected = {name: tensor for name, tensor in self.state_dict().items() if name in names}
        check_fits(state, expected, f"The {kind} state for {type(self).__name__}")
        if kind == "private":  # which comes from a file
            check_dtypes(state, expected, f"The {kind} state for {type(self).__name__}", ".")
        self.load_state_dict(state, strict=False)

    # ------------------------------------------------------------------------------------------------------------ learning

    def forward(self, x: Any) -> Tensor:
        """Logits ``(B, num_classes)``, what a client predicts with."""
        logits: Tensor = self.predictor(x)
        return logits

    def phases(self) -> list[Phase]:
        """The local procedure of a round. Default: ``epochs`` epochs of :meth:`client_loss` on everything."""
        return [Phase("local", list(self.parameters()), self.client_loss, self.optimizer, epochs=self.epochs)]

    def review_step(self, batch: Any) -> State:
        """Look at a batch of the client's training data once more, when it has trained: in order, not augmented, with the module in
        eval mode and without gradients (``torch.enable_grad()`` brings them back). A method that has this step gets such a pass in
        each of its turns; its FLOPs count as training.

        Returns:
            Tensors by name, which are summed over the batches and given to :meth:`after_training`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not review its data: it would have to override review_step().")

    @property
    def reviews(self) -> bool:
        """Whether there is a :meth:`review_step`."""
        return type(self).review_step is not FederatedModule.review_step

    def after_training(self, reviewed: State) -> None:
        """What is left to do between a client's training and its update: called in a federation, once per turn, before the update
        and the private state are taken. Default: nothing.

        Args:
            reviewed: the sums of what :meth:`review_step` returned, on the CPU, and :data:`OUTPUTS` where the client was
                :attr:`asked`; empty without either.
        """

    def server_phases(self) -> list[Phase]:
        """How the server trains a model on public data, for methods whose server does; see :meth:`.Server.learn`. It begins with
        the model that the server names, and learns from the numbers of examples, which a batch has in place of targets, and from
        what came as :meth:`payload`; see :attr:`public_batch_size` and :attr:`server_validation`. Default: it does not.
        """
        return []

    def lesson_phases(self) -> list[Phase]:
        """How a client trains on public data: before its own, if what it was sent says so; or when the server has merged, see
        :meth:`.Server.lesson`. It is asked when the broadcast has been loaded. Default: it does not.
        """
        return []

    # ---------------------------------------------------------------------------------------------------------- what was received

    def _learning_shared(self) -> State:
        shared = self._shared - self.frozen_names
        return {name: parameter for name, parameter in self.named_parameters() if name in shared}

    def on_fit_start(self) -> None:
        """Remember where the fit starts from, for methods that ask for it; a continued fit started where its checkpoint says."""
        super().on_fit_start()
        if self.keeps_received:
            self.received.update(self._stopped["received"] if self._stopped else self._learning_shared())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add where the fit started from."""
        super().on_save_checkpoint(checkpoint)
        checkpoint[CHECKPOINT]["received"] = dict(self.received.items()) if self.keeps_received else {}
