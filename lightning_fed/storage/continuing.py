"""Checks whether a run can continue from a checkpoint, and the settings that checkpoints record."""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import zip_longest
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from lightning_fed.core.client_modules import frozen_parameters
from lightning_fed.core.module import FederatedModule
from lightning_fed.data import ClientDataModule, FederatedDataModule
from lightning_fed.errors import FederationError
from lightning_fed.formatting import shown
from lightning_fed.options import parameters_of
from lightning_fed.storage.checkpoint import Checkpoint
from lightning_fed.storage.manifest import Setting
from lightning_fed.tensors import State, check_dtypes, check_finite, check_fits

log = logging.getLogger(__name__)

OF_BATCHES = ("batch_size", "continue_epochs", "single_example", "augment")
"""Options of the data that do not change the data's checksum."""

SAMPLED = 1024
"""Number of values of each frozen tensor in a checksum: all values would take seconds at each start."""

NAMED = 5
"""Number of entries of a nested setting whose differences are named."""

ABSENT = "absent"
"""What stands for an entry that only the other run has."""


def check_goes_on(
    checkpoint: Checkpoint,
    identity: Mapping[str, object],
    threads: int,
    settings: Mapping[str, Setting],
    server: State,
    persistent: list[str],
) -> None:
    """Refuse a checkpoint that this run cannot continue from; print other differences.

    Args:
        checkpoint: the checkpoint.
        identity: what must agree: method, seed, number of clients, and the fingerprint of their data.
        threads: number of torch threads of this run.
        settings: settings of this run.
        server: expected form of the server's state; see :meth:`.Server.expected_state`.
        persistent: names of the phases whose optimizer state clients keep between rounds.

    Raises:
        FederationError: if something differs; names both values.
    """
    manifest = checkpoint.manifest
    for key, mine in identity.items():
        if manifest.identity.get(key) != mine:
            raise FederationError(
                f"Checkpoint {checkpoint.path} was made with {key} = {manifest.identity.get(key)!r}, this run has {mine!r}: "
                "use the configuration and the data of that run, or fit a new run, without --ckpt_path."
            )
    if manifest.threads != threads:
        log.warning(
            f"Checkpoint {checkpoint.path} was made with {manifest.threads} torch threads, this run has {threads}: "
            "sums may differ in their last bits. Set OMP_NUM_THREADS, or the engine's threads."
        )
    if different := differences(manifest.settings, settings):
        log.warning(f"Checkpoint {checkpoint.path} was made with {'; '.join(different)}: what is given now applies.")
    what = f"The server state of checkpoint {checkpoint.path}"
    check_fits(checkpoint.server, server, what)
    check_dtypes(checkpoint.server, server, what, ": continue with the precision of that run.")
    check_finite(checkpoint.server, what)
    for name in map(optimizer_of, persistent):
        theirs, ours = manifest.settings.get(name), settings.get(name)
        if theirs not in (None, ours) and checkpoint.clients:
            raise FederationError(
                f"Checkpoint {checkpoint.path} was made with the {name} {theirs}, whose state clients keep; this run has "
                f"{ours}: continue with {theirs}, or fit a new run, without --ckpt_path."
            )


def settings_of(model: FederatedModule, data: FederatedDataModule, **of_federation: Any) -> dict[str, Setting]:
    """The settings that a run's results depend on, by name: those of the method and of each phase's optimizer, the batch and input
    sizes, what is frozen, what new clients start from, and who takes part. Values without a plain form (a network object, for
    example) are left out.
    """
    inherited = {name: parameter.default for name, (parameter, _) in parameters_of(type(model)).items()}
    found: dict[str, Any] = inherited | {name: value for name, value in model.hparams.items() if not name.startswith("_")}
    for phase in model.phases():
        optimizer = phase.new_optimizer()
        found[optimizer_of(phase.name)] = type(optimizer).__name__
        found |= {f"{name} of {phase.name}": value for name, value in optimizer.defaults.items()}
    found |= of_federation | {name: getattr(data, name) for name in OF_BATCHES} | {"size of an input": _input_size(data)}
    found["weights of the frozen network"] = _checksum((frozen := frozen_parameters(model)).values())
    if model.has_private_state:  # clients that have not taken part yet draw or copy it
        found["initial weights"] = _checksum(p for name, p in model.named_parameters() if name not in frozen)
    plain = {name: _plain(value) for name, value in found.items()}
    return {name: value for name, value in plain.items() if value is not None or found[name] is None}


def optimizer_of(phase: str) -> str:
    """Name of the setting for a phase's optimizer."""
    return f"optimizer of {phase}"


def differences(theirs: Mapping[str, Setting], ours: Mapping[str, Setting]) -> list[str]:
    """Differences between two runs in the settings that both have, in words. Of a nested setting, only the entries that differ are
    named, at most :data:`NAMED`.
    """
    found: list[str] = []
    for name in ours:
        if name in theirs and theirs[name] != ours[name]:
            apart = list(_apart(name, theirs[name], ours[name]))
            found += apart[:NAMED] + ([f"{len(apart) - NAMED} more of {name}"] if len(apart) > NAMED else [])
    return found


def _apart(name: str, before: Any, after: Any) -> Iterator[str]:
    """What differs between two values of a setting, or in an entry of it."""
    before, after = _nested(before), _nested(after)
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before | after:
            yield from _apart(f"{name}.{key}", before.get(key, ABSENT), after.get(key, ABSENT))
    elif isinstance(before, list) and isinstance(after, list) and max(len(str(before)), len(str(after))) > 60:
        for place, pair in enumerate(zip_longest(before, after, fillvalue=ABSENT)):
            yield from _apart(f"{name}.{place}", *pair)
    elif before != after and str(before) == str(after):  # a text and a number
        yield f"{name} {before!r}, now {after!r}"
    elif before != after:
        was, now = (shown(value) if len(str(value)) > 60 else str(value) for value in (before, after))
        yield f"{name} {before}, now {after}" if was == now else f"{name} {was}, now {now}"


def _nested(setting: Any) -> Any:
    """A setting; one that :func:`_plain` has written as JSON is read."""
    if isinstance(setting, str) and setting.startswith(("{", "[")):
        with suppress(ValueError):
            return json.loads(setting)
    return setting


def _checksum(parameters: Iterable[Tensor]) -> str | None:
    """Checksum of dtypes, shapes and about :data:`SAMPLED` values of each parameter; None if none or some have no values."""
    checksum = None
    for parameter in parameters:
        if parameter.is_meta or parameter.layout is not torch.strided:
            return None
        flat = parameter.detach().flatten()
        values = flat[:: max(1, len(flat) // SAMPLED)].cpu().resolve_conj().resolve_neg().contiguous().view(torch.uint8)
        kind = f"{parameter.dtype} {tuple(parameter.shape)}"
        checksum = crc32(values.numpy().data, crc32(kind.encode(), checksum or 0))
    return None if checksum is None else f"{checksum:08x}"


def _plain(value: Any) -> Setting:
    if isinstance(value, Setting):
        return value
    try:
        return json.dumps(value, sort_keys=True)
    except (TypeError, ValueError):
        return None


def _input_size(data: FederatedDataModule) -> str | None:
    if not data.at_hand:
        return None
    client = data.client(0)
    if not isinstance(client, ClientDataModule) or not len(client.splits[0]):
        return None
    inputs, _ = client.data[client.splits[0][:1]]
    return "x".join(map(str, inputs.shape[1:])) if isinstance(inputs, Tensor) else None
