"""Clients with several architectures, of each of which the server has a model, and distillation on public data."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor

from lightning_fed.core import (
    OUTPUTS,
    Broadcast,
    ClientInfo,
    ClientUpdate,
    PublicDistillation,
    RunOnServer,
    State,
    Vectors,
    check_payload,
    noted,
)
from lightning_fed.methods.families.classifiers import needs_classifier
from lightning_fed.methods.families.group_server import GroupServer
from lightning_fed.models import Backbones
from lightning_fed.options import NonNegativeInt, PositiveFloat, PositiveInt

TARGETS = "targets/"
"""What the names of the teachers' outputs begin with, on their way to a student."""


class EnsembleModule(PublicDistillation):
    """Base of FedDF and Fed-ET. The server averages the clients of one architecture; then all received models predict the public
    data, and students learn from these predictions. A method defines in :meth:`.PublicDistillation.server_phases` how they learn,
    and in :meth:`.FederatedModule.configure_server` which students there are.

    Args:
        backbone: the clients' networks: client ``k`` has entry ``k mod len(list)``, and the server a model of each.
        num_classes: number of classes; None: as many as the data have.
        distill_steps: steps of a student in each round.
        distill_batch_size: number of public examples in a step.
        distill_optimizer: optimizer of a student, fresh in each round.
        table_limit_mb: size in MiB up to which a teacher's outputs for all public data, and tables computed from them, are in
            float32; larger ones are in bfloat16.
        **kwargs: see :class:`.FederatedModule`. ``weighting`` is that of updates of one architecture: ``uniform``, as in FedDF's
            code, or by ``examples``.

    Raises:
        FederationError: for a task without classes, or without public data.
    """

    heterogeneous = True
    weighting = "uniform"
    dynamic_payload = True  # only a student gets a payload
    needs_classes = "it distils probabilities of classes: use FedAvg."

    def __init__(
        self,
        backbone: Backbones,
        num_classes: PositiveInt | None,
        distill_steps: NonNegativeInt,
        distill_batch_size: PositiveInt,
        distill_optimizer: OptimizerCallable,
        table_limit_mb: PositiveFloat = 1024.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, num_classes, **kwargs)
        self.distill_steps = distill_steps
        self.public_batch_size = distill_batch_size
        self.distill_optimizer = distill_optimizer
        self.public_table_limit = table_limit_mb * 2**20

    def build(self) -> None:
        super().build()
        needs_classifier(self.backbone, f"{type(self).__name__} combines what models say of each example")

    def architecture(self, client: ClientInfo | None) -> int:
        """Index of the network: the client's, or the one that the server states for its model."""
        if client is None:
            return 0
        return client.id % len(self.networks.factories) if client.model_size is None else int(client.model_size)

    @property
    def place(self) -> int:
        """Index of the client's :meth:`architecture`."""
        return self.architecture(self.client)

    def groups(self, clients: Sequence[ClientInfo]) -> dict[int, int]:
        """Index of each client's architecture, by id."""
        return {client.id: self.architecture(client) for client in clients}

    def drawn(self, place: int, clients: Sequence[ClientInfo]) -> Self:
        """A module of an architecture, with weights drawn from the running random stream; for the first it is this module."""
        return self if place == 0 else self.for_client(replace(clients[0], model_size=place), torch.initial_seed())


def names_of(factories: Sequence[Any], places: Iterable[int]) -> dict[int, str]:
    """Names of the architectures' models in metrics: ``global_<class>``, or ``global_<number>`` if that is ambiguous."""
    names = {place: getattr(factories[place], "__name__", str(factories[place]).rpartition(".")[2]) for place in places}
    clear = len(set(names.values())) == len(names) and all(name.isidentifier() for name in names.values())
    return {place: f"global_{name if clear else place}" for place, name in names.items()}


class EnsembleServer(GroupServer):
    """Averages within each architecture, and stores the received models as teachers.

    Args:
        method: defines how updates are weighted and how students learn.
        states: the initial models, by the index of their architecture.
        groups: each client's architecture, by id.
        names: of the models in metrics.
        exported: the architecture whose model is exported if no client is named.
    """

    def __init__(
        self, method: Any, states: Mapping[int, State], groups: Mapping[int, int], names: Mapping[int, str], exported: int
    ) -> None:
        super().__init__(states, groups, method.weighting, names, exported)
        self.method = method
        self.shape, self.dtype = torch.Size(), torch.float32  # of a teacher's outputs

    def on_round_start(self, round: int, cohort: Sequence[ClientInfo]) -> None:
        super().on_round_start(round, cohort)
        self.round_state.clear()

    def aggregate(self, updates: Iterable[ClientUpdate]) -> dict[str, float]:
        """Merge a round's updates, each with those of its architecture, and store them as teachers."""
        return super().aggregate(noted(updates, lambda update: self.round_state.put(update.client, update.state, self.round)))

    def teacher(self, client: int) -> Broadcast:
        """The model that a client sent in this round."""
        return Broadcast(self.round_state.get(client), self.groups[client])

    def collect_predictions(
        self, clients: Sequence[int], run_on_server: RunOnServer, outputs_of: Callable[[Tensor], Tensor] = lambda logits: logits
    ) -> float:
        """Let the received models predict the public data, one model at a time, and store each one's predictions.

        Args:
            clients: the teachers.
            run_on_server: see :meth:`.Server.train_on_public`.
            outputs_of: maps a teacher's logits ``(M, C)`` to the stored outputs. Default: the logits.

        Returns:
            FLOPs.
        """
        flops = 0.0
        predicted = run_on_server("predict_public", (self.teacher(client) for client in clients))
        for client, update in zip(clients, predicted, strict=True):
            outputs = outputs_of(update.state[OUTPUTS])
            self.shape, self.dtype = outputs.shape, outputs.dtype
            self.round_state.put(client, {OUTPUTS: outputs.flatten()}, self.round)
            flops += update.metrics["flops"]
        return flops

    def predictions(self, clients: Sequence[int]) -> Vectors:
        """The stored outputs of each teacher, a vector of all rows."""
        return Vectors(self.round_state, OUTPUTS, clients, self.shape.numel())

    def distill(self, students: Sequence[int], targets: State, run_on_server: RunOnServer) -> dict[str, float]:
        """Train the models of some architectures.

        Args:
            students: indices of the architectures.
            targets: tensors that they learn from; their names start with :data:`TARGETS`.
            run_on_server: see :meth:`.Server.train_on_public`.

        Returns:
            ``server/steps`` and ``server/flops``, sums; and ``server/distill_loss``, a mean.
        """
        learned, rows = {}, []
        broadcasts = (Broadcast(self.states[place] | targets, place) for place in students)
        for place, update in zip(students, run_on_server("train_on_public", broadcasts), strict=True):
            check_payload(update, self.states[place])
            learned[place] = update.state
            rows.append(update.metrics)
        self._hold(self.states | learned)
        sums = {f"server/{cost}": sum(row[cost] for row in rows) for cost in ("steps", "flops")}
        return sums | {"server/distill_loss": sum(row["train/distill_loss"] for row in rows) / len(rows)}
