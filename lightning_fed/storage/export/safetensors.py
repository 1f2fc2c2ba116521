"""Models as safetensors, by the names that their tensors have in the networks."""

from pathlib import Path
from typing import Any

import safetensors.torch

from lightning_fed.core.module import FederatedModule
from lightning_fed.errors import FederationError
from lightning_fed.models import Transformer, Wrapped
from lightning_fed.models.factory import NETWORK
from lightning_fed.tensors import State


def write_safetensors(folder: Path, module: FederatedModule, private: bool = True) -> None:
    """Write what a module says in :meth:`.SharedStateMixin.export_state`, a file for each of its parts. ``model.safetensors`` is
    the network, whose tensors have the names that they have in it; other parts (an adapter, a second head) have files of their own
    names. A network of the transformers library is written as that library saves and loads it, where it is a whole one and none of
    it is frozen.

    Args:
        folder: to write to.
        module: the model.
        private: with what belongs to the client; else what is shared alone, which is what the server has.

    Raises:
        FederationError: if nothing is shared, and what is shared is asked for.
    """
    state = module.export_state(private)
    if not state:
        raise FederationError(f"{type(module).__name__} shares nothing, its server has no model: export a client's (--client 0).")
    parts: dict[str, State] = {}
    for name, tensor in state.items():
        part, _, rest = name.partition(".")
        if isinstance(getattr(module, part, None), Wrapped):
            rest = rest.removeprefix(NETWORK)
        part = "model" if part == "backbone" else part
        parts.setdefault(part if rest else "module", {})[rest or name] = tensor.detach().cpu().contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    whole = (private or module.shares_whole_model) and not module.frozen_names
    if "model" in parts and whole and (library := _of_transformers(module)) is not None:
        library.save_pretrained(folder, state_dict={k.removeprefix(NETWORK): v for k, v in parts.pop("model").items()})
    for part, tensors in parts.items():
        # save_file would make a file that nobody else may read
        (folder / f"{part}.safetensors").write_bytes(safetensors.torch.save(tensors, metadata={"format": "pt"}))


def _of_transformers(module: FederatedModule) -> Any:
    """The network, where it is one that the transformers library would make again: in its own size. Else None."""
    small = module.client is not None and module.client.model_size is not None
    network = module.backbone.network if isinstance(module.backbone, Transformer | Wrapped) and not small else None
    return network if hasattr(network, "save_pretrained") else None
