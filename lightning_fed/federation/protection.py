"""How a run is attacked and protected: robust aggregation, client-level privacy with what it refuses, the source of its noise."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from secrets import token_hex
from typing import Any
from zlib import crc32

from lightning_fed.core.module import FederatedModule
from lightning_fed.core.robust import Aggregation
from lightning_fed.core.server import OptimizerUpdate, Server, ServerUpdate, mean_of_updates
from lightning_fed.errors import require
from lightning_fed.federation.attacks import Attack, UpdateAttack
from lightning_fed.federation.cohorts import Participants, says_itself_who
from lightning_fed.federation.settings import RunSettings
from lightning_fed.privacy import ClientDP, ExampleDP
from lightning_fed.privacy.client_dp import AdaptiveClip, GaussianMechanism
from lightning_fed.privacy.noise import Noise, SecretNoise, SeededNoise, read_key
from lightning_fed.tensors import State


def aggregate_robustly(server: Server, model: FederatedModule, rule: Aggregation, cohort_size: int) -> None:
    """Have a server combine updates by a robust rule instead of the mean.

    Raises:
        FederationError: if it does not average updates with the same tensors, or cohorts are too small for the rule.
    """
    require(
        type(server).aggregate is Server.aggregate
        and server.combine is mean_of_updates
        and not model.payload()  # of other units than a model
        and len(server.state) > 0,
        f"{type(model).__name__} got aggregation={type(rule).__name__}, but its server does not take a mean of models that are all "
        "alike: leave aggregation out, or choose another method, such as FedAvg.",
    )
    require(
        cohort_size >= rule.least,
        f"{type(rule).__name__} needs {rule.least} updates, and a round has {cohort_size} clients: draw larger cohorts, or give a "
        "rule that needs fewer.",
    )
    buffers = model.buffer_names()

    def combine(updates: Iterable[tuple[State, float]], state: State) -> State:
        return rule.combine(updates, state, server.round_state, buffers)

    server.combine = combine


def check_attack(server: Server, model: FederatedModule, attack: Attack) -> None:
    """Refuse attacks where no client trains, and attacks on changes of a model if clients do not all start from the same one.

    Raises:
        FederationError: if the method trains on pooled data, or the server sends other tensors than its state.
    """
    require(
        not model.centralized,
        f"{type(attack).__name__} makes clients hostile, but {type(model).__name__} trains on the pooled data of all clients, "
        "which send nothing: leave attack out.",
    )
    require(
        not isinstance(attack, UpdateAttack) or type(server).broadcast is Server.broadcast,
        f"{type(attack).__name__} attacks changes of the server's model, but {type(model).__name__} does not send all clients the "
        "same one: choose a method whose server averages models, or LabelFlip.",
    )


def hide_clients(server: Server, model: FederatedModule, mechanism: GaussianMechanism) -> None:
    """Have a server clip and hide each client's contribution.

    Raises:
        FederationError: if it would reveal something about a client that is not protected.
    """
    given, kind = f"{type(model).__name__} got privacy, but", type(server)
    learns = ("train_on_public", "public_training", "refresh_statistics")
    plain = ("aggregate", "broadcast", "on_round_start", "expected_payload", "weight", *learns)
    require(
        all(getattr(kind, hook) is getattr(Server, hook) for hook in plain)
        and server.combine is mean_of_updates
        and type(server.update) in (ServerUpdate, OptimizerUpdate),
        f"{given} its server is more than a mean of what clients send, and it is not known how much one of them changes it: "
        "choose a method such as FedAvg, FedPer or PFedLoRA, and no aggregation.",
    )
    require(len(server.state) > 0, f"{given} its clients send nothing: there is nothing to protect.")
    buffers = model.buffer_names()
    exposed = [name for name, tensor in server.state.items() if name in buffers or not tensor.is_floating_point()]
    require(
        not exposed,
        f"{given} clients send {next(iter(exposed), '')!r}, a statistic with units of its own: privacy needs a network without "
        "batch norm in what travels (norm: group of ResNets), or FedBN.",
    )
    server.privacy, server.combine, server.weighting = mechanism, mechanism.combine, "uniform"


def protect(
    server: Server,
    model: FederatedModule,
    settings: RunSettings,
    participants: Participants,
    identity: dict[str, Any],
    made_with: Mapping[str, object],
    continued: Mapping[str, object] | None,
    reading: bool,
) -> Noise | None:
    """Have a server clip and hide clients' contributions, and record in ``identity`` what a continued run must agree with.

    Args:
        server: the run's server.
        model: the method.
        settings: the federation's settings; without ``privacy`` nothing happens.
        participants: who trains.
        identity: identity of the run; the privacy settings are added.
        made_with: other settings that determine what clients send. A continued run with secret noise must have the same, because
            the difference of two versions of a round would contain no noise.
        continued: identity of the run that is continued. None: a new run.
        reading: whether the run is opened for reading, which needs no key.

    Returns:
        The source of noise and cohorts. None without privacy.

    Raises:
        FederationError: if the reported ε would be wrong.
    """
    privacy = settings.privacy
    if privacy is None:
        return None
    assert isinstance(privacy, ClientDP)
    clients, cohort_size = len(participants.eligible), participants.cohort_size
    require(
        not says_itself_who(model),
        f"privacy needs clients that are sampled by the federation, but {type(model).__name__} chooses the participants itself: "
        "leave privacy out.",
    )
    require(
        settings.sampling == "poisson" or cohort_size == clients,
        f"Got privacy with cohorts of {cohort_size} of {clients} clients, for which ε is not known: set sampling to poisson, or "
        "participation to 1.",
    )
    rate = settings.participation if settings.sampling == "poisson" else 1.0
    require(
        not settings.quorum,
        f"Got privacy with quorum={settings.quorum:g}: one client could decide whether a round counts, and so change the server "
        "by more than the clip norm: leave quorum out.",
    )
    require(
        not settings.dropout or not isinstance(privacy.clip, AdaptiveClip),
        f"Got an adaptive clip norm with dropout={settings.dropout:g}: the share of clipped changes is of all who are drawn, so "
        "that the norm would miss its quantile: leave dropout out, or give a norm.",
    )
    require(
        privacy.noise == "seeded" or (settings.patience is None and not settings.stop_at_target and settings.budget is None),
        "Got privacy with secret noise and patience, stop_at_target or budget: the end of the run would reveal something about "
        "clients that no noise hides; set only rounds.",
    )
    block = asdict(privacy) | {"key": None, "clients": clients, "rate": rate}
    noise: Noise = SeededNoise(settings.seed)
    if privacy.key is not None:
        given = {name: value for name, value in made_with.items() if value is not None}
        block["made_with"] = f"{crc32(json.dumps(given, sort_keys=True).encode()):08x}"
        block["stream"] = token_hex(16) if continued is None else stream_of(continued)
    if privacy.key is not None and not reading:
        noise = SecretNoise(read_key(privacy.key, continued is not None), block["stream"])
    mechanism = privacy.mechanism(clients, rate, settings.rounds, noise)
    before = json.loads(str(continued.get("privacy", "{}"))) if continued else {}
    require(
        privacy.epsilon is None
        or "kind" in before  # of examples
        or before.get("epsilon") != privacy.epsilon
        or before["noise_multiplier"] == mechanism.multiplier,
        f"The run had z = {before.get('noise_multiplier')}, and {settings.rounds} rounds need {mechanism.multiplier} for ε = "
        f"{privacy.epsilon}: continue with as many rounds as it was begun with, or start a new run.",
    )
    hide_clients(server, model, mechanism)
    identity["privacy"] = json.dumps(block | {"noise_multiplier": mechanism.multiplier}, sort_keys=True)
    return noise


def refuse_at_sites(settings: RunSettings) -> None:
    """Refuse settings that only a simulation can have, for data that are at real sites.

    Raises:
        FederationError: if there is such a setting.
    """
    require(
        settings.attack is None,
        f"Got attack={settings.attack} with data at sites: attacks are simulated where all data are local, leave it out.",
    )
    require(
        not isinstance(settings.privacy, ExampleDP),
        "Got example-level privacy with data at sites: its noise comes from the seed, and sites also send metrics: leave it out.",
    )
    require(
        not isinstance(settings.privacy, ClientDP) or settings.privacy.noise == "secret",
        "Got privacy with seeded noise and data at sites: who knows the seed can subtract it; set noise to secret, with a key.",
    )


def stream_of(identity: Mapping[str, object]) -> str | None:
    """Identifier of the stream of secret noise that a run uses of its key; None without one."""
    privacy = identity.get("privacy")
    found = json.loads(privacy).get("stream") if isinstance(privacy, str) else None
    return found if isinstance(found, str) else None
