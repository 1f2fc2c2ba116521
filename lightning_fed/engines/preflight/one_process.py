"""A check that a client's Trainer uses one device, in its own process."""

import lightning as L

from lightning_fed.errors import FederationError


def refuse_several_processes(trainer: L.Trainer) -> None:
    """Refuse a Trainer that would start other processes, or wait for other machines, in every turn.

    Raises:
        FederationError: names the setting that is the cause.
    """
    remedy = "let clients train in parallel instead, with --federation.engine Processes"
    if trainer.num_nodes != 1:
        raise FederationError(f"trainer.num_nodes is {trainer.num_nodes}, but a client trains on one machine: leave it out.")
    if trainer.num_devices != 1:
        raise FederationError(
            f"The trainer has {trainer.num_devices} devices, but a client trains on one: set trainer.devices to 1; {remedy}."
        )
    if trainer.strategy.launcher is not None:
        raise FederationError(
            f"trainer.strategy is {type(trainer.strategy).__name__}, which starts processes for every turn: leave it out, and "
            f"{remedy}."
        )
