"""Description of an exported model, as plain JSON."""

import inspect
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_fed import __version__
from lightning_fed.core.module import FederatedModule
from lightning_fed.data import FederatedDataModule, ScaledColumns
from lightning_fed.models.backbone import Wrapped
from lightning_fed.models.factory import imported, passed


def model_config(module: FederatedModule, data: FederatedDataModule, facts: dict[str, Any]) -> dict[str, Any]:
    """The description of an exported model.

    Returns:
        ``lightning_fed_version``, the facts, ``content`` (``model``, or ``shared`` for a server's part of a model), ``network``
        (see :func:`network_config`), ``model_size`` (see :class:`.ClientInfo`), ``num_classes`` and ``class_names``; for images
        also ``image_size`` (height and width) and, for byte images, ``mean`` and ``std`` of their channels in [0, 1]; for tables
        ``columns``, and for each of them ``missing``, ``mean`` and ``std`` (see :class:`.Scale`). Unknown values are None.
    """
    whole = facts["client"] is not None or module.shares_whole_model
    return {
        "lightning_fed_version": __version__,
        **facts,
        "content": "model" if whole else "shared",
        "network": network_config(module) if whole or any(name.startswith("backbone.") for name in module.shared_names()) else None,
        "model_size": module.client.model_size if module.client else None,
        "num_classes": module.num_classes,
        "class_names": label_names(data),
        **(_columns(data, facts["client"]) if isinstance(data, ScaledColumns) and data.at_hand else _images(data)),
    }


def network_config(module: FederatedModule) -> dict[str, Any]:
    """``class_path`` and ``init_args`` of the network, in the form of ``lightning.pytorch.cli.instantiate_class``. If the network
    was given as an object, got another head, or was made from objects or by something without a name, ``class_path`` is its class
    and ``init_args`` is None.
    """
    factory, given = module.network_factory()
    made_by, args, kwargs = _unwrapped(factory)
    new_head = False
    if made_by is Wrapped:
        wrapping = inspect.signature(Wrapped).bind(*args, module.num_classes, **kwargs).arguments
        made_by, args, kwargs = _unwrapped(wrapping["network"])
        kwargs, new_head = kwargs | (wrapping.get("settings") or {}), wrapping.get("new_head", False)
    path = _import_path(made_by)
    arguments = _arguments(made_by, args, module.num_classes, kwargs | given) if path and not new_head else None
    if arguments is None:
        network = getattr(module, "backbone", made_by)
        return {"class_path": _import_path(type(network.network if isinstance(network, Wrapped) else network)), "init_args": None}
    return {"class_path": path, "init_args": arguments}


def label_names(data: FederatedDataModule) -> list[str] | None:
    """Names of the classes in the order of their numbers, if the data have them and classes are predicted."""
    names = data.class_names if data.predicts_labels else None
    return None if names is None else [str(name) for name in names]


def _images(data: FederatedDataModule) -> dict[str, Any]:
    if not data.at_hand:
        size = getattr(data, "image_size", None)
        return {"image_size": size and [size, size], "mean": list(data.mean), "std": list(data.std)}
    images, _ = next(iter(data.client(0).test_dataloader()))
    if not isinstance(images, torch.Tensor) or images.dim() != 4:
        return {"image_size": None, "mean": None, "std": None}
    normalized = images.dtype == torch.uint8
    return {
        "image_size": list(images.shape[-2:]),
        "mean": list(data.mean) if normalized else None,
        "std": list(data.std) if normalized else None,
    }


def _columns(data: ScaledColumns, client: int | None) -> dict[str, Any]:
    inputs, _ = next(iter(data.client(client or 0).test_dataloader()))
    assert isinstance(inputs, torch.Tensor)
    titles, scale = [data.column_title(place) for place in range(inputs.shape[1])], data.scale(client)
    numbers = {name: None if (found := getattr(scale, name)) is None else found.tolist() for name in ("missing", "mean", "std")}
    return {"image_size": None, "columns": titles, **numbers}


def _unwrapped(factory: Callable[..., nn.Module]) -> tuple[Callable[..., nn.Module], tuple[Any, ...], dict[str, Any]]:
    """The function that a partial or a dotted path refers to, and its arguments."""
    if isinstance(factory, str):
        factory = imported(factory)
    if not isinstance(factory, partial):
        return factory, (), {}
    classes = [place for place, argument in enumerate(factory.args) if inspect.isclass(argument)]
    if classes and not inspect.isclass(factory.func):  # the command line wraps a class in a function
        made: Callable[..., nn.Module] = factory.args[classes[0]]
        return made, factory.args[classes[0] + 1 :], factory.keywords
    return factory.func, factory.args, factory.keywords


def _arguments(
    made_by: Callable[..., nn.Module], args: tuple[Any, ...], classes: int, kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    """The arguments of a network by name; None if some are not plain data."""
    signature = inspect.signature(made_by)
    placed, named = passed(partial(made_by, *args), classes, kwargs)
    arguments = dict(signature.bind(*args, *placed, **(named | kwargs)).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name, {})
    try:
        return dict(json.loads(json.dumps(arguments)))
    except TypeError:
        return None


def _import_path(named: Any) -> str | None:
    """The import path of a class or function; None for local ones, nested ones, and objects without a name."""
    name = getattr(named, "__qualname__", "<>")
    return None if "<" in name or "." in name else f"{named.__module__}.{name}"
