"""A client's Trainer trains alone: on one device, in the process that it is in."""

import lightning as L

from lightning_fed.errors import FederationError


def refuse_several_processes(trainer: L.Trainer) -> None:
    """Refuse a Trainer that would start other processes, or wait for those of other machines, at every turn.

    Raises:
        FederationError: saying what would make it do so.
    """
    remedy = "let clients train side by side instead, with --federation.engine Processes"
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
