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
    """A module that remembers where each fit started from, also one that is stopped and continued.

    Args:
        **kwargs: see :class:`.FederatedModule`.
    """

    global_parameters: BufferDict
    """Copies of what is :meth:`remembered`, by name, as it was when the fit began: as the server sent it, in a federation."""

    def configure_model(self) -> None:
        """The networks, and room for copies."""
        was_built = self.is_built
        super().configure_model()
        if not was_built:
            self.global_parameters = BufferDict(self.remembered(), persistent=False)

    def on_fit_start(self) -> None:
        """Remember where the fit starts from; a continued one started where its checkpoint says."""
        super().on_fit_start()
        stopped = self.resume.stopped
        self.global_parameters.update(stopped["global_parameters"] if stopped else self.remembered())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add where the fit started from."""
        super().on_save_checkpoint(checkpoint)
        checkpoint[CHECKPOINT]["global_parameters"] = dict(self.global_parameters.items())

    def remembered(self) -> dict[str, Tensor]:
        """What is copied when a fit begins, by name. Default: the shared parameters that learn."""
        shared = self.shared_names() - self.frozen_names
        return {name: parameter for name, parameter in self.named_parameters() if name in shared}

    def learning(self) -> dict[str, nn.Parameter]:
        """The parameters that there are copies of, by name and in the same order."""
        return {name: parameter for name, parameter in self.named_parameters() if name in self.global_parameters}

    @contextmanager
    def at_global_parameters(self) -> Iterator[dict[str, nn.Parameter]]:
        """In this block :meth:`learning`, which it yields, has the values of the copies."""
        own = self.learning()
        now = {name: parameter.detach().clone() for name, parameter in own.items()}
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(self.global_parameters[name])
        yield own
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(now[name])

    def server_parameters(self) -> dict[str, nn.Parameter]:
        """The shared parameters that learn as a server has them: a tied one under each of its names."""
        shared = self.shared_names() - self.frozen_names
        return {name: parameter for name, parameter in self.named_parameters(remove_duplicate=False) if name in shared}
