"""Builds a network from any description of one that a user may give."""

import copy
import inspect
import pkgutil
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from lightning_fed.errors import FederationError, error_text, place_of

Maker = Callable[..., nn.Module]

DOTTED = re.compile(r"[A-Za-z_]\w*(\.\w+)+")
"""What a dotted path looks like."""

NETWORK = "network."
"""What the names of the tensors of a network begin with that only wraps another one, and those of the network in it do not."""


def network_of(given: Any, num_classes: int | None, **settings: Any) -> nn.Module:
    """A new network.

    Args:
        given: a class, a function or any other factory; the dotted path of one; or a network, which is copied, weights and all.
        num_classes: outputs of the network; see :func:`call`.
        **settings: other arguments of the factory.

    Raises:
        FederationError: for anything else.
    """
    if isinstance(given, str):
        given = imported(given)
    if isinstance(given, nn.Module):
        if settings:
            raise FederationError(
                f"The {name_of(given)} that was given exists already and cannot be built with {_listed(settings)}: give its "
                "class or a function that builds it."
            )
        try:
            copied = copy.deepcopy(given)
        except (RuntimeError, TypeError) as error:
            raise FederationError(
                f"The {name_of(given)} that was given cannot be copied for each client ({error_text(error)}): give its class or a "
                "function that builds it, or weight_norm and spectral_norm of torch.nn.utils.parametrizations."
            ) from error
        return _sized(copied)
    if not callable(given):
        raise FederationError(
            f"backbone is {given!r}, a {type(given).__name__}: give a network, its class, a function that builds it, or the dotted "
            "path of one of these."
        )
    network = call(given, num_classes, **settings)
    if not isinstance(network, nn.Module):
        raise FederationError(f"{title(given)} gave a {type(network).__name__}, expected a torch.nn.Module.")
    return _sized(network)


def _sized(network: nn.Module) -> nn.Module:
    if any(is_lazy(tensor) for tensor in (*network.parameters(), *network.buffers())):
        raise FederationError(
            f"{name_of(network)} has lazy layers, whose sizes are not known yet: give the sizes, or call it once with an example "
            "in the function that builds it."
        )
    return network


def aliased(network: nn.Module) -> nn.Module:
    """A copy whose parameters lie in the same memory: for large networks whose values do not change. Parameters of other classes
    (quantised ones) are the same objects.
    """
    own = {id(p): p for p in network.parameters()}
    memo = {key: nn.Parameter(p.detach(), p.requires_grad) if type(p) is nn.Parameter else p for key, p in own.items()}
    return copy.deepcopy(network, memo)


def call(make: Maker, num_classes: int | None, **settings: Any) -> nn.Module:
    """Let a factory build a network for a number of classes. It gets the number as ``num_classes``, or as ``num_labels`` if the
    factory or its library uses that name; as its first required argument; and not at all if no argument is required.

    Args:
        make: the factory.
        num_classes: None: not given to the factory.
        **settings: its other arguments.

    Raises:
        FederationError: if the factory refuses its arguments.
    """
    args, named = ((), {}) if num_classes is None else passed(make, num_classes, settings)
    named = named | settings
    try:
        with suppress(ValueError):  # a builtin has no signature
            inspect.signature(make).bind(*args, **named)
    except TypeError as error:
        raise FederationError(f"{title(make)} cannot be called with {_listed(named) or 'no arguments'}: {error}.") from error
    try:
        return make(*args, **named)
    except FederationError:
        raise
    except Exception as error:
        if not isinstance(error, ValueError) and place_of(error):
            raise  # inside the factory, whose author will want to see where
        refused = isinstance(error, TypeError) and (error.__traceback__ is None or error.__traceback__.tb_next is None)
        verb = "cannot be called" if refused else "builds no network"
        raise FederationError(f"backbone: {title(make)} {verb} with {_listed(named) or args}: {error_text(error)}") from error


def passed(make: Maker, num_classes: int, settings: dict[str, Any]) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The number of classes as positional or as keyword argument, as :func:`call` passes it."""
    try:
        parameters = inspect.signature(make).parameters
    except ValueError:  # of a builtin
        return (num_classes,), {}
    for name in ("num_classes", "num_labels"):
        if name in parameters:
            return (), {name: num_classes}
    kinds = inspect.Parameter
    asked = [p for p in parameters.values() if p.default is p.empty and p.name not in settings]
    for p in asked:
        if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD):  # by name: others may be set before it
            return ((num_classes,), {}) if p.kind is kinds.POSITIONAL_ONLY else ((), {p.name: num_classes})
    if any(p.kind is kinds.VAR_KEYWORD for p in parameters.values()):
        of = getattr(make, "func", make)
        return (), {"num_labels" if str(getattr(of, "__module__", "")).startswith("transformers.") else "num_classes": num_classes}
    # functools.partial makes what follows an argument that it binds by name one that can only be given by name.
    return (), {p.name: num_classes for p in asked if p.kind is kinds.KEYWORD_ONLY}


def imported(path: str) -> Any:
    """The object with a dotted path.

    Raises:
        FederationError: if there is no such object.
    """
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise FederationError(
            f"There is no {path!r} ({error}): give the dotted path of a network's class or of a function that builds one, such as "
            "torchvision.models.resnet18."
        ) from error


def names_a(kind: type[nn.Module], name: str) -> bool:
    """Whether a name, a dotted path or a bare class name, is that of a class of a kind."""
    if "." not in name:
        return name in {subclass.__name__ for subclass in _subclasses(kind)}
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError):
        return False
    return inspect.isclass(found) and issubclass(found, kind)


def name_of(network: nn.Module) -> str:
    """Display name of a network: the name of its class, or of the network inside a wrapper."""
    inner = getattr(network, "network", None)
    return type(inner if isinstance(inner, nn.Module) else network).__name__


def title(make: Any) -> str:
    """The name of a factory."""
    make = getattr(make, "func", make)
    if str(getattr(make, "__module__", "")).startswith("jsonargparse"):  # which made a function of a configuration
        return "the class given"
    return getattr(make, "__qualname__", None) or type(make).__name__


def _listed(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())


def _subclasses(kind: type[nn.Module]) -> set[type[nn.Module]]:
    return {kind}.union(*map(_subclasses, kind.__subclasses__()))
