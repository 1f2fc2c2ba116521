"""The messages between server and clients: plain data only."""

from dataclasses import dataclass, field
from typing import Literal

from lightning_fed.data.client_info import ClientInfo
from lightning_fed.tensors import State

RANK = "rank/"
"""Prefix of the effective ranks of adapters among the metrics of an evaluate turn."""

STAGES = "as_received", "personalized", "fine_tuned"
"""How a personalize turn evaluates a client that never takes part in training: the prefixes of its metrics."""

PRIVATE_SHARE = "private_share/"
"""Prefix of the private share of a layer's adapters among these metrics."""


@dataclass(frozen=True)
class Broadcast:
    """What the server sends to one client.

    Args:
        state: the payload.
        model_size: size of this version of the model; see :attr:`ClientInfo.model_size`.
        statistics: statistics recomputed on the clients' data for this version, see :meth:`.SharedStateMixin.recomputed_buffers`;
            only for models that are evaluated, not for training.
    """

    state: State
    model_size: float | None = None
    statistics: State = field(default_factory=dict)


@dataclass(frozen=True)
class ClientUpdate:
    """What a client sends back after its turn.

    Args:
        client: id of the sender.
        num_examples: number of the client's training examples, the weight of its update.
        state: the payload.
        metrics: scalars about the turn; they are reported, but never aggregated into a model.
    """

    client: int
    num_examples: int
    state: State
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """One client's task in a round: all that a worker needs besides the client's private state.

    Args:
        verb: ``"fit"`` trains and sends an update, ``"evaluate"`` evaluates the client's model with the broadcast loaded,
            ``"personalize"`` evaluates what a client gets that never takes part in training: it trains, but sends and keeps
            nothing. ``"compute_statistics"`` passes the training data through the model and sends its statistics. On public data:
            ``"predict_public"`` sends the model's outputs for each example, ``"train_on_public"`` trains the model: the server's
            is sent back, a client's stays with the client.
        client: the client; id -1 is the server, whose data are the pooled data of all clients, or public.
        round: number of the round, from 1.
        broadcast: what the server sent.
        evaluate: whether a fit turn also evaluates the trained model, before aggregation.
        last_round: round of the client's last fit turn that the server merged, 0 if there is none; the client must start from the
            private state of that round.
        fine_tune: whether an evaluate turn fine-tunes the model first, if the method has fine-tuning.
        turns: number of the client's fit turns that the server has merged.
        evaluated_with: what a personalize turn is evaluated with; it trains from ``broadcast``.
    """

    verb: Literal["fit", "evaluate", "personalize", "compute_statistics", "predict_public", "train_on_public"]
    client: ClientInfo
    round: int
    broadcast: Broadcast
    evaluate: bool = False
    last_round: int = 0
    fine_tune: bool = True
    turns: int = 0
    evaluated_with: Broadcast | None = None


@dataclass(frozen=True)
class TurnResult:
    """What a worker returns to its engine, which passes the update on and stores the private state.

    Args:
        update: the client's update.
        private: the client's private state after the turn. None: it has not changed, or the client has none.
    """

    update: ClientUpdate
    private: State | None = None


@dataclass(frozen=True)
class TurnFailure:
    """A turn that failed, in engines that can go on without it."""

    client: int
    reason: str
