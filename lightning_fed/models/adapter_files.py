"""Adapters in peft's file format, and networks with their adapters added to the weights."""

import warnings
from collections.abc import Collection, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from torch import nn

from lightning_fed.errors import FederationError
from lightning_fed.models.adapters import COMMON, adapted_layers, inside
from lightning_fed.models.backbone import Backbone
from lightning_fed.models.factory import NETWORK, name_of
from lightning_fed.models.transformer import Transformer
from lightning_fed.nn.learn_in_float32 import learn_in_float32
from lightning_fed.tensors import State, second_names

Network = Backbone | Transformer

FACTORS = {"lora_A": 0, "lora_B": 1, "lora_embedding_A": 0, "lora_embedding_B": 1}
"""Where peft has them in a layer, and along which dimension those of several adapters stand side by side."""


CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.ParameterDict, nn.ParameterList)
"""Modules that compute nothing themselves, which peft does not save."""


def save_adapter(folder: Path, network: Network, clean: Network, adapters: Sequence[str] = (COMMON,)) -> None:
    """Write a peft adapter, which ``PeftModel.from_pretrained(network, folder)`` loads onto the original network.

    It contains other trained modules (the head, a pooler) as ``modules_to_save``, and the adapters that act together as one: those
    of ranks r and r' become one of rank r + r', because :math:`BA + DC` is the product of the concatenated factors.

    Args:
        folder: to write to.
        network: with adapters.
        clean: the network without adapters, in which only the other trained parameters require gradients.
        adapters: names of the adapters that act.

    Raises:
        FederationError: if another trained parameter belongs to no layer, or peft would confuse an adapted layer with a saved one.
    """
    from peft import LoraConfig, get_peft_model

    base, own = inside(clean), inside(network).state_dict()
    saved = modules_of({name for name, parameter in base.named_parameters() if parameter.requires_grad}, base)
    layers = adapted_layers(inside(network))
    for path in layers:
        # peft saves every module whose name ends like one of them, and puts no adapter in it.
        if any(part.endswith(tuple(saved)) for part in accumulate(path.split("."), "{}.{}".format)):
            raise FederationError(
                f"{path} has an adapter, but a peft adapter that saves {' and '.join(saved)} whole would by its name save it, too: "
                "export with merged."
            )
    first = next(iter(layers.values()))
    rank = sum(first.r[adapter] for adapter in adapters)
    config = LoraConfig(
        r=rank,
        lora_alpha=cast(int, first.scaling[adapters[0]] * rank),
        target_modules=list(layers),
        modules_to_save=saved or None,
        task_type=network.peft_task if isinstance(network, Transformer) else None,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to False")  # peft corrects it for GPT-2's transposed layers
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # peft 0.21 with transformers 5.24
        exported = get_peft_model(cast(Any, base), config)
    learn_in_float32(exported)
    values: State = {}
    for path, layer in layers.items():
        for factor, side in FACTORS.items():
            if parts := [_weight(getattr(layer, factor)[adapter]) for adapter in adapters if adapter in getattr(layer, factor)]:
                ending = "" if isinstance(getattr(layer, factor), nn.ParameterDict) else ".weight"
                values[f"base_model.model.{path}.{factor}.default{ending}"] = torch.cat(parts, dim=side)
    for module in saved:
        for name in (name for name in own if name.startswith(f"{module}.")):
            values[f"base_model.model.{module}.modules_to_save.default.{name.removeprefix(f'{module}.')}"] = own[name]
    exported.load_state_dict(values, strict=False)
    # New modules are in modules_to_save; to check embeddings, peft would look for the network on the hub.
    exported.save_pretrained(str(folder), save_embedding_layers=False)


def save_merged(folder: Path, network: Network, clean: Network, weights: State) -> None:
    """Write a whole network without adapters: in the format of the transformers library, if it is one of that library, otherwise as
    ``model.safetensors``, with the names of its tensors.

    Args:
        folder: to write to.
        network: with adapters.
        clean: see :func:`save_adapter`.
        weights: of the adapted layers, with the adapters' products added, by name of the layer.

    Raises:
        FederationError: if an adapted layer has a weight that another layer has, too, which is adapted otherwise or not at all.
    """
    base, own = inside(clean), inside(network).state_dict()
    learned = {name for name, parameter in base.named_parameters() if parameter.requires_grad}
    learned |= {name for name in base.state_dict() if name.rpartition(".")[0] in {path.rpartition(".")[0] for path in learned}}
    of_layers = {network.get_submodule(path): weight for path, weight in weights.items()}
    merged = {  # a repeated layer has several names
        f"{path.removeprefix(NETWORK)}.weight": of_layers[layer]
        for path, layer in network.named_modules(remove_duplicate=False)
        if layer in of_layers
    }
    for name, first in second_names(base).items():
        if merged.get(name) is not merged.get(first):
            raise FederationError(
                f"{first} and {name} of {name_of(network)} are one weight, which adapters would make two: export the adapter, "
                "without merged, or adapt other layers."
            )
    state = {
        name: merged.get(name, own[name] if name in learned else tensor).detach().cpu().contiguous()
        for name, tensor in base.state_dict().items()
    }
    if hasattr(base, "save_pretrained"):
        save_silently(base, folder, state)
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / "model.safetensors", state)


