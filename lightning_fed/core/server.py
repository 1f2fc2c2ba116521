"""What the server keeps, what it sends, and how it merges what comes back."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import ClassVar, Literal

from lightning_fed.core.aggregation import WeightedMean, check_form, check_payload
from lightning_fed.core.client_state import ClientStates, RoundState
from lightning_fed.core.messages import Broadcast, ClientUpdate
from lightning_fed.core.robust import Aggregation
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.errors import FederationError, require
from lightning_fed.nn.server_optimizers import ServerOptimizer
from lightning_fed.tensors import State

ServerVerb = Literal["predict_public", "train_on_public", "evaluate"]
"""What can be done with a model of the server's."""

UPDATE, PRIVACY = "update/", "privacy/"
"""What the names of a :class:`ServerUpdate`'s tensors begin with in a checkpoint, and those of a :class:`Privacy`."""

RunOnServer = Callable[[ServerVerb, Iterable[Broadcast]], Iterator[ClientUpdate]]
"""Has the engine do that with each of some models, and hands on what comes of it, in order."""


Combine = Callable[[Iterable[tuple[State, float]], State], State]
"""Makes one state of a round's updates, which come with their weights, one at a time and in client order, and of the server's
state. Empty if none comes.
"""


def mean_of_updates(updates: Iterable[tuple[State, float]], state: State) -> State:
    """The weighted mean; see :class:`.WeightedMean`."""
    mean = WeightedMean()
    for update, weight in updates:
        mean.add(update, weight)
    return mean.result()


class Privacy:
    """What is done to a round's updates for the privacy of the clients. Default: nothing."""

    def clip(self, update: State, state: State) -> State:
        """Bound what one client contributes, before anything is combined.

        Args:
            update: what it sent.
            state: the server's, from which the client started.
        """
        return update

    def add_noise(self, combined: State, state: State, clients: int) -> State:
        """Hide what one client contributed, before the server's state is updated.

        Args:
            combined: of so many clients' updates.
            state: the server's, before the update.
            clients: how many.
        """
        return combined

    def note(self, round: int, updates: Collection[ClientUpdate]) -> None:
        """See which updates a round has merged. Default: nothing.

        Args:
            round: from 1.
            updates: with their metrics, without their payload.
        """

    def metrics(self) -> dict[str, float]:
        """What is reported of it after a round. Default: nothing."""
        return {}

    def spent(self) -> dict[str, float]:
        """What all rounds so far cost, reported where clients are measured: it may take seconds. Default: nothing."""
        return {}

    def state_dict(self) -> State:
        """What is kept from round to round (what has been spent, say): a part of the checkpoint, as that of :class:`ServerUpdate`.
        Default: nothing.
        """
        return {}

    def load_state_dict(self, state: State) -> None:
        """Continue from :meth:`state_dict`."""


class ServerUpdate:
    """How the combined updates become the server's new state. Default: they replace it."""

    one_unit: ClassVar[bool] = True
    """Whether all that is combined is a model: robust rules compare what is in its units alone."""

    def __call__(self, state: State, combined: State, clients: int) -> State:
        """The new state.

        Args:
            state: the one before.
            combined: of so many clients' updates.
            clients: how many.
        """
        return combined

    def state_dict(self) -> State:
        """What is kept from round to round (moments, say): a part of the checkpoint. A checkpoint is held against it before a run
        goes on, so that names, shapes and dtypes are the same from the beginning. Default: nothing.
        """
        return {}

    def load_state_dict(self, state: State) -> None:
        """Continue from :meth:`state_dict`."""


class PartialUpdate(ServerUpdate):
    """What no update brings stays as it is: for methods of which a part rests in some rounds."""

    def __call__(self, state: State, combined: State, clients: int) -> State:
        return state | combined


