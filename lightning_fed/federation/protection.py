"""Privacy of a run's clients: what is refused, what is put into the server, and where its noise comes from."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any
from zlib import crc32

from lightning_fed.core.module import FederatedModule
from lightning_fed.core.server import Server
from lightning_fed.errors import require
from lightning_fed.federation.settings import RunSettings
from lightning_fed.privacy.noise import Noise, SecretNoise, SeededNoise, read_key


def protect(
    server: Server,
    model: FederatedModule,
    settings: RunSettings,
    clients: int,
    cohort_size: int | None,
    identity: dict[str, Any],
    made_with: Mapping[str, object],
    continues: bool,
    reading: bool,
) -> Noise | None:
    """Have a server bound and hide what clients contribute, and note how in what a run that goes on must agree with.

    Args:
        server: of the run.
        model: the method.
        settings: of the federation; without ``privacy`` nothing happens.
        clients: how many may take part.
        cohort_size: of a round, about; None: the method says itself who takes part.
        identity: of the run; how it is protected is added.
        made_with: what else decides what clients send: two runs that differ in it must not have the same secret noise, which their
            difference would be without.
        continues: whether the run goes on from a checkpoint.
        reading: whether it is only looked at, for which nobody needs the key.

    Returns:
        Where noise and cohorts come from; None without privacy.

    Raises:
        FederationError: where an ε would be wrong.
    """
    privacy = settings.privacy
    if privacy is None:
        return None
    method = type(model).__name__
    require(
        cohort_size is not None,
        f"privacy is of clients that are drawn, but {method} says itself who takes part in a round: leave it out.",
    )
    require(
        settings.sampling == "poisson" or cohort_size == clients,
        f"Got privacy with cohorts of {cohort_size} of {clients} clients, whose ε is not known: set sampling to poisson, or "
        "participation to 1.",
    )
    rate = settings.participation if settings.sampling == "poisson" else 1.0
    block = asdict(privacy) | {"key": None, "clients": clients, "rate": rate}
    noise: Noise = SeededNoise(settings.seed)
    if privacy.key is not None:
        block["made_with"] = f"{crc32(json.dumps(made_with, sort_keys=True).encode()):08x}"
    if privacy.key is not None and not reading:
        noise = SecretNoise(read_key(privacy.key, continues), json.dumps([identity, block], sort_keys=True))
    mechanism = privacy.mechanism(clients, rate, settings.rounds, noise)
    server.protect_with(mechanism, mechanism.combine, [name for name, _ in model.named_buffers()], method)
    identity["privacy"] = json.dumps(block | {"noise_multiplier": mechanism.multiplier}, sort_keys=True)
    return noise
