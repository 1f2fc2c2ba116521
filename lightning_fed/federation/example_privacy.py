"""Example-level privacy in a run: what is refused, and how many steps a client takes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_fed.core.module import FederatedModule
from lightning_fed.core.shared_state import SharedStateMixin
from lightning_fed.data import FederatedDataModule
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.data.tabular.scaled import ScaledColumns
from lightning_fed.errors import require
from lightning_fed.federation.settings import RunSettings
from lightning_fed.privacy import ExampleDP
from lightning_fed.privacy.example_dp import ExampleMechanism
from lightning_fed.seeding import isolated

CHOOSE = "choose a method such as FedAvg, FedPer or Ditto."

EXAMPLES = "examples"
"""What is private, in the identity of a run; that of client-level privacy does not say."""


def protect_examples(
    model: FederatedModule,
    data: FederatedDataModule,
    clients: Sequence[ClientInfo],
    settings: RunSettings,
    identity: dict[str, Any],
    continued: Mapping[str, object] | None,
) -> ExampleMechanism:
    """The mechanism of a run with example-level privacy.

    Args:
        model: the method, built.
        data: the clients' data.
        clients: clients that train.
        settings: settings of the federation.
        identity: the run's identity, to which the mechanism's settings are added.
        continued: identity of the run that is resumed. None: a new run.

    Raises:
        FederationError: for a δ that guarantees nothing, and if a resumed run would need other noise.
    """
    privacy = settings.privacy
    assert isinstance(privacy, ExampleDP)
    require(
        not settings.quorum,
        f"Got privacy with quorum={settings.quorum:g}: what clients have sent in a round that is given up would not be counted: "
        "leave quorum out.",
    )
    steps = planned_steps(model, {client.id: client.num_train for client in clients}, data.batch_size, settings.rounds)
    mechanism = privacy.mechanism(clients, data.batch_size, steps, settings.seed)
    before = json.loads(str(continued.get("privacy", "{}"))) if continued else {}
    require(
        privacy.epsilon is None
        or (before.get("kind"), before.get("epsilon")) != (EXAMPLES, privacy.epsilon)
        or before["multipliers"] == mechanism.multipliers,
        f"The run's noise was chosen for other steps than those of {settings.rounds} rounds, whose number depends on rounds, "
        "epochs, steps and batch_size: continue with those that it was begun with, or start a new run.",
    )
    block = asdict(privacy) | {"multipliers": mechanism.multipliers, "kind": EXAMPLES}
    identity["privacy"] = json.dumps(block, sort_keys=True)
    return mechanism


def planned_steps(model: FederatedModule, examples: Mapping[int, int], batch_size: int, rounds: int) -> dict[int, list[int]]:
    """By client id, the number of steps after 1, 2, … rounds if the client takes part in all of them.

    Args:
        model: the method, built.
        examples: number of training examples by client id.
        batch_size: training batch size.
        rounds: number of rounds.
    """
    by_round, before = [], model.rounds_before
    for model.rounds_before in range(rounds):
        by_round.append(model.phases())
    model.rounds_before = before
    return {
        client: list(accumulate(sum(phase.num_batches(-(-count // batch_size)) for phase in phases) for phases in by_round))
        for client, count in examples.items()
    }


def refuse_what_tells_of_examples(model: FederatedModule, data: FederatedDataModule) -> None:
    """Refuse methods and data where an example would reach the server, or other examples' gradients, without noise.

    Raises:
        FederationError: saying what to change.
    """
    kind, given = type(model), f"{type(model).__name__} got privacy of examples, but"
    require(
        not model.has_own_gradients and kind.client_step is FederatedModule.client_step,
        f"{given} its training step is not a plain gradient step: {CHOOSE}",
    )
    require(
        model.accumulate == 1,
        f"{given} accumulate is {model.accumulate}, and a step's noise is that of one batch: leave accumulate out.",
    )
    require(
        kind.payload is SharedStateMixin.payload and kind.update_state is SharedStateMixin.update_state,
        f"{given} clients do not only send parameters that they train: {CHOOSE}",
    )
    require(
        kind.training_step is FederatedModule.training_step and not model.has_statistics,
        f"{given} it sees batches outside its loss: {CHOOSE}",
    )
    require(
        not model.has_post_training_step,
        f"{given} it passes over the data once more after training: {CHOOSE}",
    )
    require(
        not any(isinstance(layer, _BatchNorm) for layer in model.modules()),
        f"{given} its network has batch norm, which mixes examples: give one without (norm: group of ResNets).",
    )
    plain = model.task.loss is None or _is_plain_mean(model, data)
    require(
        model.task.adds_up and getattr(model.task.loss, "weight", None) is None and plain,
        f"{given} its loss is not a plain mean over examples: leave class weights out; partial likelihoods cannot be private.",
    )
    clips = model.gradient_clip is not None or any(phase.gradient_clip is not None for phase in model.phases())
    require(not clips, f"{given} gradient_clip is set, too: privacy.clip bounds each example's gradient, leave gradient_clip out.")
    require(
        not data.continue_epochs, f"{given} continue_epochs is set: its batches are Poisson samples, leave continue_epochs out."
    )
    require(
        not getattr(data, "packing", False),
        f"{given} packing makes one row of a batch's examples: leave packing out.",
    )
    require(
        not _has_several_rows(data),
        f"{given} the data have several rows of one example (windows of a text, several answers) or group, and one row alone "
        "would be private: give longer windows, or one answer per example; leave group out only if one row is to be private.",
    )
    require(
        not isinstance(data, ScaledColumns) or (data.standardize == data.impute == "none"),
        f"{given} the data are standardized or imputed by statistics of the examples: scale them by known ranges, and set "
        "standardize and impute to none.",
    )


def _is_plain_mean(model: FederatedModule, data: FederatedDataModule) -> bool:
    """Whether the given loss of a batch is the mean of those of its examples, tried on random outputs: weights may be anywhere in
    it, and cancel in a mean over one example.
    """
    most = max(data.clients, key=lambda client: client.num_train).id
    with torch.no_grad(), isolated():
        x, y = model.unpack(next(iter(data.client(most).predict_dataloader())))
        outputs = torch.randn_like(model(x), dtype=torch.float32)
        singles = [model.criterion(outputs[k : k + 1], y[k : k + 1]) for k in range(len(y))]
        return torch.allclose(model.criterion(outputs, y), torch.stack(singles).mean(), rtol=1e-3)


def _has_several_rows(data: FederatedDataModule) -> bool:
    """Whether a client trains on several rows of one example."""
    trained = [data.client(client.id).splits[0] for client in data.clients]  # also reads the data
    return data.row_groups is not None and any(len(np.unique(data.row_groups[rows])) < len(rows) for rows in trained)
