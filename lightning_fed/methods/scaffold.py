"""SCAFFOLD (Karimireddy et al., ICML 2020, https://arxiv.org/abs/1910.06378), Algorithm 1."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fed.core import ClientInfo, FederationError, KeepsGlobalParameters, Phase, Server, ServerUpdate, State
from lightning_fed.methods.families.whole_server import WholeServerModule
from lightning_fed.models import Backbones
from lightning_fed.nn.buffer_dict import BufferDict
from lightning_fed.options import PositiveFloat, PositiveInt

CONTROL = "control/"
"""What the names of control variates on the wire begin with."""


class SCAFFOLD(WholeServerModule, KeepsGlobalParameters):
    r"""Control variates correct each local step for client drift, the difference between a client's and the average gradient.

    The server has the model :math:`x` and a control variate :math:`c`, each client its own :math:`c_k`; both control variates start
    at zero. A round of a client:

    1. Load :math:`x` and :math:`c`; :math:`y \leftarrow x`.
    2. Take K steps :math:`y \leftarrow y - \eta\,(g(y) - c_k + c)`.
    3. Compute :math:`c_k^+`, see ``option``; send :math:`y` and :math:`c + \Delta c_k` with :math:`\Delta c_k = c_k^+ - c_k`. Then
       :math:`c_k \leftarrow c_k^+`, which stays.

    The server averages with equal weights, :math:`x \leftarrow x + \eta_g (\bar y - x)` over the participants S and :math:`c
    \leftarrow c + \frac{1}{N} \sum_{k \in S} \Delta c_k` over the N clients that may take part, so that :math:`c` is always the
    mean of all their :math:`c_k`. The paper sends :math:`y - x` and :math:`\Delta c_k`, which is equivalent, because the server
    knows :math:`x` and :math:`c`. With the payload used here the first round is FedAvg's with equal weights, bit for bit, and both
    are compressed as changes of the received values. Twice the parameters travel each way. Buffers (batch norm) are averaged
    as in FedAvg, whatever :math:`\eta_g` is, and have no control variates. Monitored: accuracy after aggregation.

    Args:
        backbone: the network that every client trains.
        num_classes: number of classes; None: as many as the data have.
        option: ``"II"``: :math:`c_k^+ = c_k - c + (x - y) / \sum \eta` over the steps taken; for plain SGD only, since with
            momentum, weight decay or clipping this is not a gradient. ``"I"``: the gradient at :math:`x` over all the client's
            data, in one additional pass (with the batch-norm statistics after training).
        server_lr: :math:`\eta_g`; 1 in the paper's experiments.
        **kwargs: see :class:`.FederatedModule`. With option I, ``gradient_clip`` clips the corrected gradients.
    """

    weighting = "uniform"
    beside_the_model = ("own_control.",)

    def __init__(
        self,
        backbone: Backbones,
        num_classes: PositiveInt | None = None,
        option: Literal["I", "II"] = "II",
        server_lr: PositiveFloat = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, num_classes, **kwargs)
        self.option = option
        self.server_lr = server_lr
        self.total_lr = 0.0  # the sum of the learning rates of the steps since the broadcast
        if option == "II":
            self.scales_gradients = False  # steps that are skipped when scaled gradients overflow would be counted
            check_plain_sgd(self.optimizer([nn.Parameter(torch.zeros(1))]), self.gradient_clip)

    def build(self) -> None:
        super().build()
        zeros = {name: torch.zeros_like(p) for name, p in self.named_parameters() if p.requires_grad}
        self.own_control = BufferDict(zeros)  # c_k
        self.control = BufferDict(zeros, persistent=False)  # c until the client has trained, then c + Δc

    def payload(self) -> State:
        r""":math:`c` on its way down, :math:`c + \Delta c` on its way up."""
        return {f"{CONTROL}{name}": tensor for name, tensor in self.control.items()}

    def continued_names(self) -> set[str]:
        """The parameters, and :math:`c`, to which a client adds its own change."""
        return super().continued_names() | self._payload

    def load_payload(self, payload: State) -> None:
        self.control.update({name.removeprefix(CONTROL): tensor for name, tensor in payload.items()})
        self.total_lr = 0.0

    def phases(self) -> list[Phase]:
        """FedAvg's phase, with corrected gradients."""
        return [self.local_phase("local", list(self.parameters()), self.corrected_loss)]

    def corrected_loss(self, batch: Any) -> Tensor:
        """The loss of a batch plus a term of value zero that corrects the gradient, which works at any precision."""
        terms = [((self.control[name] - self.own_control[name]) * p).sum() for name, p in self.learning().items()]
        correction = torch.stack(terms).sum()
        return self.client_loss(batch) + (correction - correction.detach())

    def after_step(self, optimizer: Optimizer) -> None:
        if self.phase.name == "fine_tune":  # whose steps do not count, and whose optimizer may be another
            return
        if self.option == "II":  # a schedule may have given it momentum
            check_plain_sgd(optimizer, self.gradient_clip)
        self.total_lr += optimizer.param_groups[0]["lr"]

    def post_training_step(self, batch: Any) -> State:
        """Option I: the gradient of a batch at x, summed over the terms of its loss."""
        with torch.enable_grad(), self.at_global_parameters() as point:
            grads = torch.autograd.grad(self.client_loss(batch), list(point.values()), materialize_grads=True)
        size = self.loss_terms(batch)
        examples = torch.tensor(float(size), device=self.device)
        return {"examples": examples, **{name: size * grad for name, grad in zip(point, grads, strict=True)}}

    @property
    def has_post_training_step(self) -> bool:
        return self.option == "I"

    @torch.no_grad()
    def after_training(self, sums: State) -> None:
        """Compute the new control variate."""
        for name, now in self.learning().items():
            before, control = self.own_control[name], self.control[name]
            if self.option == "I":
                after = sums[name] / sums["examples"]
            else:
                after = before - control + (self.global_parameters[name] - now) / self.total_lr if self.total_lr else before.clone()
            control.add_(after - before)
            before.copy_(after)

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        """A server that averages models with equal weights and adds up control variates."""
        update = ScaffoldUpdate(sum(client.takes_part for client in clients), self.server_lr, self.remembered().keys())
        return Server(self.update_state(), self.weighting, holds_model=True, update=update)


