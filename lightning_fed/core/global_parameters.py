"""Methods that compare a client's parameters with those that the server sent."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fed.core.module import FederatedModule
from lightning_fed.core.resume import CHECKPOINT
from lightning_fed.nn.buffer_dict import BufferDict


class KeepsGlobalParameters(FederatedModule):
    """A module that keeps a copy of the parameters with which each fit started, also across interruption and resumption.

    Args:
        **kwargs: see :class:`.FederatedModule`.
    """

    global_parameters: BufferDict
    """Copies of the :meth:`remembered` parameters at the start of the fit, by name: in a federation, as the server sent them."""

    def configure_model(self) -> None:
        """Build the networks and the buffers for the copies."""
        was_built = self.is_built
        super().configure_model()
        if not was_built:
            self.global_parameters = BufferDict(self.remembered(), persistent=False)

    def on_fit_start(self) -> None:
        """Copy the parameters at the start of the fit; a resumed fit takes the copies from its checkpoint."""
        super().on_fit_start()
        stopped = self.resume.stopped
        self.global_parameters.update(stopped["global_parameters"] if stopped else self.remembered())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the copies."""
        super().on_save_checkpoint(checkpoint)
        checkpoint[CHECKPOINT]["global_parameters"] = dict(self.global_parameters.items())

    def remembered(self) -> dict[str, Tensor]:
        """The parameters to copy when a fit starts, by name. Default: the shared trainable parameters."""
        shared = self._shared - self.frozen_names
        return {name: parameter for name, parameter in self.named_parameters() if name in shared}

    def learning(self) -> dict[str, nn.Parameter]:
        """The parameters that have copies, by name and in the same order."""
        return self.global_parameters.counterparts(self)

    @contextmanager
    def at_global_parameters(self) -> Iterator[dict[str, nn.Parameter]]:
        """A context in which :meth:`learning`, which it yields, has the values of the copies."""
        own = self.learning()
        now = {name: parameter.detach().clone() for name, parameter in own.items()}
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(self.global_parameters[name])
        yield own
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(now[name])
