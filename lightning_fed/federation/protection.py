"""Privacy of a run's clients: what is refused, what is put into the server, and where its noise comes from."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from secrets import token_hex
from typing import Any
from zlib import crc32

from lightning_fed.core.module import FederatedModule
from lightning_fed.core.server import Server
from lightning_fed.errors import require
from lightning_fed.federation.cohorts import says_itself_who
from lightning_fed.federation.settings import RunSettings
from lightning_fed.privacy import ClientDP, ExampleDP
from lightning_fed.privacy.noise import Noise, SecretNoise, SeededNoise, read_key


def protect(
    server: Server,
    model: FederatedModule,
    settings: RunSettings,
    clients: int,
    cohort_size: int,
    identity: dict[str, Any],
    made_with: Mapping[str, object],
    continued: Mapping[str, object] | None,
    reading: bool,
) -> Noise | None:
    """Have a server bound and hide what clients contribute, and note how in what a run that goes on must agree with.

    Args:
        server: of the run.
        model: the method.
        settings: of the federation; without ``privacy`` nothing happens.
        clients: how many may take part.
        cohort_size: of a round, about.
        identity: of the run; how it is protected is added.
        made_with: what else decides what clients send: a run with secret noise that goes on must agree in it, or the difference of
            two versions of a round would be without noise.
        continued: the identity of the run that is gone on from; None: this one is new.
        reading: whether it is only looked at, for which nobody needs the key.

    Returns:
        Where noise and cohorts come from; None without privacy.

    Raises:
        FederationError: where an ε would be wrong.
    """
    privacy = settings.privacy
    if privacy is None:
        return None
    assert isinstance(privacy, ClientDP)
    method = type(model).__name__
    require(
        not says_itself_who(model),
        f"privacy is of clients that are drawn, but {method} says itself who takes part in a round: leave it out.",
    )
    require(
        settings.sampling == "poisson" or cohort_size == clients,
        f"Got privacy with cohorts of {cohort_size} of {clients} clients, whose ε is not known: set sampling to poisson, or "
        "participation to 1.",
    )
    rate = settings.participation if settings.sampling == "poisson" else 1.0
    require(
        not settings.quorum,
        f"Got privacy with quorum={settings.quorum:g}, by which one client decides whether a round counts, and so moves the server "
        "by more than its clip norm: leave quorum out.",
    )
    require(
        privacy.noise == "seeded" or (settings.patience is None and not settings.stop_at_target and settings.budget is None),
        "Got privacy with secret noise and patience, stop_at_target or budget: when a run ends would tell of clients what no noise "
        "hides; give rounds alone.",
    )
    block = asdict(privacy) | {"key": None, "clients": clients, "rate": rate}
    noise: Noise = SeededNoise(settings.seed)
    if privacy.key is not None:
        block["made_with"] = f"{crc32(json.dumps(made_with, sort_keys=True).encode()):08x}"
        block["stream"] = token_hex(16) if continued is None else stream_of(continued)
    if privacy.key is not None and not reading:
        noise = SecretNoise(read_key(privacy.key, continued is not None), block["stream"])
    mechanism = privacy.mechanism(clients, rate, settings.rounds, noise)
    before = json.loads(str(continued.get("privacy", "{}"))) if continued else {}
    require(
        privacy.epsilon is None or before.get("epsilon") != privacy.epsilon or before["noise_multiplier"] == mechanism.multiplier,
        f"The run had z = {before.get('noise_multiplier')}, and {settings.rounds} rounds need {mechanism.multiplier} for ε = "
        f"{privacy.epsilon}: continue with as many rounds as it was begun with, or start a new run.",
    )
    server.protect_with(mechanism, mechanism.combine, [name for name, _ in model.named_buffers()], method)
    identity["privacy"] = json.dumps(block | {"noise_multiplier": mechanism.multiplier}, sort_keys=True)
    return noise


def refuse_at_sites(settings: RunSettings) -> None:
    """What is a simulation has no place where clients' data are at real sites.

    Raises:
        FederationError: if there is such a thing.
    """
    require(
        settings.attack is None,
        f"Got attack={settings.attack} with data at sites: attacks are simulated where all data are at hand, leave it out.",
    )
    require(
        not isinstance(settings.privacy, ExampleDP),
        "Got privacy of examples with data at sites: its noise is that of the run's seed, and sites send what they measure: leave "
        "it out.",
    )
    require(
        not isinstance(settings.privacy, ClientDP) or settings.privacy.noise == "secret",
        "Got privacy with seeded noise and data at sites: whoever knows the seed can subtract it; set noise to secret, with a key.",
    )


def stream_of(identity: Mapping[str, object]) -> str | None:
    """Which of its key's streams of secret noise a run has; None: it has none."""
    privacy = identity.get("privacy")
    found = json.loads(privacy).get("stream") if isinstance(privacy, str) else None
    return found if isinstance(found, str) else None