def check_plain_sgd(optimizer: Optimizer, gradient_clip: float | None) -> None:
    """Refuse settings with which (x − y) / Ση is not a mean of gradients."""
    groups = optimizer.param_groups
    wrong = [key for key in ("momentum", "weight_decay") if any(group.get(key) for group in groups)]
    wrong += [f"gradient_clip={gradient_clip}"] if gradient_clip is not None else []
    rates = [group["lr"] for group in groups if group["params"]]
    wrong += ["groups with different lr"] if any(rate != rates[0] for rate in rates) else []
    if type(optimizer) is not torch.optim.SGD:
        wrong = [type(optimizer).__name__]
    if wrong:
        raise FederationError(
            f"SCAFFOLD's option II is for plain SGD, but got {', '.join(wrong)}: its control variates would not be gradients. Set "
            "option to I, or the optimizer to torch.optim.SGD with one lr alone, and cycle_momentum of the lr_scheduler to false."
        )


@dataclass
class ScaffoldUpdate(ServerUpdate):
    r""":math:`c` grows by :math:`\frac{1}{N} \sum_{k \in S} \Delta c_k`, and the model moves by :math:`\eta_g` towards the mean.

    Args:
        num_clients: N, the number of clients that may take part.
        server_lr: :math:`\eta_g`.
        parameters: names of the tensors that move by it.
    """

    num_clients: int
    server_lr: float
    parameters: Collection[str]

    def __call__(self, state: State, combined: State, clients: int) -> State:
        """Move the model; buffers take the mean, because beyond it a variance could be negative."""
        share = clients / self.num_clients
        moved = {name: torch.lerp(state[name], mean, share) for name, mean in combined.items() if name.startswith(CONTROL)}
        moved |= {name: torch.lerp(state[name], combined[name], self.server_lr) for name in self.parameters}
        return combined | moved
