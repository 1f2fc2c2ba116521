"""Several optimizers that step together, for phases that train several networks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import nn

from lightning_fed.errors import FederationError

Share = tuple[OptimizerCallable, Sequence[nn.Parameter]]
"""Builds an optimizer, and the parameters that are its own."""


def jointly(*shares: Share) -> OptimizerCallable:
    """The optimizer of a phase in which several networks learn, each with its own optimizer::

        mine, theirs = list(self.backbone.parameters()), list(self.mentor.parameters())
        Phase("mutual", [*mine, *theirs], self.loss, jointly((self.optimizer, mine), (self.mentor_optimizer, theirs)), epochs=1)

    Args:
        *shares: pairs of an optimizer's builder and the parameters that it gets.

    Returns:
        A builder for :class:`.Phase`. It raises :class:`FederationError` if the parameters of the phase are not those of
        the shares.
    """

    def build(parameters: Any) -> torch.optim.Optimizer:
        given, dealt = [id(p) for p in parameters], [id(p) for _, share in shares for p in share]
        if sorted(given) != sorted(dealt):
            raise FederationError(
                f"The phase trains {len(given)} tensors, its optimizers were given {len(dealt)}: give jointly() each parameter of "
                "the phase once, and no other."
            )
        return JointOptimizer([optimizer(list(share)) for optimizer, share in shares])

    return build


class JointOptimizer(torch.optim.Optimizer):
    """Optimizers that step together and act as one: concatenated parameter groups, one state, one checkpoint. Schedules
    and gradient scalers see all groups. A module's ``gradient_clip`` clips each optimizer's gradients separately.

    Args:
        optimizers: of different parameters.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)
        super().__init__([{**group} for optimizer in self.optimizers for group in optimizer.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Point each optimizer to its groups and to the common state."""
        groups = iter(self.param_groups)
        for optimizer in self.optimizers:
            optimizer.param_groups = [next(groups) for _ in optimizer.param_groups]
            optimizer.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)  # creates new groups and a new state
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step with each; a closure is called once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss
