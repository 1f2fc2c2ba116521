"""FedAMP and HeurFedAMP (Huang et al., AAAI 2021, https://arxiv.org/abs/2007.03797), Algorithm 1 and Section 5."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fed.core import (
    Broadcast,
    ClientInfo,
    ClientUpdate,
    FederatedModule,
    PersonalServer,
    Server,
    State,
    Vectors,
    at_a_time,
    check_fits,
    cosines,
    flatten,
    mixtures,
    squared_distances,
    unflatten,
)
from lightning_fed.models import Backbones
from lightning_fed.nn import BufferDict, proximal_step
from lightning_fed.options import ClosedUnitInterval, NonNegativeFloat, PositiveFloat, PositiveInt

MODEL, CLOUD = "model/", "cloud/"
"""What the names of a client's parameters begin with on their way up, and those of its cloud model on their way down. If training
starts from the cloud model, both are ``model/``: the client's parameters are then a change of it, of which compression makes use.
"""


class FedAMP(FederatedModule):
    r"""Each client keeps a personal model, which attentive message passing pulls towards those of similar clients.

    Together the clients minimise :math:`\sum_i L_i(w_i) + \lambda \sum_{i<j} A(\lVert w_i - w_j \rVert^2)` with
    :math:`A(x) = 1 - e^{-x/\sigma}`. In round k the server has each client's latest parameters and computes for each participant a
    cloud model

    .. math:: u_i = \sum_j \xi_{ij} w_j, \quad \xi_{ij} = \frac{\alpha_k}{\sigma} e^{-\lVert w_i - w_j \rVert^2 / \sigma}
        \text{ for } j \neq i, \quad \xi_{ii} = 1 - \sum_{j \neq i} \xi_{ij},

    and the client continues from its own :math:`w_i`, minimises :math:`L_i(w) + \frac{\lambda}{2 \alpha_k} \lVert w - u_i
    \rVert^2`, and sends :math:`w_i`. All clients start from one model. A client that has sent nothing yet does not count; an absent
    one counts with its last model. Buffers (batch norm) stay with the client. The second term is minimised exactly, after each step
    of the optimizer: :math:`w \leftarrow (w + c\,u_i) / (1 + c)`, :math:`c = \eta \lambda / \alpha_k`, with its rate :math:`\eta`.
    As a part of the loss it would diverge if c is above 2. Monitored: accuracy after aggregation, of :math:`w_i`; it equals that
    before.

    Args:
        backbone: the network of every client.
        num_classes: number of classes; None: as many as the data have.
        lam: :math:`\lambda`; 0 trains each client alone.
        alpha: step size :math:`\alpha` of the first round. Default: 1e4, with its decay from experiments of the FedDecomp group.
        sigma: scale :math:`\sigma` of squared distances over all parameters; or, with ``self_weight``, of cosines.
        alpha_decay: factor by which :math:`\alpha_k` shrinks.
        alpha_every: number of rounds after which it shrinks.
        self_weight: None, or HeurFedAMP with this :math:`\xi_{ii}`, where :math:`\xi_{ij} = (1 - \xi_{ii})\, e^{\sigma \cos(w_i,
            w_j)} / \sum_{h \neq i} e^{\sigma \cos(w_i, w_h)}`; :math:`\alpha` then applies to the client's term only.
        start: where training starts: from the client's ``own`` model, or, for weights that are not negative, the ``cloud`` model.
        **kwargs: see :class:`.FederatedModule`.
    """

    weighting = "uniform"
    dynamic_payload = True  # an evaluation needs no payload

    def __init__(
        self,
        backbone: Backbones,
        num_classes: PositiveInt | None = None,
        lam: NonNegativeFloat = 1.0,
        alpha: PositiveFloat = 1e4,
        sigma: PositiveFloat = 100.0,
        alpha_decay: PositiveFloat = 0.1,
        alpha_every: PositiveInt = 30,
        self_weight: ClosedUnitInterval | None = None,
        start: Literal["own", "cloud"] = "own",
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, num_classes, **kwargs)
        self.lam = lam
        self.alpha, self.alpha_decay, self.alpha_every = alpha, alpha_decay, alpha_every
        self.sigma = sigma
        self.self_weight = self_weight
        self.start = start
        self.is_drawn = False  # towards a cloud model, which a client that trains alone does not have

    def build(self) -> None:
        """Build the network and buffers for the cloud model's parameters, which start as the network's own."""
        super().build()
        self.cloud = BufferDict({name: p for name, p in self.named_parameters() if p.requires_grad}, persistent=False)

    def shared_names(self) -> set[str]:
        """Empty: nothing is shared by all clients."""
        return set()

    def payload(self) -> State:
        """The client's parameters."""
        return {MODEL + name: p for name, p in self.cloud.counterparts(self).items()}

    def continued_names(self) -> set[str]:
        """The parameters if they start from the cloud model: the client's own ones are ahead of what it sent."""
        return set(self._payload) if self.start == "cloud" else set()

    def initialized_from(self) -> dict[str, str]:
        """All clients start from one model."""
        return {name: MODEL + name for name in self.cloud}

    @property
    def prefix(self) -> str:
        """What the names of the cloud model's parameters begin with."""
        return MODEL if self.start == "cloud" else CLOUD

    def load_payload(self, payload: State) -> None:
        """Load the cloud model, if there is one; there is none when the client's own model is evaluated."""
        self.is_drawn = bool(payload) and self.lam > 0
        if payload:
            check_fits(payload, {self.prefix + name: p for name, p in self.cloud.items()}, "The payload for FedAMP")
            sent = {name.removeprefix(self.prefix): tensor for name, tensor in payload.items()}
            self.cloud.update(sent)
            if self.start == "cloud":
                self.load_state_dict(sent, strict=False)

    def step_size(self, round: int) -> float:
        r""":math:`\alpha_k` of a round, counted from 1."""
        return self.alpha * self.alpha_decay ** ((round - 1) // self.alpha_every)

    def after_step(self, optimizer: Optimizer) -> None:
        r"""A step towards the cloud model, of strength :math:`\lambda / \alpha_k`; fine-tuning takes none."""
        if self.is_drawn and self.phase.name == "local":
            anchors: dict[Tensor, Tensor] = {p: self.cloud[name] for name, p in self.cloud.counterparts(self).items()}
            proximal_step(optimizer, anchors, self.lam / self.step_size(self.rounds_before + 1))

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        """A server that keeps and mixes the latest parameters of all clients."""
        return CloudServer(self.update_state(), self)


class CloudServer(PersonalServer):
    r"""Keeps the latest parameters of each client, on disk if memory is short.

    It computes cloud models when they are sent, for as many participants at a time as fit into memory.

    Args:
        state: the initial model of every client.
        method: defines the weights of the mixtures.
    """

    def __init__(self, state: State, method: FedAMP) -> None:
        super().__init__(state, "uniform")
        self.method = method
        self._weights: Tensor | None = None  # of the cohort
        self._ready: dict[int, State] = {}  # cloud models of a part of the cohort

    def on_round_start(self, round: int, cohort: Sequence[ClientInfo]) -> None:
        super().on_round_start(round, cohort)
        self._weights, self._ready = None, {}

    def broadcast(self, client: ClientInfo) -> Broadcast:
        """The client's cloud model; the initial model as long as no client has sent anything."""
        if next(iter(self.client_state), None) is None:
            return self.named(self.state)
        if client.id not in self._ready:
            cohort, size, initial = [one.id for one in self.cohort], at_a_time(self.size), flatten(self.state)
            vectors = Vectors(self.client_state, MODEL, sorted({*self.client_state, *cohort}), self.size, default=initial)
            if self._weights is None:
                self._weights = self.weights(vectors, cohort)
            first = cohort.index(client.id) // size * size
            some = slice(first, first + size)
            mixed = mixtures(vectors, self._weights[some], initial.dtype, about=initial)
            self._ready = {one: unflatten(cloud, self.state) for one, cloud in zip(cohort[some], mixed, strict=True)}
        return self.named(self._ready[client.id])

    def named(self, cloud: State) -> Broadcast:
        """A cloud model under the names of its way down."""
        return Broadcast({name.replace(MODEL, self.method.prefix, 1): tensor for name, tensor in cloud.items()})

    def common_broadcast(self) -> Broadcast:
        """Empty: each client has another cloud model."""
        return Broadcast({})

    def evaluation_broadcast(self, client: ClientInfo) -> Broadcast:
        """Empty: the client's own model is evaluated."""
        return Broadcast({})

    def weights(self, vectors: Vectors, clients: Sequence[int]) -> Tensor:
        r""":math:`\xi` of the given clients, one row each, in float64."""
        rows, method = [vectors.clients.index(client) for client in clients], self.method
        others = torch.tensor([client in self.client_state for client in vectors.clients]).repeat(len(rows), 1)
        others[range(len(rows)), rows] = False
        if method.self_weight is None:
            near = torch.exp(-squared_distances(vectors, rows) / method.sigma)
            weights = (method.step_size(self.round) / method.sigma * near).where(others, 0.0)
        else:
            likeness = (method.sigma * cosines(vectors, rows)).where(others, -torch.inf).softmax(dim=1)
            weights = (1 - method.self_weight) * likeness.nan_to_num(0.0)  # without other clients: zeros
        weights[range(len(rows)), rows] = 1 - weights.sum(dim=1)
        return weights

    def expected_payload(self, update: ClientUpdate, sent: Broadcast) -> State:
        """As many parameters as the initial model has."""
        return self.state

    def state_of(self, update: ClientUpdate) -> State:
        """The client's parameters, as a vector."""
        return {MODEL: flatten({name: update.state[name] for name in self.state})}
