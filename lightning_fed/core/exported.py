"""What of a module leaves a run: a model for use elsewhere."""

from pathlib import Path
from typing import Any

import safetensors.torch

from lightning_fed.core.adapting import AdaptedModule
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.errors import FederationError
from lightning_fed.models import Backbone, Transformer, Wrapped
from lightning_fed.models.factory import NETWORK
from lightning_fed.tensors import State


class ExportedModule(AdaptedModule):
    """A module that writes its model down.

    Args:
        **kwargs: see :class:`.AdaptedModule`.
    """

    _shared: frozenset[str]
    """Names of what travels."""

    backbone: Backbone
    client: ClientInfo | None

    @property
    def shares_whole_model(self) -> bool:
        """Whether what is shared is a whole model, with what is frozen: nothing that one predicts with stays with the clients."""
        return bool(self._shared) and not self._private

    def export(self, folder: Path, private: bool = True) -> None:
        """Write the model for use elsewhere. Default: safetensors, a file for each part of the module. ``model.safetensors`` is the
        network, whose tensors have the names that they have in it; other parts (an adapter, a second head) have files of their own
        names. A network of the transformers library is written as that library saves and loads it, where it is a whole one and none
        of it is frozen.

        Args:
            folder: to write to.
            private: with what belongs to the client; else what is shared alone, which is what the server has. Where nothing belongs
                to the clients, the server has a whole model, and that is written.

        Raises:
            FederationError: if nothing is shared, and what is shared is asked for.
        """
        whole = private or self.shares_whole_model
        state = self.export_state(private)
        if not state:
            raise FederationError(f"{type(self).__name__} shares nothing, its server has no model: export a client's (--client 0).")
        parts: dict[str, State] = {}
        for name, tensor in state.items():
            part, _, rest = name.partition(".")
            if isinstance(getattr(self, part, None), Wrapped):
                rest = rest.removeprefix(NETWORK)
            part = "model" if part == "backbone" else part
            parts.setdefault(part if rest else "module", {})[rest or name] = tensor.detach().cpu().contiguous()
        folder.mkdir(parents=True, exist_ok=True)
        if "model" in parts and whole and not self.frozen_names and (library := self._of_transformers()) is not None:
            library.save_pretrained(folder, state_dict={k.removeprefix(NETWORK): v for k, v in parts.pop("model").items()})
        for part, tensors in parts.items():
            # save_file would make a file that nobody else may read
            (folder / f"{part}.safetensors").write_bytes(safetensors.torch.save(tensors, metadata={"format": "pt"}))

    def _of_transformers(self) -> Any:
        """The network, where it is one that the transformers library would make again: in its own size. Else None."""
        small = self.client is not None and self.client.capacity is not None
        network = self.backbone.network if isinstance(self.backbone, Transformer | Wrapped) and not small else None
        return network if hasattr(network, "save_pretrained") else None

    def export_state(self, private: bool = True) -> State:
        """What :meth:`export` writes, by name in the state dict. A method overrides it whose state has another form than what one
        predicts with.

        Args:
            private: see :meth:`export`.
        """
        whole = private or self.shares_whole_model
        return {name: tensor for name, tensor in self.state_dict().items() if whole or name in self._shared}

    def export_merged(self, folder: Path, private: bool = True) -> None:
        """Write the model with its adapters merged into the weights. Default: there are none.

        Args:
            folder: to write to.
            private: see :meth:`export`.
        """
        raise FederationError(f"{type(self).__name__} has no adapters to merge into the weights: export without merged.")
