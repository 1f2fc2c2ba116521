"""Fine-tuning a client's model on its own training data before it is evaluated or exported."""

from dataclasses import dataclass
from typing import Any, Literal

from lightning.pytorch.cli import OptimizerCallable

from lightning_fed.core.phase import Phase
from lightning_fed.errors import FederationError
from lightning_fed.models import Backbone, Transformer
from lightning_fed.options import NonNegativeInt, require_choices


@dataclass(frozen=True)
class FineTuning:
    """How a client's model is fine-tuned before it is evaluated or exported. The fine-tuned weights are discarded.

    Args:
        epochs: number of epochs; 0: no fine-tuning. Default if no steps are given: 1.
        steps: number of optimizer steps, instead of epochs.
        part: trainable parameters: all, those of the head, or the private ones. With a part, all modules are in eval mode, so
            that nothing else changes.
        when: before every evaluation (``always``); or ``last``: clients are evaluated without fine-tuning, and in the last round
            again with it (``fine_tuned/…``), as in papers that fine-tune all heads at the end. Exports are fine-tuned either way.
        optimizer: optimizer of the fine-tuning. None: that of the client's training.
    """

    epochs: NonNegativeInt | None = None
    steps: NonNegativeInt | None = None
    part: Literal["all", "head", "private"] = "all"
    when: Literal["always", "last"] = "always"
    optimizer: OptimizerCallable | None = None

    def __post_init__(self) -> None:
        require_choices(type(self), vars(self), "fine_tuning")

    def length(self) -> dict[str, Any]:
        """Epochs or steps of the phase; empty without fine-tuning."""
        epochs = 1 if self.epochs is None and self.steps is None else self.epochs
        lengths = {"epochs": epochs, "steps": self.steps}
        return {name: value for name, value in lengths.items() if value}

    def check(self, module: Any) -> None:
        """Raises :class:`FederationError` for settings that contradict each other or the method, a :class:`.FederatedModule`."""
        if self.epochs and self.steps:
            raise FederationError(f"fine_tuning has epochs={self.epochs} and steps={self.steps}: give one of them.")
        if self.length() and module.has_own_gradients:
            raise FederationError(
                f"{type(module).__name__} has a training step of its own, which fine-tuning does not use: leave fine_tuning out."
            )
        if self.when == "last" and not self.length():
            raise FederationError("fine_tuning has when=last, but nothing is tuned: say for how long with epochs or steps.")

    def phases(self, module: Any) -> list[Phase]:
        """The fine-tuning phase, on :meth:`.FederatedModule.client_loss`; none if its length is 0.

        Raises:
            FederationError: if ``part`` has no trainable parameters.
        """
        if not (length := self.length()):
            return []
        optimizer = self.optimizer or module.optimizer
        learning = {name: p for name, p in module.named_parameters() if name not in module.frozen_names}
        if self.part == "all":
            return [Phase("fine_tune", list(learning.values()), module.client_loss, optimizer, **length)]
        part = module.private_names() if self.part == "private" else _head_names(module)
        if not (parameters := [p for name, p in learning.items() if name in part]):
            what = "nothing private" if self.part == "private" else "no head"
            raise FederationError(
                f"fine_tuning has part={self.part}, but {type(module).__name__} has {what} that learns: set it to all."
            )
        return [Phase("fine_tune", parameters, module.client_loss, optimizer, eval_modules=[module], **length)]


def _head_names(module: Any) -> set[str]:
    networks: list[tuple[str, Any]] = [(n, m) for n, m in module.named_modules() if isinstance(m, Backbone | Transformer)]
    return {f"{name}.{own}" for name, network in networks for own in network.head_names()}