class OptimizerUpdate(ServerUpdate):
    """A step of an optimizer for each parameter; all else is replaced."""

    def __init__(self, optimizer: ServerOptimizer, parameters: State) -> None:
        self.optimizer = optimizer
        self.moments = {name: optimizer.initial(parameter) for name, parameter in parameters.items()}

    def __call__(self, state: State, combined: State, clients: int) -> State:
        steps = {name: self.optimizer.step(state[name], combined[name], own) for name, own in self.moments.items()}
        self.moments = {name: own for name, (_, own) in steps.items()}
        return combined | {name: weight for name, (weight, _) in steps.items()}

    def state_dict(self) -> State:
        """``<what>/<parameter>`` of all that is held."""
        return {f"{what}/{name}": tensor for name, own in self.moments.items() for what, tensor in own.items()}

    def load_state_dict(self, state: State) -> None:
        self.moments = {name: {what: state[f"{what}/{name}"] for what in own} for name, own in self.moments.items()}


class Server:
    r"""Federated averaging: one state, sent to everybody, replaced by the mean of the updates.

    With ``weighting="examples"`` (McMahan et al. 2017, Algorithm 1) client :math:`k` counts :math:`n_k / \sum_{j \in S} n_j`,
    :math:`n` being training examples and :math:`S` the clients that took part in the round; with ``"uniform"`` everybody counts
    the same. Either way the weights sum to 1 over the participants.

    A round's updates are merged in three parts, each of which can be another one: ``combine`` → ``privacy`` → ``update``.

    Args:
        state: the initial shared state.
        weighting: how updates are weighted.
        holds_model: whether the state is a whole model, which can be measured on the server's test data.
        combine: makes one state of the updates (robust rules, exact merging of low-rank factors). Default: the weighted mean.
        privacy: clips each update before that, and adds noise after it. Default: neither.
        update: makes the new state of the old and of the combined one (server optimizers). Default: the combined one.
    """

    round: int = 0
    """The running round, from 1."""

    cohort: Sequence[ClientInfo] = ()
    """Who takes part in it, in client order."""

    client_state: ClientStates
    """What is kept for each client from round to round, for servers that keep anything: in checkpoints, by reference."""

    round_state: RoundState
    """What is there of each client within a round: in no checkpoint. A server that keeps what arrives puts it here, and moves it
    when all of it is there; see :class:`.PersonalServer`.
    """

    def __init__(
        self,
        state: State,
        weighting: Literal["examples", "uniform"] = "examples",
        holds_model: bool = False,
        combine: Combine = mean_of_updates,
        privacy: Privacy | None = None,
        update: ServerUpdate | None = None,
    ) -> None:
        self.state = state
        self.weighting = weighting
        self.holds_model = holds_model
        self.combine = combine
        self.privacy = privacy or Privacy()
        self.update = update or ServerUpdate()

    def optimize_with(self, optimizer: ServerOptimizer, parameters: Collection[str], method: str) -> None:
        """Step to the mean of the updates as an optimizer does, from before the first round on.

        Args:
            optimizer: of the steps.
            parameters: names of those of the method's module; those that the state has are optimized.
            method: whose server it is, for an error.

        Raises:
            FederationError: if the server merges in a way of its own, or averages no parameters.
        """
        given = f"{method} got server_optimizer={type(optimizer).__name__}, but"
        require(
            type(self).aggregate is Server.aggregate and type(self.update) is ServerUpdate,
            f"{given} its server does not replace its state by the mean of the updates: leave server_optimizer out, or choose "
            "another method, such as FedAvg.",
        )
        own = {name: tensor for name, tensor in self.state.items() if name in parameters}
        require(len(own) > 0, f"{given} its clients send no parameters: leave server_optimizer out.")
        self.update = OptimizerUpdate(optimizer, own)

    def aggregate_with(self, rule: Aggregation, buffers: Collection[str], method: str) -> None:
        """Combine updates by a robust rule instead of the mean, from before the first round on.

        Args:
            rule: the rule.
            buffers: names of the buffers of the method's module.
            method: whose server it is, for an error.

        Raises:
            FederationError: if the server does not take a mean of states that are all alike.
        """
        require(
            type(self).aggregate is Server.aggregate
            and self.combine is mean_of_updates
            and self.update.one_unit
            and len(self.state) > 0,
            f"{method} got aggregation={type(rule).__name__}, but its server does not take a mean of models that are all alike: "
            "leave aggregation out, or choose another method, such as FedAvg.",
        )
        self.combine = lambda updates, state: rule.combine(updates, state, self.round_state, buffers)

    def protect_with(self, privacy: Privacy, combine: Combine, buffers: Collection[str], method: str) -> None:
        """Bound and hide what each client contributes, from before the first round on.

        Args:
            privacy: clips updates, and adds noise.
            combine: sums them.
            buffers: names of the buffers of the method's module.
            method: whose server it is, for an error.

        Raises:
            FederationError: where something about a client would leave the server without being hidden.
        """
        given, kind = f"{method} got privacy, but", type(self)
        learns = ("train_on_public", "public_training", "refresh_statistics")
        plain = ("aggregate", "broadcast", "on_round_start", "expected_payload", "weight", *learns)
        require(
            all(getattr(kind, hook) is getattr(Server, hook) for hook in plain)
            and self.combine is mean_of_updates
            and type(self.update) in (ServerUpdate, OptimizerUpdate),
            f"{given} its server is more than a mean of what clients send, and how much one of them changes it is not known: "
            "choose a method such as FedAvg, FedPer or PFedLoRA, and no aggregation.",
        )
        require(len(self.state) > 0, f"{given} its clients send nothing: there is nothing to protect.")
        exposed = [name for name, tensor in self.state.items() if name in buffers or not tensor.is_floating_point()]
        require(
            not exposed,
            f"{given} clients send {next(iter(exposed), '')!r}, a statistic with units of its own: privacy needs a network without "
            "batch norm in what travels (norm: group of ResNets), or FedBN.",
        )
        self.privacy, self.combine, self.weighting = privacy, combine, "uniform"

    def attach_storage(self, client_state: ClientStates, round_state: RoundState) -> None:
        """Where to keep something for each client: called once, before the first round and before a run is continued."""
        self.client_state, self.round_state = client_state, round_state

    def on_round_start(self, round: int, cohort: Sequence[ClientInfo]) -> None:
        """Prepare a round, the first thing in it. What is random about a round is drawn here: the global random streams are those
        of (seed, round). Default: note :attr:`round` and :attr:`cohort`.
        """
        self.round, self.cohort = round, cohort

    def weight(self, update: ClientUpdate) -> int:
        """How much an update counts."""
        return update.num_examples if self.weighting == "examples" else 1

    def broadcast(self, client: ClientInfo) -> Broadcast:
        """What ``client`` receives at the start of its turn."""
        return Broadcast(self.state)

    def evaluation_broadcast(self, client: ClientInfo) -> Broadcast:
        """What ``client`` is measured with. Default: what it would be sent."""
        return self.broadcast(client)

    def global_models(self) -> dict[str, Broadcast]:
        """Models that are measured on the server's test data, by name. Default: ``global``, if the state is a whole model."""
        return {"global": Broadcast(self.state)} if self.holds_model else {}

    def refresh_statistics(self, statistics_of: Callable[[Broadcast], State]) -> None:
        """Refresh the statistics of the models before they are measured, for methods that have any.

        Args:
            statistics_of: sends a model to all clients and returns the mean of their statistics over all batches.
        """

    def expected_payload(self, update: ClientUpdate, sent: Broadcast) -> State:
        """Tensors with the names, shapes and dtypes that an update must have. The run checks it before :meth:`aggregate` sees the
        update. Default: those that the client was sent.

        Args:
            update: what came back: its tensors are ordinary ones, see :func:`.check_form`, nothing else has been checked.
            sent: what its sender received at the start of its turn.
        """
        return sent.state

    def check(self, update: ClientUpdate, sent: Broadcast, client: ClientInfo) -> None:
        """Refuse an update that is not what was expected of its sender; see :func:`.check_update`. Who receives updates calls this
        once for each, before :meth:`aggregate` sees it.

        Args:
            update: what came back; nothing about it has been checked.
            sent: what its sender received at the start of its turn.
            client: the sender.

        Raises:
            FederationError: naming the client and what is wrong.
        """
        check_form(update, "flops")
        if update.num_examples != client.num_train:
            raise FederationError(
                f"The update of client {update.client} says that its client has {update.num_examples} training examples, expected "
                f"{client.num_train}: they are the weight of an update, and stay what they are."
            )
        check_payload(update, self.expected_payload(update, sent))

    def aggregate(self, updates: Iterable[ClientUpdate]) -> dict[str, float]:
        """Merge a round's updates, which arrive one at a time and in client order; returns metrics, none by default. Turns may have
        been lost: what is decided by who takes part is decided by whose update arrives. If nobody's does, the state stays.

        Each update was checked: it fits and is finite. Where one does not, the iteration raises an error, which must leave the
        server's state unchanged: replace it when all are merged.
        """
        clients = 0

        def clipped() -> Iterator[tuple[State, float]]:
            nonlocal clients
            for update in updates:
                clients += 1
                yield self.privacy.clip(update.state, self.state), self.weight(update)

        if combined := self.combine(clipped(), self.state):
            combined = self.privacy.add_noise(combined, self.state, clients)
            self.state = self.update(self.state, combined, clients)
        return self.privacy.metrics()

    def train_on_public(self, run_on_server: RunOnServer) -> dict[str, float]:
        """Learn something of one's own, after :meth:`aggregate`; returns metrics. For methods whose server trains; default:
        nothing.

        Args:
            run_on_server: has the engine do something with each of some models, which are taken and handed on one at a time.
                ``predict_public``: the update's state has ``outputs``, what the model says of each example of the public data,
                ``(M, C)``. ``train_on_public``: it has trained :meth:`.PublicDistillation.server_phases` on the public data, and
                the state is the model. The metrics have its ``steps`` and ``flops``. ``evaluate``: the metrics have what is
                measured on everybody's data.
        """
        return {}

    def public_training(self, client: ClientInfo) -> Broadcast | None:
        """What a client whose update arrived is sent once more in this round, after :meth:`train_on_public`: it trains its
        :meth:`.PublicDistillation.public_phases` on the public data and sends nothing. Default: None, it trains no more.
        """
        return None

    def state_dict(self) -> State:
        """Everything a checkpoint must hold, besides what is :attr:`client_state` for each client."""
        parts = {UPDATE: self.update.state_dict(), PRIVACY: self.privacy.state_dict()}
        return {**self.state, **{f"{part}{name}": tensor for part, kept in parts.items() for name, tensor in kept.items()}}

    def expected_state(self, stored: State) -> State:
        """Tensors with the names, shapes and dtypes that a checkpoint must have for this run to go on from it. Default: those that
        the server has now, before the first round.

        Args:
            stored: what the checkpoint has; nothing about it has been checked.
        """
        return self.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Continue from :meth:`state_dict`."""
        parts: dict[str, State] = {UPDATE: {}, PRIVACY: {}, "": {}}
        for name, tensor in state.items():
            part = next(part for part in parts if name.startswith(part))
            parts[part][name.removeprefix(part)] = tensor
        self.update.load_state_dict(parts[UPDATE])
        if parts[PRIVACY]:
            self.privacy.load_state_dict(parts[PRIVACY])
        own = parts[""]
        # What comes from a file comes in no order.
        self.state = {name: own[name] for name in self.state if name in own} | own
