"""FedCAC (Wu et al., "Bold but Cautious", ICCV 2023, https://arxiv.org/abs/2309.11103)."""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import floor
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fed.core import (
    Broadcast,
    ClientInfo,
    ClientUpdate,
    KeepsGlobalParameters,
    PersonalServer,
    Server,
    State,
    Vectors,
    check_fits,
    common_bits,
    each_mixture,
    flatten,
    mean_of_updates,
    pack_bits,
    unflatten,
    unpack_bits,
)
from lightning_fed.models import Backbones
from lightning_fed.nn.rank import floor_of
from lightning_fed.options import ClosedUnitInterval, PositiveInt

CRITICAL = "critical"
"""The mask of critical entries on the wire, and as it is kept: a bit for each, tensor after tensor."""

MODEL, VALUES = "model", "values"
"""What the server has of a client besides: all parameters that arrived in a round; what is kept of the customized model."""


class FedCAC(KeepsGlobalParameters):
    r"""Parameters critical for a client's data are averaged among clients with similar critical parameters, the rest among all.

    A round of a client:

    1. Load the server's :math:`w`, and train ``epochs`` epochs, to :math:`w'`.
    2. In each tensor the share :math:`\tau` of the entries with the largest :math:`|(w' - w)\, w'|` is critical. This approximates
       the loss of removing them. Send :math:`w'` and the mask :math:`M_i`.

    The server takes the mean W of all :math:`w'`, weighted by training examples. The overlap of two masks is :math:`O_{ij} = 1 -
    \lVert M_i - M_j \rVert_1 / 2 \lVert M_i \rVert_1`; client j is a collaborator of i if :math:`O_{ij} \ge \bar O +
    \frac{t}{\beta} (\max O - \bar O)` in round t, with mean and maximum over all pairs, or if j is i. The plain mean of
    the collaborators' :math:`w'` is the customized model :math:`W_i^c`, and the client gets :math:`M_i \circ W_i^c + (1 - M_i)
    \circ W` next. The threshold rises: in round :math:`\beta` only clients with the largest overlap collaborate, afterwards none.

    All this is among the participants of a round. A client that does not take part keeps its critical entries, and gets the rest
    of the current W. Buffers (batch norm) stay with the client. Monitored: accuracy after aggregation, of the model that the client
    gets.

    Args:
        backbone: the network of every client.
        num_classes: number of classes; None: as many as the data have.
        tau: share :math:`\tau` of critical entries; 0 is FedAvg. The authors' code: 0.5 for CIFAR-10, 0.4 for CIFAR-100.
        beta: round :math:`\beta` after which no clients collaborate. The authors' code, for 300 rounds: 100 for CIFAR-10, 170 for
            CIFAR-100.
        **kwargs: see :class:`.FederatedModule`.
    """

    dynamic_payload = True  # up only

    critical: Tensor
    """Which entries are critical, tensor after tensor."""

    def __init__(
        self,
        backbone: Backbones,
        num_classes: PositiveInt | None = None,
        tau: ClosedUnitInterval = 0.5,
        beta: PositiveInt = 100,
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, num_classes, **kwargs)
        self.tau = tau
        self.beta = beta

    def build(self) -> None:
        """Build the network; nothing in it is critical yet."""
        super().build()
        size = sum(p.numel() for p in self.parameters() if p.requires_grad)
        self.register_buffer("critical", torch.zeros(size, dtype=torch.bool), persistent=False)

    def shared_names(self) -> set[str]:
        """Names of the parameters."""
        return {name for name, _ in self.named_parameters()} & super().shared_names()

    def payload(self) -> State:
        return {CRITICAL: pack_bits(self.critical)}

    def load_payload(self, payload: State) -> None:
        """Reset the mask: the server sends parameters only, and nothing is critical before training."""
        check_fits(payload, {}, "The payload for FedCAC")
        self.critical = torch.zeros_like(self.critical)

    @torch.no_grad()
    def after_training(self, sums: State) -> None:
        if self.epochs if self.steps is None else self.steps:
            own = dict(self.named_parameters())
            masks = [critical_entries((own[name] - start) * own[name], self.tau) for name, start in self.global_parameters.items()]
            self.critical = torch.cat([mask.flatten() for mask in masks])

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        """A server that keeps the average and a customized model for each client."""
        return CollaborationServer(self.shared_state(), self.weighting, self.beta)


