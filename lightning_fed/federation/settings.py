"""Settings of a federation's runs."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lightning.pytorch.loggers import Logger

from lightning_fed.core.robust import Aggregation
from lightning_fed.engines.compression import Compression
from lightning_fed.errors import require
from lightning_fed.federation.attacks import Attack
from lightning_fed.options import require_from, require_positive
from lightning_fed.privacy.mechanism import DifferentialPrivacy
from lightning_fed.storage.checkpoint import Keep

Sampling = Literal["fixed", "poisson"]
"""``fixed``: all cohorts have the same size; ``poisson``: each client is in a cohort with the same probability, independently."""

Unseen = float | Collection[int] | None
"""A share of the clients, or their ids; None: no client."""


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run, from the arguments of :class:`lightning_fed.Federation`, which describes them.

    Raises:
        FederationError: for invalid values or combinations.
    """

    rounds: int
    participation: float
    eligible_clients: Collection[int] | None
    sampling: Sampling
    dropout: float
    quorum: float
    aggregation: Aggregation | None
    privacy: DifferentialPrivacy | None
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
    store_limit_mb: float
    logger: Logger | Iterable[Logger | bool] | bool
    callbacks: list[Any]

    @property
    def store_limit(self) -> int:
        """``store_limit_mb`` in bytes."""
        return int(self.store_limit_mb * 2**20)

    def __post_init__(self) -> None:
        require(
            0 < self.participation <= 1, f"participation is {self.participation}: give the share of clients per round, in (0, 1]."
        )
        require(
            self.sampling in get_args(Sampling) and 0 <= self.dropout < 1 and 0 <= self.quorum <= 1,
            f"Got sampling={self.sampling}, dropout={self.dropout}, quorum={self.quorum}: give fixed or poisson, a probability "
            "below 1, and a share from 0 to 1.",
        )
        require(
            not self.quorum or self.dropout > 0,
            f"quorum is {self.quorum:g}, the share of participants that must not drop out, but dropout is 0: set dropout; turns "
            "that fail by themselves have a quorum of the engine (Sites).",
        )
        require(isinstance(self.rounds, int), f"rounds is {self.rounds}: give a whole number from 1.")
        require_from(1, rounds=self.rounds, patience=self.patience)
        require_from(0, evaluate_every=self.evaluate_every, checkpoint_every=self.checkpoint_every)
        require_positive(store_limit_mb=self.store_limit_mb, budget=self.budget)
        require(
            self.evaluate_every != 0 or (self.patience is None and not self.stop_at_target),
            "patience and stop_at_target need evaluations between rounds, but evaluate_every is 0: set it to 1 or more.",
        )
        require(
            not self.stop_at_target or self.target is not None,
            "stop_at_target is set, but there is no target: give the value to reach, or leave it out.",
        )
