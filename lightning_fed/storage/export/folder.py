"""The folder of an exported model."""

import json
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from lightning_fed.core.module import FederatedModule
from lightning_fed.data import FederatedDataModule
from lightning_fed.data.text.classification import load_tokenizer
from lightning_fed.errors import FederationError
from lightning_fed.formatting import shown
from lightning_fed.models.adapter_files import merged_weights, save_adapter, save_merged
from lightning_fed.models.frozen import copy_learning
from lightning_fed.storage.export.config import label_names, model_config
from lightning_fed.storage.export.onnx import write_onnx
from lightning_fed.storage.export.safetensors import write_safetensors

Format = Literal["safetensors", "onnx"]


@runtime_checkable
class WritesAdapters(Protocol):
    """A method whose models peft or the transformers library load. Both write to a folder, with what belongs to the client or the
    shared part alone.
    """

    def export_adapter(self, folder: Path, private: bool = True) -> None:
        """Write the adapters."""

    def export_merged(self, folder: Path, private: bool = True) -> None:
        """Write the whole network, its adapters added to the weights."""


def write(
    folder: Path,
    module: FederatedModule,
    data: FederatedDataModule,
    facts: dict[str, Any],
    merged: bool = False,
    format: Format = "safetensors",
) -> None:
    """Write a model, the tokenizer if the data have one, with the chat template that they used, and ``config.json`` with what
    :func:`.model_config` knows. Where the transformers library has a ``config.json`` of its own, that is a block ``lightning_fed``
    in it, and the names of the classes are where that library looks for them.

    Args:
        folder: to write to; created if need be, see :func:`refuse_others`.
        module: the model.
        data: what it learned from.
        facts: of the run; ``client`` is whose model it is, None the server's.
        merged: of a method with adapters: write the whole network, its adapters added to the weights.
        format: of the model: see :func:`.write_safetensors`, or :func:`.write_onnx`.

    Raises:
        FederationError: where the method has no such export, or where something else lies in the folder.
    """
    refuse_others(folder)
    private = facts["client"] is not None
    if format == "onnx":
        _refuse_parts(module, private, merged)
        write_onnx(folder / "model.onnx", module, data.client(facts["client"] or 0))
    else:
        _write(folder, module, private, merged)
    if name := getattr(data, "tokenizer", None):
        tokenizer = load_tokenizer(name, pads=False)
        if (template := getattr(data, "chat_template", None)) is not None:
            tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
    _describe(folder / "config.json", model_config(module, data, facts), label_names(data))


def _write(folder: Path, module: FederatedModule, private: bool, merged: bool) -> None:
    if isinstance(module, WritesAdapters):
        (module.export_merged if merged else module.export_adapter)(folder, private)
    elif (network := _with_adapters(module, private)) is not None:
        if merged:
            save_merged(folder, network, module.without_adapters(), merged_weights(network))
        else:
            save_adapter(folder, network, module.without_adapters())
    elif merged:
        which = "server has a part of a network" if module.networks.adapters else "networks have no adapters"
        raise FederationError(f"{type(module).__name__}'s {which}, so that nothing can be merged: export without merged.")
    else:
        write_safetensors(folder, module, private)


def _with_adapters(module: FederatedModule, private: bool) -> Any:
    """The network with adapters that an export is, as it is to be written; None: it is something else, or a part of one."""
    state = module.export_state(private)
    if not module.networks.adapters or state.keys() != {f"backbone.{name}" for name in module.backbone.state_dict()}:
        return None
    network = copy_learning(module.backbone)
    network.load_state_dict({name.removeprefix("backbone."): tensor for name, tensor in state.items()})
    return network


def refuse_others(folder: Path) -> None:
    """Raises :class:`FederationError` for a folder that has something in it and no exported model: nobody's files make way for one.
    Hidden files do not count.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise FederationError(f"{folder} is no folder: give another output, a folder for the exported model alone.")
    found = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if found and not _is_export(folder / "config.json"):
        raise FederationError(
            f"{folder} has {shown(found[0])}{f' and {len(found) - 1} more' if len(found) > 1 else ''} in it and no exported model: "
            "give another output, an empty folder or a new one."
        )


def _is_export(config: Path) -> bool:
    try:
        said = json.loads(config.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(said, dict) and not said.keys().isdisjoint({"lightning_fed", "lightning_fed_version"})


def _describe(path: Path, config: dict[str, Any], names: list[str] | None) -> None:
    if path.exists():
        own = json.loads(path.read_text())
        if "model_type" in own:  # written by transformers, a moment ago
            if names is not None:
                own |= {"id2label": dict(enumerate(names)), "label2id": {name: label for label, name in enumerate(names)}}
            config = own | {"lightning_fed": config}
    path.write_text(json.dumps(config, indent=2) + "\n")


def _refuse_parts(module: FederatedModule, private: bool, merged: bool) -> None:
    if merged:
        raise FederationError("An ONNX file has the whole network already: export with format onnx and without merged.")
    if not (private or module.shares_whole_model):
        raise FederationError(
            f"The server of {type(module).__name__} has what is shared and no model to predict with: export a client's "
            "(--client 0), or without format onnx."
        )
