"""What a federation says of its runs."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.loggers import Logger

from lightning_fed.core.robust import Aggregation
from lightning_fed.engines.compression import Compression
from lightning_fed.federation.attacks import Attack
from lightning_fed.federation.cohorts import Sampling, Unseen
from lightning_fed.privacy import ClientDP
from lightning_fed.storage.checkpoint import Keep


@dataclass(frozen=True)
class RunSettings:
    """What a run takes over from :class:`lightning_fed.Federation`; see there.

    Args:
        rounds: how many rounds there are.
        participation: share of the clients that take part in a round.
        eligible_clients: ids of those among whom they are drawn; None: all.
        sampling: whether a cohort has always as many clients, or is a Poisson sample.
        dropout: with which probability a participant drops out of a round.
        quorum: share of a cohort that has to stay.
        aggregation: how updates are combined, instead of by the mean; None: by the mean.
        privacy: how what one client contributes is hidden; None: it is not.
        attack: what hostile clients do; None: there are none.
        unseen: share of the clients that are never trained with, or their ids; None: nobody.
        seed: of everything random.
        evaluate_every: measure every that many rounds, and after the last one; 0: after the last one only; None: every so many
            rounds as it takes a cohort to become everybody.
        target: value of the monitored metric that is waited for; None: none is.
        patience: end when so many rounds have passed since the best one on validation data; None: play all rounds.
        stop_at_target: whether the round that reaches the target is the last one.
        budget: MiB that may be sent; None: as many as it takes.
        checkpoint_every: write a checkpoint every that many rounds, after the last one, and where a round is the best so far on
            validation data; 0: never.
        keep: what stays of the clients' private states when a run has ended.
        compression: of messages between server and clients.
        store_limit: bytes of memory for the clients' private states; as many for what the server keeps for each client, and for
            what it has of them within a round.
        logger: where metrics go.
        callbacks: what happens around the rounds: objects with the hooks of :class:`lightning_fed.callbacks.FederationCallback`.
    """

    rounds: int
    participation: float
    eligible_clients: Collection[int] | None
    sampling: Sampling
    dropout: float
    quorum: float
    aggregation: Aggregation | None
    privacy: ClientDP | None
    attack: Attack | None
    unseen: Unseen
    seed: int
    evaluate_every: int | None
    target: float | None
    patience: int | None
    stop_at_target: bool
    budget: float | None
    checkpoint_every: int
    keep: Keep
    compression: Compression
    store_limit: int
    logger: Logger | Iterable[Logger | bool] | bool
    callbacks: list[Any]
