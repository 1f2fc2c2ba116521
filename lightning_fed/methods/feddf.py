"""FedDF (Lin et al., NeurIPS 2020, https://arxiv.org/abs/2006.07242), Algorithms 1 and 3."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torch.nn.functional import kl_div

from lightning_fed.aggregation import WeightedMean, check_update
from lightning_fed.errors import FederationError
from lightning_fed.exchange import Broadcast, ClientInfo, ClientUpdate, State
from lightning_fed.families.groups import GroupServer
from lightning_fed.models import Backbones
from lightning_fed.module import FederatedModule
from lightning_fed.nn.divergence import divergence
from lightning_fed.phases import Phase, default_optimizer
from lightning_fed.server import OfModels, Server

TARGETS = "targets/"
"""What the names of the teachers' words begin with, on their way to a student."""

DistillLoss = Literal["avg_logits", "avg_losses"]


def default_student_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Adam with learning rate 1e-3, as in the authors' code."""
    return torch.optim.Adam(parameters, lr=1e-3)


class FedDF(FederatedModule):
    r"""FedAvg among clients of one architecture, after which each architecture's model learns on public data what all clients'
    models say of them.

    A client trains its architecture's model as in FedAvg. The server averages the updates of each architecture, and then, for each,
    takes the average as the student and minimises

    .. math:: \mathrm{KL}\bigl(\mathrm{softmax}(\tfrac{1}{K} \textstyle\sum_k z_k(d)) \,\Vert\, \mathrm{softmax}(z_s(d))\bigr)

    over batches d of the public data, :math:`z_k` being the logits of the K models that clients sent, of whatever architecture, in
    eval mode. The labels of the public data are nobody's. Where clients hold out validation data, the student that is best on all
    of them is kept, and training stops where it gets no better.

    Each architecture's model is measured on everybody's test data, as ``global_<architecture>/…``, and each client's on its own, as
    ``after/…``. Headline: accuracy of the latter; with one architecture that of the one model, ``global``. What the server does is
    measured apart, as ``server/…``.

    Args:
        backbone: the clients' networks: client ``k`` has entry ``k mod len(list)``, and the server a model of each.
        num_classes: number of classes; the command line takes it from the data.
        distill_steps: steps of each student in each round; 0 is FedAvg for each architecture. The authors: 10,000.
        distill_batch_size: public examples in a step. The authors: 128.
        distill_optimizer: of a student, fresh in each round; its rate falls to 0 along a cosine. Default: Adam, lr 1e-3.
        distill_clip: largest gradient norm of a student's step; the authors: 5. None does not clip.
        temperature: what all logits are divided by; there is no factor that makes up for it. The authors: 1.
        distill_loss: ``avg_logits``: as above. ``avg_losses``: the mean over the teachers of each one's divergence.
        validate_every: after how many steps a student is validated. The authors: 100.
        patience: after how many steps that made it no better a student is done. The authors: 1,000. None: after all of them.
        drop_worst: whether teachers that know little are left out: those whose accuracy on all validation data is below 1.2 times
            that of chance. If nobody is left, the averages stay as they are.
        weighting: how updates of one architecture are weighted: ``uniform``, as in the authors' code, or by ``examples``.
        optimizer: how a client steps. Default: SGD, lr 0.01; the authors: lr 0.1.
        epochs: local epochs per round; the authors: 40.
        **kwargs: see :class:`.FederatedModule`.

    Raises:
        FederationError: for a task that is not about classes, and where there are no public data.
    """

    heterogeneous = True
    payload_varies = True  # only a student gets any
    needs_public_data = True

    def __init__(
        self,
        backbone: Backbones,
        num_classes: PositiveInt = 10,
        distill_steps: NonNegativeInt = 10_000,
        distill_batch_size: PositiveInt = 128,
        distill_optimizer: OptimizerCallable = default_student_optimizer,
        distill_clip: PositiveFloat | None = 5.0,
        temperature: PositiveFloat = 1.0,
        distill_loss: DistillLoss = "avg_logits",
        validate_every: PositiveInt = 100,
        patience: PositiveInt | None = 1_000,
        drop_worst: bool = False,
        weighting: Literal["examples", "uniform"] = "uniform",
        optimizer: OptimizerCallable = default_optimizer,
        epochs: NonNegativeInt = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, num_classes, optimizer, epochs, **kwargs)
        if self.task != "multiclass":
            raise FederationError(f"FedDF got task {self.task!r}, but it distils probabilities of classes: use FedAvg.")
        self.distill_steps = distill_steps
        self.public_batch_size = distill_batch_size
        self.distill_optimizer = distill_optimizer
        self.distill_clip = distill_clip
        self.temperature = temperature
        self.distill_loss: DistillLoss = distill_loss
        self.server_validation = validate_every, patience
        self.drop_worst = drop_worst
        self.weighting = weighting
        self.targets: Tensor | None
        if len(self.backbone_factories) == 1:
            self.headline_model = "global"

    # -------------------------------------------------------------------------------------------------------- architectures

    def architecture(self, client: ClientInfo | None) -> Hashable:
        """Which of the networks: the client's, or the one that the server says its model has."""
        if client is None:
            return 0
        return client.id % len(self.backbone_factories) if client.capacity is None else int(client.capacity)

    @property
    def _factory(self) -> Any:
        place = self.architecture(self.client)
        assert isinstance(place, int)
        return self.backbone_factories[place]

    # ------------------------------------------------------------------------------------------------------------ a student

    def build(self) -> None:
        """The network, and room for what the teachers say."""
        super().build()
        self.register_buffer("targets", None, persistent=False)

    def load_payload(self, payload: State) -> None:
        """Take what the teachers say of each public example, ``(M, …)``."""
        self.targets = payload.get(f"{TARGETS}{self.distill_loss}")

    def server_phases(self) -> list[Phase]:
        """A student's training."""
        return [
            Phase(
                "distill",
                list(self.parameters()),
                self.student_loss,
                self.distill_optimizer,
                steps=self.distill_steps,
                lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.distill_steps),
                lr_interval="step",
                gradient_clip=self.distill_clip,
            )
        ]

    def student_loss(self, batch: Any) -> Tensor:
        """How far a student is from its teachers on a batch of numbered examples."""
        x, numbers = self.unpack(batch)
        assert self.targets is not None
        said, logits = self.targets[numbers], self(x) / self.temperature
        if self.distill_loss == "avg_logits":
            return divergence(said, logits)
        # The mean over k of KL(p_k || q) is KL to the mean of p_k, plus what does not depend on q: the last column.
        return kl_div(logits.log_softmax(1), said[:, :-1], reduction="batchmean") + said[:, -1].mean()

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        """A mean and a student for each architecture. This module's own tensors are those of the first; the others are drawn on the
        running stream.
        """
        seed, places = torch.initial_seed(), {client.id: int(self.architecture(client)) for client in clients}  # type: ignore[call-overload]
        states = {0: self.shared_state()}
        for place in set(places.values()) - {0}:
            states[place] = self.for_client(replace(clients[0], capacity=place), seed).shared_state()
        names = architecture_names(self.backbone_factories, states)
        below = 1.2 / self.num_classes if self.drop_worst else None
        saying = f"{TARGETS}{self.distill_loss}", partial(said_by, loss=self.distill_loss, temperature=self.temperature)
        return DistillingServer(states, places, names, self.weighting, self.distill_steps, saying, below)


