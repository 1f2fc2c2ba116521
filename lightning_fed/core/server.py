"""The server of a method: what it stores, what it sends, and how it merges the clients' updates."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Literal

from lightning_fed.core.aggregation import WeightedMean, check_payload, noted
from lightning_fed.core.client_state import ClientStates, RoundState
from lightning_fed.core.messages import Broadcast, ClientUpdate
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.errors import FederationError, require
from lightning_fed.nn.server_optimizers import ServerOptimizer
from lightning_fed.tensors import State

ServerVerb = Literal["predict_public", "train_on_public", "evaluate"]
"""What the engine can do with a model of the server."""

UPDATE, PRIVACY = "update/", "privacy/"
"""Prefixes of the tensors of a :class:`ServerUpdate` and of a :class:`Privacy` in a checkpoint."""

RunOnServer = Callable[[ServerVerb, Iterable[Broadcast]], Iterator[ClientUpdate]]
"""Has the engine do this with each of several models and yields the results in order."""

Combine = Callable[[Iterable[tuple[State, float]], State], State]
"""Combines a round's updates into one state. It gets pairs of update and weight, one at a time and in client order, and the
server's state. Returns an empty state if there are no updates.
"""


def mean_of_updates(updates: Iterable[tuple[State, float]], state: State) -> State:
    """The weighted mean of the updates; see :class:`.WeightedMean`."""
    mean = WeightedMean()
    for update, weight in updates:
        mean.add(update, weight)
    return mean.result()


def combine_nothing(updates: Iterable[tuple[State, float]], state: State) -> State:
    """Consumes the updates without combining them: each client's state stays its own."""
    for _ in updates:
        pass
    return {}


class Privacy:
    """How a round's updates are protected: clipping before they are combined, noise afterwards. Default: neither."""

    def clip(self, update: State, state: State) -> State:
        """Bound the contribution of one client, before updates are combined.

        Args:
            update: the client's update.
            state: the server's state, from which the client started.
        """
        return update

    def add_noise(self, combined: State, state: State, clients: int) -> State:
        """Add noise that hides each client's contribution, before the server's state is updated.

        Args:
            combined: the combined updates.
            state: the server's state before the update.
            clients: number of combined updates.
        """
        return combined

    def note(self, round: int, updates: Collection[ClientUpdate]) -> None:
        """Record which updates a round has merged. Default: nothing.

        Args:
            round: from 1.
            updates: with their metrics, without their payload.
        """

    def metrics(self) -> dict[str, float]:
        """Metrics to report after a round. Default: none."""
        return {}

    def spent(self) -> dict[str, float]:
        """The privacy cost of all rounds so far; it may take seconds and is reported when clients are evaluated. Default: none."""
        return {}

    def state_dict(self) -> State:
        """State that is kept between rounds (the privacy cost so far, for example) and saved in checkpoints, see
        :meth:`ServerUpdate.state_dict`. Default: none.
        """
        return {}

    def load_state_dict(self, state: State) -> None:
        """Resume from :meth:`state_dict`."""


class ServerUpdate:
    """How the combined updates change the server's state. Default: they replace it."""

    def __call__(self, state: State, combined: State, clients: int) -> State:
        """The new state.

        Args:
            state: the previous state.
            combined: the combined updates.
            clients: number of combined updates.
        """
        return combined

    def state_dict(self) -> State:
        """State that is kept between rounds (moments, for example) and saved in checkpoints. Default: none.

        Before a run resumes, its checkpoint is compared with this state: names, shapes and dtypes must not change between rounds.
        """
        return {}

    def load_state_dict(self, state: State) -> None:
        """Resume from :meth:`state_dict`."""


class PartialUpdate(ServerUpdate):
    """Keeps all tensors that no update contains: for methods in which a part is not trained in some rounds."""

    def __call__(self, state: State, combined: State, clients: int) -> State:
        return state | combined


class OptimizerUpdate(ServerUpdate):
    """Steps each parameter with a server optimizer and replaces all other tensors."""

    def __init__(self, optimizer: ServerOptimizer, parameters: State) -> None:
        self.optimizer = optimizer
        self.moments = {name: optimizer.initial(parameter) for name, parameter in parameters.items()}

    def __call__(self, state: State, combined: State, clients: int) -> State:
        steps = {name: self.optimizer.step(state[name], combined[name], own) for name, own in self.moments.items()}
        self.moments = {name: own for name, (_, own) in steps.items()}
        return combined | {name: weight for name, (weight, _) in steps.items()}

    def state_dict(self) -> State:
        """The optimizer's state, as ``<what>/<parameter>``."""
        return {f"{what}/{name}": tensor for name, own in self.moments.items() for what, tensor in own.items()}

    def load_state_dict(self, state: State) -> None:
        self.moments = {name: {what: state[f"{what}/{name}"] for what in own} for name, own in self.moments.items()}


