"""Models as safetensors, with the names that their tensors have in the networks."""

from pathlib import Path
from typing import Any

from lightning_fed.core.module import FederatedModule
from lightning_fed.errors import FederationError
from lightning_fed.models import Transformer, Wrapped
from lightning_fed.models.adapter_files import save_silently, write_tensors
from lightning_fed.models.factory import NETWORK
from lightning_fed.tensors import State


def write_safetensors(folder: Path, module: FederatedModule, private: bool = True, network: bool = True) -> None:
    """Write what :meth:`.SharedStateMixin.export_state` returns, a file for each part.

    ``model.safetensors`` is the network, with the names that its tensors have in it; other parts (an adapter, a second head) have
    files with their own names. A complete network of the transformers library without frozen parts is written in the form in which
    that library saves and loads it.

    Args:
        folder: folder to write to.
        module: the model.
        private: True: with the client's private part. False: the shared part only, which the server has.
        network: False: the other parts only.

    Raises:
        FederationError: if the shared part is requested, but nothing is shared.
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
    if not network:
        parts.pop("model", None)
    folder.mkdir(parents=True, exist_ok=True)
    whole = (private or module.shares_whole_model) and not module.frozen_names
    if "model" in parts and whole and (library := _of_transformers(module)) is not None:
        save_silently(library, folder, {k.removeprefix(NETWORK): v for k, v in parts.pop("model").items()})
    for part, tensors in parts.items():
        write_tensors(folder / f"{part}.safetensors", tensors)


def _of_transformers(module: FederatedModule) -> Any:
    """The network if it is a transformers one in its original size; else None."""
    small = module.client is not None and module.client.model_size is not None
    network = module.backbone.network if isinstance(module.backbone, Transformer | Wrapped) and not small else None
    return network if hasattr(network, "save_pretrained") else None
