"""FedDF (Lin et al., NeurIPS 2020, https://arxiv.org/abs/2006.07242), Algorithms 1 and 3."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torch.nn.functional import cross_entropy

from lightning_fed.core import ClientInfo, FederationError, Phase, RunOnServer, Server, State, mixtures, widened
from lightning_fed.methods.families.distillation import TARGETS, EnsembleModule, EnsembleServer, names_of
from lightning_fed.models import Backbones
from lightning_fed.nn.losses import divergence
from lightning_fed.options import NonNegativeInt, PositiveFloat, PositiveInt

DistillLoss = Literal["avg_logits", "avg_losses"]


def default_student_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Adam with learning rate 1e-3, as in the authors' code."""
    return torch.optim.Adam(parameters, lr=1e-3)


class FedDF(EnsembleModule):
    r"""FedAvg within each architecture, after which the ensemble of all clients' models is distilled into each average.

    A client trains its architecture's model as in FedAvg. The server averages the updates of each architecture, and then, for each,
    takes the average as the student and minimises

    .. math:: \mathrm{KL}\bigl(\mathrm{softmax}(\tfrac{1}{K} \textstyle\sum_k z_k(d)) \,\Vert\, \mathrm{softmax}(z_s(d))\bigr)

    over batches d of the public data, with the logits :math:`z_k` of the K received models, of any architecture, in
    eval mode. The labels of the public data are not used. If clients hold out validation data, the student that is best on all
    of them is kept, and training stops when it no longer improves.

    ``global_<architecture>/…`` is each architecture's model on the test data of all clients, ``after/…`` each client's model on its
    own. Monitored: accuracy of the latter; with one architecture that of the one model, ``global``. The server's costs are
    ``server/…``.

    Args:
        backbone: the clients' networks: client ``k`` has entry ``k mod len(list)``, and the server a model of each.
        num_classes: number of classes; None: as many as the data have.
        distill_steps: steps of each student in each round; 0 is FedAvg for each architecture. The authors: 10,000.
        distill_batch_size: number of public examples in a step. The authors: 128.
        distill_optimizer: optimizer of a student, fresh in each round; its rate falls to 0 along a cosine. Default: Adam, lr 1e-3.
        distill_clip: largest gradient norm of a student's step; the authors: 5. None: ``gradient_clip``.
        temperature: divisor of all logits; no factor compensates for it. The authors: 1.
        distill_loss: ``avg_logits``: as above. ``avg_losses``: the mean over the teachers of each one's divergence.
        validate_every: number of steps between validations of a student. The authors: 100.
        patience: number of steps without improvement after which a student stops. The authors: 1,000. None: it takes all steps.
        drop_worst: whether to leave out weak teachers: those whose accuracy on all validation data is below 1.2 times
            that of chance. If none is left, the averages do not change.
        **kwargs: see :class:`.EnsembleModule`. The authors: 40 ``epochs`` with SGD, lr 0.1.

    Raises:
        FederationError: for a task without classes, or without public data.
    """

    def __init__(
        self,
        backbone: Backbones,
        num_classes: PositiveInt | None = None,
        distill_steps: NonNegativeInt = 10_000,
        distill_batch_size: PositiveInt = 128,
        distill_optimizer: OptimizerCallable = default_student_optimizer,
        distill_clip: PositiveFloat | None = 5.0,
        temperature: PositiveFloat = 1.0,
        distill_loss: DistillLoss = "avg_logits",
        validate_every: PositiveInt = 100,
        patience: PositiveInt | None = 1_000,
        drop_worst: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, num_classes, distill_steps, distill_batch_size, distill_optimizer, **kwargs)
        self.distill_clip = distill_clip
        self.temperature = temperature
        self.distill_loss: DistillLoss = distill_loss
        self.server_validation = validate_every, patience
        self.drop_worst = drop_worst
        self.targets: Tensor | None
        if len(self.networks.factories) == 1:
            self.monitor_model = "global"

    def build(self) -> None:
        super().build()
        self.register_buffer("targets", None, persistent=False)

    def load_payload(self, payload: State) -> None:
        """Store the teachers' outputs for each public example, ``(M, …)``."""
        self.targets = payload.get(f"{TARGETS}{self.distill_loss}")

    def server_phases(self) -> list[Phase]:
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
        """Divergence of a student from its teachers on a batch of indexed examples."""
        x, numbers = self.unpack(batch)
        assert self.targets is not None
        teacher, logits = widened(self.targets[numbers]), self(x) / self.temperature
        if self.distill_loss == "avg_logits":
            return divergence(teacher, logits)
        # The mean over k of KL(p_k || q) is the cross-entropy with the mean p_k, plus what does not depend on q: the last column.
        return cross_entropy(logits, teacher[:, :-1]) + teacher[:, -1].mean()

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        """A server with a mean and a student for each architecture. This module's own tensors are those of the first; the others
        are drawn from the running random stream.
        """
        groups = self.groups(clients)
        states = {place: self.drawn(place, clients).shared_state() for place in sorted({0, *groups.values()})}
        names = {0: "global"} if len(states) == 1 else names_of(self.networks.factories, states)
        return DistillingServer(self, states, groups, names, min(states))


def teacher_outputs(logits: Tensor, loss: DistillLoss, temperature: float) -> Tensor:
    r"""The values of one teacher that are averaged over the teachers: its logits ``(M, C)`` divided by T; or its probabilities,
    with :math:`\sum_c p_c \log p_c` as one more column.
    """
    scaled = logits / temperature
    if loss == "avg_logits":
        return scaled
    logs = widened(scaled).log_softmax(1)
    return torch.cat([logs.exp(), (logs.exp() * logs).sum(1, keepdim=True)], dim=1).to(logits.dtype)


class DistillingServer(EnsembleServer):
    """Averages within each architecture, then distils the mean output of all received models into each average."""

    method: FedDF

    def train_on_public(self, run_on_server: RunOnServer) -> dict[str, float]:
        """Distil the teachers into the averages, with one teacher and the table of their mean in memory at a time."""
        if not self.method.distill_steps:
            return {}
        teachers = self._teachers(run_on_server)
        row = {"server/teachers": float(len(teachers)), "server/steps": 0.0, "server/flops": 0.0}
        if teachers:
            outputs_of = partial(teacher_outputs, loss=self.method.distill_loss, temperature=self.method.temperature)
            flops = self.collect_predictions(teachers, run_on_server, outputs_of)
            equal = torch.full((1, len(teachers)), 1 / len(teachers), dtype=torch.float64)
            mean = mixtures(self.predictions(teachers), equal, self.dtype)[0].view(self.shape)
            row |= self.distill(list(self.states), {f"{TARGETS}{self.method.distill_loss}": mean}, run_on_server)
            row["server/flops"] += flops
        self.round_state.clear()
        return row

    def _teachers(self, run_on_server: RunOnServer) -> list[int]:
        """Models that act as teachers."""
        sent = sorted(self.round_state)
        if not self.method.drop_worst:
            return sent
        measured = run_on_server("evaluate", (self.teacher(client) for client in sent))
        return [client for client, update in zip(sent, measured, strict=True) if self._knows(update.metrics)]

    def _knows(self, metrics: Mapping[str, float]) -> bool:
        if "val/accuracy" not in metrics:
            raise FederationError("drop_worst needs validation data, but there are none: set data.init_args.val_share.")
        return metrics["val/accuracy"] >= 1.2 / self.method.num_classes