class Server:
    r"""Federated averaging: one state, sent to all participants and replaced by the mean of their updates.

    With ``weighting="examples"`` (McMahan et al. 2017, Algorithm 1) client :math:`k` has weight :math:`n_k / \sum_{j \in S} n_j`,
    where :math:`n` is the number of training examples and :math:`S` the set of participants of the round. With ``"uniform"`` all
    participants have the same weight. In both cases the weights sum to 1.

    Updates are merged in three steps, each of which can be replaced: ``combine`` → ``privacy`` → ``update``.

    Args:
        state: the initial shared state.
        weighting: how updates are weighted.
        holds_model: whether the state is a whole model, which can be evaluated on the server's test data.
        combine: combines the updates into one state (robust rules, exact merging of low-rank factors). Default: weighted mean.
        privacy: clips each update before they are combined, and adds noise afterwards. Default: neither.
        update: computes the new state from the old and the combined one (server optimizers). Default: the combined one.
    """

    round: int = 0
    """The current round, from 1."""

    cohort: Sequence[ClientInfo] = ()
    """The participants of the current round, in client order."""

    client_state: ClientStates
    """What the server keeps for each client between rounds, if anything. Checkpoints refer to it."""

    round_state: RoundState
    """What the server has of each client within a round; it is in no checkpoint. A server that stores updates as they arrive puts
    them here and moves them once all have arrived; see :class:`.PersonalServer`.
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
        """Step with a server optimizer towards the mean of the updates; called before the first round.

        Args:
            optimizer: the server optimizer.
            parameters: names of the module's parameters; those in the server's state are optimized.
            method: name of the method, for errors.

        Raises:
            FederationError: if the server has its own way of merging updates, or averages no parameters.
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

    def attach_storage(self, client_state: ClientStates, round_state: RoundState) -> None:
        """Set where to store what is kept for each client; called once, before the first round and before a run resumes."""
        self.client_state, self.round_state = client_state, round_state

    def on_round_start(self, round: int, cohort: Sequence[ClientInfo]) -> None:
        """Prepare a round; called first in each round. Default: set :attr:`round` and :attr:`cohort`.

        Draw what is random about a round here: the global random generators are seeded with (seed, round).
        """
        self.round, self.cohort = round, cohort

    def weight(self, update: ClientUpdate) -> float:
        """The weight of an update among those of a round, above 0. Default: by :attr:`weighting`."""
        return update.num_examples if self.weighting == "examples" else 1

    def broadcast(self, client: ClientInfo) -> Broadcast:
        """What the server sends to ``client`` at the start of its turn."""
        return Broadcast(self.state)

    def common_broadcast(self) -> Broadcast:
        """What a module of no client loads, see :meth:`.Federation.server_module`. Default: the state."""
        return Broadcast(self.state)

    def evaluation_broadcast(self, client: ClientInfo) -> Broadcast:
        """What ``client`` is evaluated with. Default: what it would be sent."""
        return self.broadcast(client)

    def global_models(self) -> dict[str, Broadcast]:
        """Models to evaluate on the server's test data, by name. Default: ``global`` if the state is a whole model."""
        return {"global": Broadcast(self.state)} if self.holds_model else {}

    def refresh_statistics(self, statistics_of: Callable[[Broadcast], State]) -> None:
        """Recompute the models' statistics before they are evaluated, for methods that have statistics.

        Args:
            statistics_of: sends a model to all clients and returns the mean of their statistics over all batches.
        """

    def expected_payload(self, update: ClientUpdate, sent: Broadcast) -> State:
        """Tensors with the names, shapes and dtypes that an update must have; checked before :meth:`aggregate` gets the update.
        Default: those that the client was sent.

        Args:
            update: the client's update. Its tensors are ordinary ones, see :func:`.check_form`; nothing else has been checked.
            sent: what the client received at the start of its turn.
        """
        return sent.state

    def check(self, update: ClientUpdate, sent: Broadcast, client: ClientInfo) -> None:
        """Refuse an update that does not fit its sender; see :func:`.check_payload`. Called once for each update, before
        :meth:`aggregate` gets it.

        Args:
            update: the client's update, whose form has been checked, see :func:`.check_form`.
            sent: what the client received at the start of its turn.
            client: the sender.

        Raises:
            FederationError: if the update does not fit; names the client and the mismatch.
        """
        if update.num_examples != client.num_train:
            raise FederationError(
                f"The update of client {update.client} reports {update.num_examples} training examples, expected "
                f"{client.num_train}: this number is its weight and must not change during a run."
            )
        check_payload(update, self.expected_payload(update, sent))

    def aggregate(self, updates: Iterable[ClientUpdate]) -> dict[str, float]:
        """Merge a round's updates, which arrive one at a time and in client order; returns metrics, by default none.

        Turns may have been lost: rely on the updates that arrive, not on :attr:`cohort`. If none arrives, the state stays as it is.

        Each update has been checked: it fits and is finite. If one does not, the iteration raises an error, which must leave the
        server's state unchanged: replace the state only after all updates are merged.
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
        """Train on the server after :meth:`aggregate`; returns metrics. Default: nothing.

        Args:
            run_on_server: has the engine process several models, which are consumed and returned one at a time.
                ``predict_public``: the update's state has ``outputs``, the model's outputs for each example of the public data,
                ``(M, C)``. ``train_on_public``: the model is trained in :meth:`.PublicDistillation.server_phases` on the public
                data, and the state is the trained model. The metrics have its ``steps`` and ``flops``. ``evaluate``: the metrics
                are those measured on the data of all clients.
        """
        return {}

    def public_training(self, client: ClientInfo) -> Broadcast | None:
        """What a client whose update arrived is sent after :meth:`train_on_public`: it trains its
        :meth:`.PublicDistillation.public_phases` on the public data and sends nothing back. Default: None, no such training.
        """
        return None

    def state_dict(self) -> State:
        """All that a checkpoint must hold, except :attr:`client_state` and what :attr:`privacy` keeps, which the run adds."""
        return self.state | {f"{UPDATE}{name}": tensor for name, tensor in self.update.state_dict().items()}

    def expected_state(self, stored: State) -> State:
        """Tensors with the names, shapes and dtypes that a checkpoint must have for this run to resume from it. Default: those of
        the server's state before the first round. Override it if they change between rounds.

        Args:
            stored: the checkpoint's tensors, unchecked.
        """
        return self.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Resume from :meth:`state_dict`."""
        self.update.load_state_dict({name.removeprefix(UPDATE): t for name, t in state.items() if name.startswith(UPDATE)})
        own = {name: tensor for name, tensor in state.items() if not name.startswith(UPDATE)}
        # What comes from a file comes in no order.
        self.state = {name: own[name] for name in self.state if name in own} | own


