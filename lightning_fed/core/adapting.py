"""Adapting a client's model to its own training data before it is measured or exported."""

from typing import Any, Literal

from lightning.pytorch.cli import OptimizerCallable

from lightning_fed.core.measured import MeasuredModule
from lightning_fed.core.phased_module import Phase, PhasedModule
from lightning_fed.errors import FederationError
from lightning_fed.models import Backbone, Transformer


class AdaptedModule(MeasuredModule):
    """A module that says how it is adapted.

    Args:
        adapt_epochs: for how many epochs; 0: not.
        adapt_steps: the same in optimizer steps.
        adapt_layers: what is adapted: everything that learns, the head alone, or what is private and learns.
        adapt_when: before every measurement, or for a second one after the last round.
        adapt_optimizer: how; None: as it trains.
        **kwargs: see :class:`.MeasuredModule`.
    """

    _private: frozenset[str]
    """Names of what stays with the client."""

    frozen_names: frozenset[str]

    optimizer: OptimizerCallable
    """How a client steps."""

    def __init__(
        self,
        adapt_epochs: int,
        adapt_steps: int,
        adapt_layers: Literal["all", "head", "private"],
        adapt_when: Literal["always", "last"],
        adapt_optimizer: OptimizerCallable | None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.adapt_epochs = adapt_epochs
        self.adapt_steps = adapt_steps
        self.adapt_layers: Literal["all", "head", "private"] = adapt_layers
        self.adapt_when: Literal["always", "last"] = adapt_when
        self.adapt_optimizer = adapt_optimizer
        self._check_adaptation()

    def adaptation(self) -> list[Phase]:
        """How a federation adapts a client's model before it is measured or exported: like training, on :meth:`client_loss`, from
        the random stream of (seed, round, client). What comes of it is thrown away. Default: ``adapt_epochs`` or ``adapt_steps``
        on what learns; or on a part of it alone, the head or what is private, everything else in eval mode, so that nothing else
        changes. Empty: as it is.
        """
        if not (self.adapt_epochs or self.adapt_steps):
            return []
        length: dict[str, Any] = {"epochs": self.adapt_epochs} if self.adapt_epochs else {"steps": self.adapt_steps}
        optimizer = self.adapt_optimizer or self.optimizer
        learning = [(name, p) for name, p in self.named_parameters() if name not in self.frozen_names]
        if self.adapt_layers == "all":
            return [Phase("adapt", [p for _, p in learning], self.client_loss, optimizer, **length)]
        part = self._private if self.adapt_layers == "private" else self._head_names()
        if not (parameters := [p for name, p in learning if name in part]):
            what = "nothing private" if self.adapt_layers == "private" else "no head"
            raise FederationError(
                f"adapt_layers is {self.adapt_layers}, but {type(self).__name__} has {what} that learns: set it to all."
            )
        return [Phase("adapt", parameters, self.client_loss, optimizer, eval_modules=[self], **length)]

    def _head_names(self) -> set[str]:
        networks = [(name, module) for name, module in self.named_modules() if isinstance(module, Backbone | Transformer)]
        return {f"{name}.{own}" for name, network in networks for own in network.head_names()}

    def _check_adaptation(self) -> None:
        if self.adapt_epochs and self.adapt_steps:
            raise FederationError(f"Got adapt_epochs={self.adapt_epochs} and adapt_steps={self.adapt_steps}: give one of them.")
        adapts = self.adapt_epochs or self.adapt_steps or type(self).adaptation is not AdaptedModule.adaptation
        if self.adapt_when == "last" and not adapts:
            raise FederationError("adapt_when is last, but nothing is adapted: say for how long with adapt_epochs or adapt_steps.")
        own_step = type(self).compute_gradients is not PhasedModule.compute_gradients
        if (self.adapt_epochs or self.adapt_steps) and own_step:
            raise FederationError(
                f"{type(self).__name__} has a training step of its own, and adapting before measuring has another: leave "
                "adapt_epochs and adapt_steps out."
            )
