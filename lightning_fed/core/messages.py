"""What crosses the wire between server and clients: plain data, nothing else."""

from dataclasses import dataclass, field
from typing import Literal

from lightning_fed.data.client_info import ClientInfo
from lightning_fed.tensors import State

RANK = "rank/"
"""What the names of effective ranks of adapters begin with, among the metrics of an evaluate turn."""

STAGES = "as_received", "personalized", "fine_tuned"
"""How a client is measured that is never trained with, in a personalize turn: what the names of its metrics begin with."""

PRIVATE_SHARE = "private_share/"
"""The same of how much of a layer's adapters is the client's own."""


@dataclass(frozen=True)
class Broadcast:
    """What the server sends to one client.

    Args:
        state: the payload.
        model_size: which version of the model that is; see :attr:`ClientInfo.model_size`.
        statistics: what was gathered on the clients' data for this version, see :meth:`.SharedStateMixin.recomputed_buffers`; with
            models that are measured, not with models that are trained.
    """

    state: State
    model_size: float | None = None
    statistics: State = field(default_factory=dict)


@dataclass(frozen=True)
class ClientUpdate:
    """What a client sends back after its turn.

    Args:
        client: id of the sender.
        num_examples: training examples the client holds, the weight of its update.
        state: the payload.
        metrics: scalars about the turn; they are reported, never aggregated into a model.
    """

    client: int
    num_examples: int
    state: State
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """What one client is to do in a round: all that a worker, wherever it runs, needs to know beside the client's private state.

    Args:
        verb: ``"fit"`` trains and sends an update, ``"evaluate"`` measures the client's model with the broadcast loaded,
            ``"personalize"`` measures what a client gets that is never trained with: it trains, and sends and keeps nothing.
            ``"compute_statistics"`` passes the training data through the model and sends its statistics. On public data:
            ``"predict_public"`` sends what the model says of each example, ``"train_on_public"`` trains it: the server's is sent,
            a client's stays with the client.
        client: whose turn it is; id -1 is the server, whose data are everybody's pooled, or public.
        round: number of the round, from 1.
        broadcast: what the server sent.
        evaluate: whether a fit turn also measures the trained model, before aggregation.
        last_round: round of the client's last fit turn that the server merged, 0 if there is none: the private state that the
            client has to start from is of that round.
        fine_tune: whether an evaluate turn fine-tunes the model first, if the method says how.
        turns: how many of the client's fit turns the server has merged.
        measured_with: what a personalize turn is measured with; it trains from ``broadcast``.
    """

    verb: Literal["fit", "evaluate", "personalize", "compute_statistics", "predict_public", "train_on_public"]
    client: ClientInfo
    round: int
    broadcast: Broadcast
    evaluate: bool = False
    last_round: int = 0
    fine_tune: bool = True
    turns: int = 0
    measured_with: Broadcast | None = None


@dataclass(frozen=True)
class TurnResult:
    """What a worker hands to its engine, which passes the update on and keeps the private state.

    Args:
        update: what the client sends.
        private: the client's private state after the turn; None: the turn left it as it was, or the client has none.
    """

    update: ClientUpdate
    private: State | None = None


@dataclass(frozen=True)
class TurnFailure:
    """A turn that came to nothing, where an engine may go on without it."""

    client: int
    reason: str
