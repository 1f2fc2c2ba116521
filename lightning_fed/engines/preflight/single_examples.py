"""A check for training batches of one example, which batch norm cannot train on."""

from collections.abc import Hashable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_fed.core.module import FederatedModule
from lightning_fed.data import FederatedDataModule
from lightning_fed.data.batches import num_batches
from lightning_fed.data.client_info import SERVER, ClientInfo
from lightning_fed.errors import FederationError
from lightning_fed.seeding import INITIAL, seeded


class OneValueError(Exception):
    """A batch norm layer got one value per channel."""


def refuse_single_examples(template: FederatedModule, data: FederatedDataModule, clients: Iterable[ClientInfo], seed: int) -> None:
    """Refuse clients with a training batch of one example if a batch norm layer would get one value per channel, which has no
    variance. Behind a convolution one image has enough values, so the check runs such a batch through one network per architecture.

    Raises:
        FederationError: names the first such client and the layer.
    """
    known: dict[Hashable, str | None] = {}
    for client in clients:
        before = num_batches(client.num_train, data.batch_size, data.single_example) - 1
        if client.num_train - before * data.batch_size > 1:  # size of the last batch
            continue
        architecture = template.architecture(client)
        if architecture not in known:
            known[architecture] = starved_layer(template, data, client, seed)
        if layer := known[architecture]:
            raise FederationError(f"{_told(client, data)}, which is too few for the network's {layer}: {_remedy(client, data)}.")


def starved_layer(template: FederatedModule, data: FederatedDataModule, client: ClientInfo, seed: int) -> str | None:
    """Name of the batch norm layer that gets one value per channel when a client trains on one of its examples."""
    if len(template.networks.factories) == 1 and not _norms(template):
        return None
    own = data.pooled() if client.id == SERVER else data.client(client.id)
    batch = own.transform(own.data[own.splits[0][:1]], None)
    module = template.for_client(client, seed)  # a separate module, because statistics change
    norms = _norms(module)
    for name, layer in norms.items():
        layer.register_forward_pre_hook(partial(_refuse_one_value, name))
    for phase in module.phases() if norms else ():
        module.train()
        for frozen in (*phase.eval_modules, *module.frozen_layers()):
            frozen.eval()
        try:
            with torch.no_grad(), seeded(seed, INITIAL):
                phase.loss(batch)
        except OneValueError as found:
            return str(found)
    return None


def _norms(module: nn.Module) -> dict[str, nn.Module]:
    """Batch norm layers, by name."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)}


def _refuse_one_value(name: str, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    """A pre-forward hook of the batch norm layer with this name."""
    values = inputs[0]
    if layer.training and isinstance(values, Tensor) and values.numel() == values.shape[1]:
        raise OneValueError(f"{type(layer).__name__} {name!r}")


def _told(client: ClientInfo, data: FederatedDataModule) -> str:
    if client.num_train == 1:
        return f"Client {client.id} has one training example"
    which = "of which each has" if data.batch_size == 1 else "the last of which has"
    return f"Client {client.id} trains in batches, {which} one example"


def _remedy(client: ClientInfo, data: FederatedDataModule) -> str:
    if client.num_train > 1:
        return "set batch_size to at least 2" if data.batch_size == 1 else "set the data's single_example to join or drop"
    if data.partition.is_natural:
        fewer = client.num_train + client.num_val + client.num_test + 1
        return f"{data.partition.leave_out(fewer)}, to leave it out, or use a network without batch norm"
    return "lower num_clients, choose a milder partition or a smaller val_share, or use a network without batch norm"
