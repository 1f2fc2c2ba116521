"""The folder of an exported model."""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from lightning_fed.core.module import FederatedModule
from lightning_fed.data import FederatedDataModule
from lightning_fed.data.text.classification import load_tokenizer
from lightning_fed.errors import FederationError, require
from lightning_fed.formatting import shown
from lightning_fed.models.adapter_files import merged_weights, save_adapter, save_merged
from lightning_fed.models.frozen import copy_learning
from lightning_fed.storage.export.config import label_names, model_config
from lightning_fed.storage.export.onnx import write_onnx
from lightning_fed.storage.export.safetensors import write_safetensors
from lightning_fed.system.disk import remove
from lightning_fed.system.locks import taken

log = logging.getLogger(__name__)

Format = Literal["safetensors", "onnx"]

LOADED = ("config.json", "adapter_config.json", "*.safetensors*", "model.onnx*", "chat_template.jinja")
"""Files of an export that programs look for in its folder. Those of an earlier export are deleted: the transformers library would
add an adapter that lies beside a merged network, and a part of another method's model would be taken for one of this.
"""


@runtime_checkable
class WritesAdapters(Protocol):
    """A method whose models peft or the transformers library can load. Both methods write to a folder, with the client's private
    part or the shared part only.
    """

    def export_adapter(self, folder: Path, private: bool = True) -> None:
        """Write the adapters."""

    def export_merged(self, folder: Path, private: bool = True) -> None:
        """Write the whole network with the adapters merged into the weights."""


def write(
    folder: Path,
    module: FederatedModule,
    data: FederatedDataModule,
    facts: dict[str, Any],
    merged: bool = False,
    format: Format = "safetensors",
) -> None:
    """Write a model, its tokenizer and chat template if the data have them, and ``config.json`` with :func:`.model_config`.

    If the transformers library has a ``config.json`` of its own, the description is a block ``lightning_fed`` in it, and the names
    of the classes are where that library expects them. An earlier export is replaced once the new one is written completely.

    Args:
        folder: folder to write to, created if necessary; see :func:`refuse_others`.
        module: the model.
        data: the data that it was trained on.
        facts: facts about the run; ``client`` is the client of the model, None for the server.
        merged: for methods with adapters: write the whole network with the adapters merged into the weights.
        format: format of the model: see :func:`.write_safetensors` and :func:`.write_onnx`.

    Raises:
        FederationError: if the method has no such export, other files are in the folder, or another process exports to it.
    """
    with _only_writer(folder):
        refuse_others(folder)
        _write_all(folder, module, data, facts, merged, format)


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """A context in which this is the only export that writes to a folder, which is created if necessary. The lock is on the folder
    itself, so that no file of it is left among those of the model.
    """
    with suppress(FileExistsError):  # a file, which is refused next
        folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            held = taken(descriptor)
        except OSError as error:  # some network file systems have no locks
            log.warning(f"{folder} cannot be locked ({error.strerror}): make sure that no other process exports to it.")
            held = True
        require(held, f"{folder} is being written by another export: wait until it ends, or give another output.")
        yield
    finally:
        os.close(descriptor)


def _write_all(
    folder: Path, module: FederatedModule, data: FederatedDataModule, facts: dict[str, Any], merged: bool, format: Format
) -> None:
    new = folder / ".new"  # the same each time: leftovers of a kill are replaced
    remove(new)
    new.mkdir()
    try:
        private = facts["client"] is not None
        if format == "onnx":
            _refuse_parts(module, private, merged)
            write_onnx(new / "model.onnx", module, data.client(facts["client"] or 0))
        else:
            _write(new, module, private, merged)
        if name := getattr(data, "tokenizer", None):
            tokenizer = load_tokenizer(name, pads=False)
            if (template := getattr(data, "chat_template", None)) is not None:
                tokenizer.chat_template = template
            tokenizer.save_pretrained(new)
        _describe(new / "config.json", model_config(module, data, facts), label_names(data))
        _replace(folder, new)
    finally:
        remove(new)
        with suppress(OSError):  # it is not empty, if all went well
            folder.rmdir()


def _replace(folder: Path, new: Path) -> None:
    """Move all files into a folder, in place of those of an earlier export; last ``config.json``, which makes it an export."""
    for path in [path for pattern in LOADED for path in folder.glob(pattern)]:
        path.unlink()
    for path in sorted((path for path in new.rglob("*") if path.is_file()), key=lambda path: path.name == "config.json"):
        place = folder / path.relative_to(new)
        place.parent.mkdir(exist_ok=True)
        path.replace(place)


def _write(folder: Path, module: FederatedModule, private: bool, merged: bool) -> None:
    if isinstance(module, WritesAdapters):
        (module.export_merged if merged else module.export_adapter)(folder, private)
    elif (network := _with_adapters(module, private)) is not None:
        if merged:
            save_merged(folder, network, module.without_adapters(), merged_weights(network))
        else:
            save_adapter(folder, network, module.without_adapters())
        write_safetensors(folder, module, private, network=False)
    elif merged:
        which = "server has a part of a network" if module.networks.adapters else "networks have no adapters"
        raise FederationError(f"{type(module).__name__}'s {which}, so that nothing can be merged: export without merged.")
    else:
        write_safetensors(folder, module, private)


def _with_adapters(module: FederatedModule, private: bool) -> Any:
    """The network with adapters to write; None if the export has none, or a part of one."""
    if not module.networks.adapters:
        return None
    state = module.export_state(private)
    names = list(module.backbone.state_dict())
    if not state.keys() >= {f"backbone.{name}" for name in names}:
        return None
    network = copy_learning(module.backbone)
    network.load_state_dict({name: state[f"backbone.{name}"] for name in names})
    return network


def refuse_others(folder: Path) -> None:
    """Raises :class:`FederationError` for a folder with other files than an exported model, which must not be overwritten. Hidden
    files are ignored.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise FederationError(f"{folder} is not a folder: give another output, a folder for the exported model only.")
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
            f"The server of {type(module).__name__} has only the shared part, which cannot predict: export a client's model "
            "(--client 0), or without format onnx."
        )