class PersonalServer(Server):
    """Keeps a state for each client in :attr:`client_state`, on disk if memory is short.

    The updates of a round wait in :attr:`round_state` until all have arrived; until then clients are sent what follows from the
    earlier states.

    Args:
        state: the initial shared state.
        weighting: how updates are weighted if they are combined.
        combine: makes the shared state from the updates. Default: nothing is combined.
    """

    def __init__(
        self, state: State, weighting: Literal["examples", "uniform"] = "examples", combine: Combine = combine_nothing
    ) -> None:
        super().__init__(state, weighting, combine=combine)

    @property
    def size(self) -> int:
        """Number of values of the shared state."""
        return sum(tensor.numel() for tensor in self.state.values())

    def state_of(self, update: ClientUpdate) -> State:
        """What is stored of an update in :attr:`round_state`. Default: all of it."""
        return update.state

    def update_clients(self, clients: Sequence[int]) -> dict[str, float]:
        """Replace the clients' states; called when all updates have arrived and the shared state has been updated.

        Args:
            clients: ids of the clients whose updates arrived, in order; at least one.

        Returns:
            Metrics of the round. By default there are none, and the updates become the clients' states.
        """
        for client in clients:
            self.client_state.put(client, self.round_state.get(client), self.round)
        return {}

    def aggregate(self, updates: Iterable[ClientUpdate]) -> dict[str, float]:
        """Merge a round's updates; see :meth:`.Server.aggregate`."""
        super().aggregate(noted(updates, lambda update: self.round_state.put(update.client, self.state_of(update), self.round)))
        clients = list(self.round_state)
        metrics = self.update_clients(clients) if clients else {}
        self.round_state.clear()
        return metrics
