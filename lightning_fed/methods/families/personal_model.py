"""Clients with two networks of one architecture: a shared one, which travels, and a personal one, which stays and predicts."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lightning_fed.core import FederatedModule, State
from lightning_fed.models import Backbone
from lightning_fed.models.frozen import copy_learning

PERSONAL = "personal."
"""What the names of the personal network's tensors begin with."""


class PersonalModule(FederatedModule):
    """Base of APFL, Ditto and pFedSD: in addition to the shared network, a personal one, which starts as its copy.

    Args:
        **kwargs: see :class:`.FederatedModule`.
    """

    _outputs: list[Tensor] | None = None  # of the shared network, while it predicts

    def build(self) -> None:
        super().build()
        self.personal: Backbone = copy_learning(self.backbone)

    def shared_names(self) -> set[str]:
        return {name for name in super().shared_names() if not name.startswith(PERSONAL)}

    def initialized_from(self) -> dict[str, str]:
        """The personal network starts as the global one."""
        names = self.backbone.state_dict()
        return {f"{PERSONAL}{name}": f"backbone.{name}" for name in names if f"backbone.{name}" not in self.frozen_names}

    @property
    def predictor(self) -> Backbone:
        """The personal network; within :meth:`global_predicts` the other one."""
        return self.personal if self._outputs is None else self.backbone

    def forward(self, x: Any) -> Tensor:
        """Outputs of the :attr:`predictor`."""
        outputs = super().forward(x)
        if self._outputs is not None:
            self._outputs.append(outputs)
        return outputs

    def export_state(self, private: bool = True) -> State:
        """The network that the client predicts with; without private state, the shared one."""
        network = self.predictor if private else self.backbone
        return {f"backbone.{name}": tensor for name, tensor in network.state_dict().items()}

    def global_loss(self, batch: Any) -> Tensor:
        """The shared network's loss on a batch."""
        with self.global_predicts():
            return self.client_loss(batch)

    @contextmanager
    def global_predicts(self) -> Iterator[list[Tensor]]:
        """Within this block the shared network predicts, and its outputs are appended to the list."""
        self._outputs = []
        try:
            yield self._outputs
        finally:
            self._outputs = None
