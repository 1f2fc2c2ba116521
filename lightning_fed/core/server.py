"""What the server keeps, what it sends, and how it merges what comes back."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

from lightning_fed.core.aggregation import WeightedMean, check_form, check_payload
from lightning_fed.core.client_state import Kept, Scratch
from lightning_fed.core.messages import Broadcast, ClientUpdate
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.errors import FederationError
from lightning_fed.tensors import State

ServerVerb = Literal["predict", "learn", "evaluate"]
"""What can be done with a model of the server's."""

OfModels = Callable[[ServerVerb, Iterable[Broadcast]], Iterator[ClientUpdate]]
"""Has the engine do that with each of some models, and hands on what comes of it, in order."""


class Server:
    r"""Federated averaging: one state, sent to everybody, replaced by the mean of the updates.

    With ``weighting="examples"`` (McMahan et al. 2017, Algorithm 1) client :math:`k` counts :math:`n_k / \sum_{j \in S} n_j`,
    :math:`n` being training examples and :math:`S` the clients that took part in the round; with ``"uniform"`` everybody counts
    the same. Either way the weights sum to 1 over the participants.

    Args:
        state: the initial shared state.
        weighting: how updates are weighted.
        holds_model: whether the state is a whole model, which can be measured on the server's test data.
    """

    kept: Kept
    """What is kept for each client from round to round, for servers that keep anything: in checkpoints, by reference."""

    scratch: Scratch
    """What is there of each client within a round: in no checkpoint. A server that keeps what arrives puts it here, and moves it
    when all of it is there (:func:`lightning_fed.core.client_state.move`).
    """

    def __init__(self, state: State, weighting: Literal["examples", "uniform"] = "examples", holds_model: bool = False) -> None:
        self.state = state
        self.weighting = weighting
        self.holds_model = holds_model

    def keep_in(self, kept: Kept, scratch: Scratch) -> None:
        """Where to keep something for each client: called once, before the first round and before a run is continued."""
        self.kept, self.scratch = kept, scratch

    def open_round(self, round: int, cohort: Sequence[ClientInfo]) -> None:
        """Prepare a round, the first thing in it. What is random about a round is drawn here: the global random streams are those
        of (seed, round). Default: nothing to prepare.
        """

    def broadcast(self, client: ClientInfo) -> Broadcast:
        """What ``client`` receives at the start of its turn."""
        return Broadcast(self.state)

    def measured(self, client: ClientInfo) -> Broadcast:
        """What ``client`` is measured with. Default: what it would be sent."""
        return self.broadcast(client)

    def models(self) -> dict[str, Broadcast]:
        """Models that are measured on the server's test data, by name. Default: ``global``, if the state is a whole model."""
        return {"global": Broadcast(self.state)} if self.holds_model else {}

    def gather(self, statistics_of: Callable[[Broadcast], State]) -> None:
        """Refresh the statistics of the models before they are measured, for methods that have any.

        Args:
            statistics_of: sends a model to all clients and returns the mean of their statistics over all batches.
        """

    def expected(self, update: ClientUpdate, sent: Broadcast) -> State:
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
        check_payload(update, self.expected(update, sent))

    def aggregate(self, updates: Iterable[ClientUpdate]) -> dict[str, float]:
        """Merge a round's updates, which arrive one at a time and in client order; returns metrics, none by default. Turns may have
        been lost: what is decided by who takes part is decided by whose update arrives. If nobody's does, the state stays.

        Each update was checked: it fits and is finite. Where one does not, the iteration raises an error, which must leave the
        server's state unchanged: replace it when all are merged.
        """
        mean = WeightedMean()
        for update in updates:
            mean.add(update.state, update.num_examples if self.weighting == "examples" else 1)
        self.state = mean.result() or self.state
        return {}

    def learn(self, of_models: OfModels) -> dict[str, float]:
        """Learn something of one's own, after :meth:`aggregate`; returns metrics. For methods whose server trains; default:
        nothing.

        Args:
            of_models: has the engine do something with each of some models, which are taken and handed on one at a time.
                ``predict``: the update's state has ``outputs``, what the model says of each example of the public data, ``(M, C)``.
                ``learn``: it has trained :meth:`.FederatedModule.server_phases` on the public data, and the state is the model. The
                metrics have its ``steps`` and ``flops``. ``evaluate``: the metrics have what is measured on everybody's data.
        """
        return {}

    def lesson(self, client: ClientInfo) -> Broadcast | None:
        """What a client whose update arrived is sent once more in this round, after :meth:`learn`: it trains its
        :meth:`.FederatedModule.lesson_phases` on the public data and sends nothing. Default: None, it has no lesson.
        """
        return None

    def state_dict(self) -> State:
        """Everything a checkpoint must hold, besides what is :attr:`kept` for each client."""
        return self.state

    def load_state_dict(self, state: State) -> None:
        """Continue from :meth:`state_dict`."""
        self.state = state