def said_by(logits: Tensor, loss: DistillLoss, temperature: float) -> Tensor:
    r"""What of one teacher's logits ``(M, C)`` is averaged over the teachers: themselves, divided by T; or probabilities, with
    :math:`\sum_c p_c \log p_c` as one more column.
    """
    logits = logits / temperature
    if loss == "avg_logits":
        return logits
    logs = logits.log_softmax(1)
    return torch.cat([logs.exp(), (logs.exp() * logs).sum(1, keepdim=True)], dim=1)


def architecture_names(factories: Sequence[Any], places: Iterable[int]) -> dict[int, str]:
    """What the architectures are called: as the networks are, or by number where that is not clear."""
    names = {place: getattr(factories[place], "__name__", str(factories[place]).rpartition(".")[2]) for place in places}
    clear = len(set(names.values())) == len(names) and all(name.isidentifier() for name in names.values())
    return names if clear else {place: str(place) for place in names}


class DistillingServer(GroupServer):
    """Averages within each architecture, then lets each average learn from all that was sent.

    Args:
        states: the initial models, by the number of their architecture.
        places: which one each client has, by id.
        names: of the architectures.
        weighting: within an architecture.
        steps: of each student.
        saying: the name under which the teachers' words are sent to a student, and what of a teacher's logits is averaged.
        drop_below: the accuracy on validation data that makes a teacher; None: all are.
    """

    def __init__(
        self,
        states: Mapping[int, State],
        places: Mapping[int, int],
        names: Mapping[int, str],
        weighting: Literal["examples", "uniform"],
        steps: int,
        saying: tuple[str, Callable[[Tensor], Tensor]],
        drop_below: float | None,
    ) -> None:
        super().__init__(states, places, weighting)
        self.names = names
        self.steps = steps
        self.name, self.said_by = saying
        self.drop_below = drop_below
        self.round = 0

    def _hold(self, states: dict[int, State]) -> None:
        super()._hold(states)
        self.state = states[min(states)]  # what is exported without a client is the first architecture, as a module without one has

    def open_round(self, round: int, cohort: Sequence[ClientInfo]) -> None:
        """Forget the teachers of the round before."""
        self.round = round
        self.scratch.clear()

    def models(self) -> dict[str, Broadcast]:
        """``global_<architecture>`` of each; ``global`` if there is one."""
        one = len(self.states) == 1
        return {"global" if one else f"global_{self.names[place]}": Broadcast(self.states[place], place) for place in self.states}

    def aggregate(self, updates: Iterable[ClientUpdate]) -> dict[str, float]:
        """Merge a round's updates, each with those of its architecture, and put them aside as teachers."""
        return super().aggregate(self._put_aside(updates))

    def _put_aside(self, updates: Iterable[ClientUpdate]) -> Iterator[ClientUpdate]:
        for update in updates:
            self.scratch.put(update.client, update.state, self.round)
            yield update

    def learn(self, of_models: OfModels) -> dict[str, float]:
        """Let the averages learn: one teacher is in memory at a time, and one table of what they all say."""
        if not self.steps:
            return {}
        teachers = self._teachers(of_models)
        row = {"server/teachers": float(len(teachers)), "server/steps": 0.0, "server/flops": 0.0}
        said = WeightedMean()
        for update in of_models("predict", (self._teacher(client) for client in teachers)):
            said.add({self.name: self.said_by(update.state["outputs"])}, 1)
            row["server/flops"] += update.metrics["flops"]
        self.scratch.clear()
        if not (targets := said.result()):
            return row
        learned, losses = {}, []
        students = (Broadcast(state | targets, place) for place, state in self.states.items())
        for (place, state), update in zip(self.states.items(), of_models("learn", students), strict=True):
            check_update(update, state)
            learned[place] = update.state
            losses.append(update.metrics["train/distill_loss"])
            for cost in ("steps", "flops"):
                row[f"server/{cost}"] += update.metrics[cost]
        self._hold(learned)
        return row | {"server/distill_loss": sum(losses) / len(losses)}

    def _teacher(self, client: int) -> Broadcast:
        return Broadcast(self.scratch.get(client), self.sizes[client])

    def _teachers(self, of_models: OfModels) -> list[int]:
        """Who teaches."""
        sent = sorted(self.scratch)
        if self.drop_below is None:
            return sent
        measured = of_models("evaluate", (self._teacher(client) for client in sent))
        return [client for client, update in zip(sent, measured, strict=True) if self._knows(update.metrics)]

    def _knows(self, metrics: Mapping[str, float]) -> bool:
        assert self.drop_below is not None
        if "val/accuracy" not in metrics:
            raise FederationError("drop_worst needs validation data, of which there are none: set data.init_args.val_share.")
        return metrics["val/accuracy"] >= self.drop_below