def critical_entries(effect: Tensor, tau: float) -> Tensor:
    r"""The :math:`\lfloor \tau n \rfloor` entries of a tensor of n with the largest magnitudes, and those that equal the least.

    If the least of these values is at most 1e-10, all entries above 1e-20 are critical, as in the authors' code.

    Args:
        effect: effect of removing each entry.
        tau: the share.

    Returns:
        Booleans of the same shape.
    """
    magnitude, quota = effect.abs(), floor_of(tau, effect.numel())
    if quota == 0:
        return torch.zeros_like(magnitude, dtype=torch.bool)
    least = magnitude.flatten().kthvalue(effect.numel() - quota + 1).values
    return torch.where(least > 1e-10, magnitude >= least, magnitude > 1e-20)


def differing_entries(common: Tensor) -> Tensor:
    r"""Number of entries that are critical for exactly one of each two clients, :math:`\lVert M_i - M_j \rVert_1`.

    Args:
        common: number of entries that are critical for both, ``(n, n)`` integers; on the diagonal, for each client.
    """
    sizes = common.diag()
    return sizes[:, None] + sizes - 2 * common


def overlap_threshold(common: Tensor, progress: Fraction) -> Fraction:
    r""":math:`\bar O + p\,(\max O - \bar O)` over all ordered pairs of clients, exactly: overlaps often differ by little. Clients
    without critical entries, whose overlaps are undefined, are left out.

    Args:
        common: see :func:`differing_entries`.
        progress: p, the part t / β of the rounds with collaboration.
    """
    differing, sizes = differing_entries(common), common.diag().tolist()
    known, others = [client for client, size in enumerate(sizes) if size], len(sizes) - 1
    if not known or not others:
        return Fraction(1)
    total, nearest = differing.sum(dim=1).tolist(), differing.fill_diagonal_(2**62).amin(dim=1).tolist()
    mean = sum((1 - Fraction(total[i], 2 * sizes[i] * others) for i in known), start=Fraction()) / len(known)
    largest = max(1 - Fraction(nearest[i], 2 * sizes[i]) for i in known)
    return mean + progress * (largest - mean)


def collaborators(common: Tensor, progress: Fraction) -> Tensor:
    """Collaborators of each of n clients, one row per client: booleans ``(n, n)``.

    Args:
        common: see :func:`differing_entries`.
        progress: see :func:`overlap_threshold`.
    """
    allowed = 1 - overlap_threshold(common, progress)
    most = torch.tensor([floor(2 * size * allowed) if size else -1 for size in common.diag().tolist()])
    return (differing_entries(common) <= most[:, None]) | torch.eye(len(common), dtype=torch.bool)


def mean_of_parameters(updates: Iterable[tuple[State, float]], state: State) -> State:
    """The weighted mean of the updates, without the masks."""
    return mean_of_updates((({name: update[name] for name in state}, weight) for update, weight in updates), state)


class CollaborationServer(PersonalServer):
    """Averages the updates, and keeps the critical entries of each client's customized model.

    Args:
        state: the initial parameters.
        weighting: of the mean over all participants; see :class:`lightning_fed.core.server.Server`.
        beta: see :class:`FedCAC`.
    """

    def __init__(self, state: State, weighting: Literal["examples", "uniform"], beta: int) -> None:
        super().__init__(state, weighting, mean_of_parameters)
        self.beta = beta

    def broadcast(self, client: ClientInfo) -> Broadcast:
        """The mean, with the client's own critical entries."""
        if client.id not in self.client_state:
            return Broadcast(self.state)
        kept, vector = self.client_state.get(client.id), flatten(self.state)
        vector[unpack_bits(kept[CRITICAL], len(vector))] = kept[VALUES]
        return Broadcast(unflatten(vector, self.state))

    def expected_payload(self, update: ClientUpdate, sent: Broadcast) -> State:
        """The received parameters, and a bit for each of their entries."""
        return sent.state | {CRITICAL: torch.empty(-(-self.size // 8), dtype=torch.uint8)}

    def state_of(self, update: ClientUpdate) -> State:
        """All parameters, as a vector, and the mask."""
        return {MODEL: flatten({name: update.state[name] for name in self.state}), CRITICAL: update.state[CRITICAL]}

    def update_clients(self, clients: Sequence[int]) -> dict[str, float]:
        """Keep the critical entries of the customized models; returns ``server/collaborators``, their mean number per client."""
        together = collaborators(common_bits(self.round_state, CRITICAL, clients), Fraction(self.round, self.beta))
        vectors = Vectors(self.round_state, MODEL, clients, self.size)
        models = each_mixture(vectors, together.double() / together.sum(dim=1, keepdim=True), flatten(self.state).dtype)
        for client, model in zip(clients, models, strict=True):
            mask = self.round_state.get(client)[CRITICAL]
            self.client_state.put(client, {CRITICAL: mask, VALUES: model[unpack_bits(mask, self.size)]}, self.round)
        return {"server/collaborators": together.sum().item() / len(clients) - 1}
