"""Checks that a federation is one process, and that a client's Trainer uses one device in it."""

import lightning as L
from lightning.fabric.utilities.rank_zero import rank_zero_only

from lightning_fed.errors import FederationError
from lightning_fed.system.ranks import rank_variable

REMEDY = "let clients train in parallel instead, with --federation.engine Processes"


def refuse_other_ranks() -> None:
    """Refuse a process that was started as one of several, except the first, because Lightning lets only that one log.

    Raises:
        FederationError: names the variable that is the cause.
    """
    if rank := getattr(rank_zero_only, "rank", 0):
        raise FederationError(
            f"This process is rank {rank} of several{rank_variable()}, but a federation is one process, and rank 0 runs it: start "
            f"it once, with one task; {REMEDY}."
        )


def refuse_several_processes(trainer: L.Trainer) -> None:
    """Refuse a Trainer that would start other processes, or wait for other machines, in every turn.

    Raises:
        FederationError: names the setting that is the cause.
    """
    if trainer.num_nodes != 1:
        raise FederationError(f"trainer.num_nodes is {trainer.num_nodes}, but a client trains on one machine: leave it out.")
    if trainer.num_devices != 1:
        raise FederationError(
            f"The trainer has {trainer.num_devices} devices, but a client trains on one: set trainer.devices to 1; {REMEDY}."
        )
    if trainer.strategy.launcher is not None:
        raise FederationError(
            f"trainer.strategy is {type(trainer.strategy).__name__}, which starts processes for every turn: leave it out, and "
            f"{REMEDY}."
        )