def write_tensors(path: Path, tensors: State) -> None:
    """Write a safetensors file. Tied tensors are copied for each of their names, as the library refuses shared memory."""
    own = {name: tensor.clone() for name, tensor in tensors.items()}
    # save_file would make a file that only its owner can read.
    path.write_bytes(safetensors.torch.save(own, metadata={"format": "pt"}))


def save_silently(network: Any, folder: Path, state: State) -> None:
    """Save these tensors of a network of the transformers library, without its progress bar."""
    from transformers.utils import logging

    shows_progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        network.save_pretrained(str(folder), state_dict=state)
    finally:
        if shows_progress:
            logging.enable_progress_bar()


def merged_weights(network: Network, adapters: Sequence[str] = (COMMON,)) -> State:
    """The adapted weights with the products of these adapters added, by name of the layer in the network."""
    layers = adapted_layers(network)
    if quantised := [path for path, layer in layers.items() if not layer.get_base_layer().weight.is_floating_point()]:
        raise FederationError(f"{quantised[0]} is quantised: export the adapter, and merge it into the network as published.")
    return {
        path: (layer.get_base_layer().weight + sum(map(layer.get_delta_weight, adapters))).detach()
        for path, layer in layers.items()
    }


def modules_of(parameters: Collection[str], network: nn.Module) -> list[str]:
    """The fewest modules that hold these parameters: a whole module if it has no other parameters, otherwise the submodules that
    hold them directly.

    Raises:
        FederationError: for a parameter of the network itself, which belongs to no module in it.
    """
    found: list[str] = []

    def covered(name: str) -> bool:
        return any(name.startswith(f"{module}.") for module in found)

    for path, module in network.named_modules():  # from the outside to the inside
        own = {f"{path}.{name}" for name, _ in module.named_parameters()}
        if path and own and own <= set(parameters) and not covered(path) and not isinstance(module, CONTAINERS):
            found.append(path)
    for name in sorted(parameters):
        if not covered(name):
            module_name = name.rpartition(".")[0]
            if not module_name or isinstance(network.get_submodule(module_name), CONTAINERS):
                raise FederationError(f"{name} belongs to no layer, and a peft adapter stores whole layers: export with merged.")
            found.append(module_name)
    return sorted(module for module in found if not covered(module))


def _weight(factor: nn.Module | nn.Parameter) -> torch.Tensor:
    weight = factor if isinstance(factor, nn.Parameter) else factor.weight
    return cast(torch.Tensor, weight).detach()
