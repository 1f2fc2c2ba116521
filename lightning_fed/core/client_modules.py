"""Modules of clients: each has its own networks and shares its frozen tensors with all clients of its architecture."""

import copy
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from lightning_fed.data.client_info import ClientInfo
from lightning_fed.errors import FederationError
from lightning_fed.seeding import INITIAL, seeded
from lightning_fed.tensors import check_fits

ADDED = "lightning_fed.nn."
"""Home of the layers that methods add to networks."""

REGISTERED = ("_parameters", "_buffers", "_modules")
"""Attributes in which a module has its parameters, buffers and layers."""

M = TypeVar("M", bound=Any)
"""A :class:`.FederatedModule`."""


class ClientModules(Generic[M]):
    """Makes the client modules of a method.

    The client's own tensors are drawn on the client's random stream. Frozen tensors that are neither shared nor private belong to
    no client: they are drawn on the stream of the federation's own module.

    Args:
        method: the method. If its networks are built, all clients of its architecture share their frozen tensors.
        seed: the run's seed.
    """

    def __init__(self, method: M, seed: int) -> None:
        self.seed = seed
        self._template = method
        if not method.is_built:
            self._template = method.unbuilt_copy()
            with seeded(seed, INITIAL):
                self._template.configure_model()

    def of(self, client: ClientInfo) -> M:
        """A new module, drawn on the client's random stream."""
        return self._with_frozen(client, client.id)

    def of_architecture(self, client: ClientInfo | None) -> M:
        """A new module of the client's architecture (None: the method's own) without anything client-specific."""
        return self._with_frozen(client)

    def _with_frozen(self, client: ClientInfo | None, *own: int) -> M:
        module, architecture = self._drawn(client, *own), self._template.architecture(client)
        known = self._template.frozen_by_architecture  # once in memory for all modules of this template
        if frozen_parameters(module):
            if architecture == self._template.architecture(self._template.client):
                frozen = frozen_parameters(self._template)
            elif (frozen := known.get((self.seed, architecture), {})) == {}:
                frozen = frozen_parameters(self._drawn(client) if own else module)
                known[self.seed, architecture] = frozen
            take_frozen(module, frozen)
        return module

    def _drawn(self, client: ClientInfo | None, *own: int) -> M:
        """A module drawn on the stream of (seed, initial, ``*own``)."""
        module = as_before_build(self._template)
        module.client = client
        with seeded(self.seed, INITIAL, *own):
            module.configure_model()
        if self._template.dtype != torch.float32:  # a Trainer with another precision has converted the template
            module.to(self._template.dtype)
        return module


def as_before_build(module: M) -> M:
    """A copy of a module as it was before its networks were built. Arguments of ``__init__`` stay the same objects, except layers:
    these are copied, but for frozen parameters.
    """
    copied = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, dict | set):  # nn.Module keeps parameters, buffers and children in these
            vars(copied)[name] = copy.copy(value)
    if module.is_built:
        given = module.given_attributes
        for name in vars(module).keys() - given:
            del vars(copied)[name]
        for place in REGISTERED:
            vars(copied)[place] = {name: value for name, value in vars(module)[place].items() if name in given}
    copied._trainer, copied.task = None, module.task.copied()
    copies: dict[int, Any] = {id(p): p for p in module.parameters() if not p.requires_grad} | {id(copied.task): copied.task}
    for place in REGISTERED:
        vars(copied)[place] = {
            name: _own_copy(value, f"{type(module).__name__}.{name}", copies) for name, value in vars(copied)[place].items()
        }
    for name, value in vars(copied).items():
        vars(copied)[name] = _with_copies(value, copies)
    copied._begin()
    return copied


def _own_copy(layer: Any, name: str, copies: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(layer, copies)
    except (RuntimeError, TypeError) as error:
        raise FederationError(
            f"{name} was made in __init__ and cannot be copied for each client ({error}): make it in build(), after "
            "super().build()."
        ) from error


def _with_copies(value: Any, copies: Mapping[int, Any]) -> Any:
    """A value with the copies of layers in their places, also within lists, tuples and dicts; the same object if it has none."""
    if type(value) in (list, tuple):
        items = [_with_copies(each, copies) for each in value]
        return type(value)(items) if any(map(operator.is_not, items, value)) else value
    if type(value) is dict:
        items = [_with_copies(each, copies) for each in value.values()]
        return dict(zip(value, items, strict=True)) if any(map(operator.is_not, items, value.values())) else value
    return copies.get(id(value), value) if isinstance(value, nn.Module | torch.Tensor) else value


def frozen_parameters(module: Any) -> dict[str, nn.Parameter]:
    """Parameters of a built module that are neither trained nor shared nor private, by their names in the state dict; they belong
    to no client.
    """
    common = module.frozen_names - module._shared - module._private
    return {name: p for name, p in module.named_parameters(remove_duplicate=False) if name in common}


def take_frozen(module: Any, frozen: Mapping[str, nn.Parameter]) -> None:
    """Replace a module's :func:`frozen_parameters` by the given parameter objects, without copies.

    Raises:
        FederationError: if the module has other frozen parameters, or their shapes differ.
    """
    own = frozen_parameters(module)
    check_fits(dict(own), dict(frozen), f"What is frozen in {type(module).__name__}, which depends on the architecture alone,")
    taken = {id(p): frozen[name] for name, p in own.items()}
    for layer in module.modules():
        for name, parameter in list(layer._parameters.items()):
            if parameter is not None and id(parameter) in taken:
                setattr(layer, name, taken[id(parameter)])  # recurrent layers notice setattr
    for name, parameter in own.items():
        parameter.data = frozen[name].data  # for code that holds the parameter without having registered it


class UnsavedBuffers:
    """The buffers of a module's networks that are in no state dict (``persistent=False``), with their values of now.

    Args:
        module: its own buffers, and those of what methods add to networks (``lightning_fed.nn``), are left out: methods set them.
    """

    def __init__(self, module: nn.Module) -> None:
        layers = [layer for layer in module.modules() if layer is not module and not type(layer).__module__.startswith(ADDED)]
        unsaved = [(layer, name) for layer in layers for name in sorted(layer._non_persistent_buffers_set)]
        self._values = [(layer, name, copy.deepcopy(layer._buffers[name])) for layer, name in unsaved]

    def restore(self) -> None:
        """Give the buffers the values of then, in the precision that they have."""
        for layer, name, value in self._values:
            now = layer._buffers[name]
            layer._buffers[name] = value if value is None else value.to(value if now is None else now, copy=True)


def one_per_architecture(module: M, clients: Sequence[ClientInfo]) -> Iterator[tuple[ClientInfo, M]]:
    """The first client of each further architecture, with its module, so that networks can be compared before the first round."""
    return ((client, module.for_client(client)) for client in clients[1 : len(module.networks.factories)])
