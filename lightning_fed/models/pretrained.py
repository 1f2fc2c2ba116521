"""Turns any network that a user gives into one that a method can train."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fed.data.hub import from_hub_or_cache
from lightning_fed.errors import FederationError, one_line
from lightning_fed.models.backbone import Backbone, Wrapped
from lightning_fed.models.factory import DOTTED, NETWORK, aliased, name_of, network_of
from lightning_fed.models.language_model import TransformerLM
from lightning_fed.models.question_answering import TransformerQA
from lightning_fed.models.transformer import Transformer, TransformerClassifier
from lightning_fed.models.vision_transformer import VisionTransformer
from lightning_fed.tensors import check_finite, check_fits, second_names


def backbone_of(given: Any, num_classes: int, **settings: Any) -> Backbone:
    """A new backbone of any given network: unchanged if it is a backbone, otherwise wrapped. A network that generates texts is
    trained to do so.

    Args:
        given: see :func:`.network_of`.
        num_classes: its outputs.
        **settings: other arguments of the factory.

    Raises:
        FederationError: for anything but a network, and for one with another number of outputs.
    """
    network: Any = network_of(given, num_classes, **settings)
    if (kind := answering(network)) is not None:
        # As a function of no arguments, a network is not copied: it is new already.
        return kind(num_classes, lambda: network)  # type: ignore[return-value]  # as below
    if isinstance(network, Transformer) and not isinstance(network, TransformerClassifier):
        return network  # type: ignore[return-value]  # its outputs differ from a backbone's, but it can be averaged as a whole
    if isinstance(network, TransformerClassifier) and not isinstance(network, Backbone):
        wrapped = Wrapped(num_classes, lambda: network.network)
        wrapped.drawn = network.drawn
        return wrapped
    if not isinstance(network, Backbone):
        return Wrapped(num_classes, lambda: network)
    if network.num_outputs not in (None, num_classes):
        raise FederationError(
            f"{name_of(network)} has {network.num_outputs} outputs, but num_classes is {num_classes}: give num_classes="
            f"{network.num_outputs}, or a network for {num_classes}."
        )
    return network


def with_weights(network: Any, weights: Mapping[str, Tensor], what: str) -> Any:
    """Set the weights of a network to the given ones, and return it.

    Args:
        network: a backbone, or a network of the transformers library behind the interface of this one.
        weights: all its tensors, by their names in it, in the network that it wraps, or in files of the transformers library.
        what: description of the weights, the subject of an error's sentence.

    Raises:
        FederationError: if tensors are missing, superfluous or of another shape.
    """
    prefix = NETWORK if isinstance(network, Wrapped | Transformer) else ""
    twice = second_names(network)
    own = {name.removeprefix(prefix): tensor for name, tensor in network.state_dict().items() if name not in twice}
    given = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name not in twice}
    if prefix and given.keys() != own.keys() and hasattr(network.network, "save_pretrained"):
        given = _from_a_file(network.network, given)
    try:
        check_fits(given, own, what)
    except FederationError as error:
        raise FederationError(f"{error} Give weights of a {name_of(network)} like this run's, all of it.") from error
    check_finite(given, what)
    for name, tensor in own.items():
        if (dtype := given[name].dtype).is_floating_point != tensor.is_floating_point():
            raise FederationError(f"{what} has {name!r} of {dtype}, which cannot become {tensor.dtype}.")
        tensor.copy_(given[name])
    return network


def _from_a_file(network: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file of the transformers library by their names in its network, which may differ. Other tensors are
    returned unchanged.
    """
    with torch.random.fork_rng(devices=[]):  # missing tensors are drawn on the CPU; CUDA must not be initialized here
        loaded, found = type(network).from_pretrained(None, config=network.config, state_dict=weights, output_loading_info=True)
    return weights if any(found.values()) else loaded.state_dict()


def transformer_of(given: Any, num_classes: int) -> Transformer:
    """A new network of the transformers library from any given one.

    Args:
        given: see :func:`.network_of`; or a name on the Hugging Face hub or a local folder, from which a classifier is loaded.
        num_classes: its outputs.

    Raises:
        FederationError: for anything but such a network.
    """
    if isinstance(given, str) and (Path(given).expanduser().is_dir() or not DOTTED.fullmatch(given)):
        return classifier_from(given, num_classes)
    # Its body will be frozen: an existing network need not be in memory twice.
    network = aliased(given) if isinstance(given, nn.Module) else network_of(given, num_classes)
    if isinstance(network, Wrapped):
        network = network.network
    return network if isinstance(network, Transformer) else around(network, num_classes)


def classifier_from(name: str, num_classes: int) -> Transformer:
    """A classifier of images, if the model is a vision transformer, otherwise of texts.

    Args:
        name: of a model on the hub, or a local folder.
        num_classes: outputs of its head.
    """
    from transformers import AutoConfig

    try:
        folder = Path(name).expanduser()
        load = AutoConfig.from_pretrained
        kind = (load(str(folder)) if folder.is_dir() else from_hub_or_cache(load, name)).model_type
    except (OSError, ValueError, FederationError) as error:
        raise FederationError(
            f"No model {name!r} could be loaded: give as backbone a local folder, a name on the hub, or one of "
            f"TransformerClassifier, TransformerQA, TransformerLM and VisionTransformer. {one_line(error)}"
        ) from error
    return VisionTransformer(num_classes, name) if kind == "vit" else TransformerClassifier(num_classes, name)


def answering(network: Any) -> type[TransformerQA] | type[TransformerLM] | None:
    """Wrapper class for a model of the transformers library that generates texts, by its class; None for others."""
    kind = type(network).__name__ if hasattr(network, "save_pretrained") else ""
    if kind.endswith("ForQuestionAnswering"):
        return TransformerQA
    return TransformerLM if kind.endswith(("ForCausalLM", "LMHeadModel")) else None


def around(network: Any, num_classes: int) -> Transformer:
    """A model of the transformers library, wrapped in the interface of this library for its task."""
    kind, model = type(network).__name__, lambda: network
    if not hasattr(network, "save_pretrained"):
        raise FederationError(
            f"Adapters are put on networks of the transformers library, but this is a {kind}: give the name of such a model, a "
            "folder, or the model itself; or choose a method that trains the whole network, such as FedAvg."
        )
    if kind.endswith(("ForSequenceClassification", "ForImageClassification")):
        return (VisionTransformer if network.config.model_type == "vit" else TransformerClassifier)(num_classes, model)
    if (answers := answering(network)) is not None:
        return answers(num_classes, model)
    raise FederationError(
        f"{kind} is not a model for a supported task: give one for sequence or image classification, question answering or causal "
        "language modelling."
    )
