"""HETLoRA (Cho et al., EMNLP 2024, https://arxiv.org/abs/2401.06432)."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lightning_fed.core import Broadcast, ClientInfo, ClientUpdate, FederationError, Phase, Server, State, WeightedMean, noted
from lightning_fed.core.phased_module import moment_parts
from lightning_fed.methods.families.exact_lora import Matrices
from lightning_fed.methods.families.lora import LoRAModule
from lightning_fed.models.adapters import COMMON
from lightning_fed.models.transformer import TransformerFactory
from lightning_fed.nn.rank import floor_of, product_norm
from lightning_fed.options import ClosedUnitInterval, NonNegativeFloat, PositiveFloat, PositiveInt


class HETLoRA(LoRAModule):
    r"""Clients train and prune LoRA adapters of different ranks, which the server zero-pads to average and truncates to send.

    A round of a client k of rank :math:`r_k`:

    1. It loads the first :math:`r_k` rows of A and columns of B.
    2. It trains on the loss plus :math:`\lambda \sum \lVert B_{:, tail} \rVert_F \lVert A_{tail, :} \rVert_F` over the adapted
       matrices; the tail is every rank beyond the first :math:`\lfloor \gamma r_k \rfloor`.
    3. If that sum has become smaller, it drops the tail permanently, down to ``r_min`` at least, and sends the rest.

    The server pads with zeros to ``r_max`` and averages A and B separately, with weights :math:`\lVert B_k A_k \rVert_F`, one per
    client, over all matrices together (equal weights while all are zero). The head has the same weights. Zero-padding lets the high
    ranks fade, by design.

    Ranks start at :math:`\lfloor r_{min} + (r_{max} - r_{min})(k - 1) / M \rfloor`, k = 1…M, the rule of PF2LoRA's paper, which
    reproduces its parameter counts; HETLoRA itself draws them at random. M counts the clients that may take part. A client that is
    only evaluated has the rank of the next participating client, or of the last. Monitored: accuracy after aggregation, of each
    client's truncated adapter on its own test data; ``global/…`` is the adapter of rank ``r_max``.

    Args:
        backbone: builds the network, given the number of classes: ``TransformerClassifier``.
        num_classes: number of classes; None: as many as the data have.
        r_min: smallest rank. PF2LoRA's paper: 8 for GLUE (CoLA: 5), 6 for SQuAD and GPT-2.
        r_max: the server's rank, which no client has. PF2LoRA's paper: 12 (SQuAD: 14).
        lora_alpha: scaling is ``lora_alpha / r_max`` for every rank; None: 1.
        penalty: :math:`\lambda`. PF2LoRA's paper: 5e-3 (CoLA: 1e-3, generation: 5e-4).
        keep: :math:`\gamma`, the share of the ranks before the tail. PF2LoRA's paper: 0.99, which makes the tail one rank.
        **kwargs: see :class:`lightning_fed.methods.families.lora.LoRAModule`. PF2LoRA's paper: AdamW, lr 2e-3 (CoLA, SQuAD: 5e-3).
    """

    def __init__(
        self,
        backbone: TransformerFactory,
        num_classes: PositiveInt | None = None,
        r_min: PositiveInt = 8,
        r_max: PositiveInt = 12,
        lora_alpha: PositiveFloat | None = None,
        penalty: NonNegativeFloat = 5e-3,
        keep: ClosedUnitInterval = 0.99,
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, num_classes, r=r_max, lora_alpha=lora_alpha, **kwargs)
        if r_min > r_max:
            raise FederationError(f"r_min is {r_min} and r_max {r_max}: give r_min up to r_max.")
        self.r_min = r_min
        self.r_max = r_max
        self.penalty = penalty
        self.keep = keep
        self.matrices = Matrices({}, r_max)
        self._kept: int | None = None
        self._heavy = 0.0  # size of the tail when the fit began

    def rank(self) -> int:
        """The client's rank; the server's is the largest."""
        return self.r_max if self.model_size is None else int(self.model_size)

    def attach(self) -> None:
        """Add the adapter, to linear layers."""
        super().attach()
        self.linear_layers()
        self.matrices = Matrices.of(self.adapter(COMMON))

    def rank_without_tail(self) -> int:
        """Rank without the tail."""
        return max(self.r_min, floor_of(self.keep, self.rank()))

    def tail(self) -> Tensor:
        r""":math:`\sum \lVert B_{:, tail} \rVert_F \lVert A_{tail, :} \rVert_F` over the adapted matrices, a scalar."""
        kept = floor_of(self.keep, self.rank())
        own = self.adapter(COMMON)
        names = map(self.matrices.names, self.matrices.shapes)
        return torch.stack([own[b][:, kept:].norm() * own[a][kept:].norm() for a, b in names]).sum()

    def phases(self) -> list[Phase]:
        """The phase of LoRA, with the penalty on the tail."""
        return [replace(phase, penalty=lambda: self.penalty * self.tail()) for phase in super().phases()]

    def on_fit_start(self) -> None:
        """Note the size of the tail."""
        super().on_fit_start()
        self._heavy = self.tail().item()

    def on_fit_end(self) -> None:
        """Drop the tail if it has become smaller."""
        super().on_fit_end()
        self._kept = self.rank_without_tail() if self.tail().item() < self._heavy else None

    def load_shared_state(self, state: State) -> None:
        super().load_shared_state(state)
        self._kept = None

    def shared_state(self) -> State:
        """The payload, without a dropped tail."""
        return super().shared_state() if self._kept is None else self.matrices.of_rank(super().shared_state(), self._kept)

    def load_moments(self, moments: State) -> None:
        """Drop the moments of ranks that were dropped since."""
        super().load_moments(moments)
        own = dict(self.named_parameters())
        for name, tensor in moments.items():
            parameter = own[moment_parts(name)[1]]
            if tensor.dim() == parameter.dim():
                self.moments[name] = tensor[tuple(slice(size) for size in parameter.shape)].clone()

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        """A server that truncates, pads, and averages by norm."""
        participants = [client.id for client in clients if client.takes_part]
        span, last = self.r_max - self.r_min, len(participants) - 1
        places = accumulate((client.takes_part for client in clients), initial=0)
        ranks = {
            client.id: self.r_min + span * min(place, last) // len(participants)
            for client, place in zip(clients, places, strict=False)
        }
        return HETLoRAServer(self.shared_state(), ranks, self.r_min, participants)


class HETLoRAServer(Server):
    """Keeps the adapter of the largest rank, and every client's rank.

    Args:
        state: the adapter and the head.
        ranks: the clients' initial ranks, by id.
        r_min: smallest rank that a client may send.
        eligible_clients: ids of the clients that may take part, over which ``server/rank_mean`` is the mean; None: all.
    """

    def __init__(self, state: State, ranks: dict[int, int], r_min: int, eligible_clients: Sequence[int] | None = None) -> None:
        super().__init__(state, "uniform", holds_model=True, combine=combine_by_norm)
        self.matrices = Matrices.of(state)
        self.ranks = ranks
        self.r_min = r_min
        self.eligible_clients = list(ranks) if eligible_clients is None else eligible_clients

    def broadcast(self, client: ClientInfo) -> Broadcast:
        rank = self.ranks[client.id]
        return Broadcast(self.matrices.of_rank(self.state, rank), rank)

    def expected_payload(self, update: ClientUpdate, sent: Broadcast) -> State:
        """The state that the client was sent, without the tail that it dropped.

        Raises:
            FederationError: for a rank that the client cannot have.
        """
        most = self.ranks[update.client]
        rank = rank_of(update.state, most)
        if not self.r_min <= rank <= most:
            raise FederationError(f"The update of client {update.client} has rank {rank}, expected {self.r_min} to {most}.")
        return self.matrices.of_rank(sent.state, rank)

    def aggregate(self, updates: Iterable[ClientUpdate]) -> dict[str, float]:
        """Merge a round's updates and note their ranks; returns ``server/rank_mean``."""
        ranks = dict(self.ranks)
        super().aggregate(noted(updates, lambda update: ranks.update({update.client: rank_of(update.state)})))
        self.ranks = ranks
        return {"server/rank_mean": sum(ranks[client] for client in self.eligible_clients) / len(self.eligible_clients)}

    def state_dict(self) -> State:
        return {**self.state, "ranks": torch.tensor(list(self.ranks.values()))}

    def load_state_dict(self, state: State) -> None:
        """Continue from :meth:`state_dict`. Raises :class:`FederationError` for ranks that the clients cannot have."""
        ranks = dict(zip(self.ranks, state["ranks"].tolist(), strict=True))
        for client, rank in ranks.items():
            if not self.r_min <= rank <= self.ranks[client]:
                raise FederationError(f"Client {client} had rank {rank}, expected {self.r_min} to {self.ranks[client]}.")
        self.state = {name: tensor for name, tensor in state.items() if name != "ranks"}
        self.ranks = ranks


def rank_of(state: State, default: int = 0) -> int:
    """The rank of an adapter; the default if there is none."""
    return next((tensor.shape[0] for name, tensor in state.items() if ".lora_A." in name and tensor.dim()), default)


def adapter_norm(adapter: State, matrices: Matrices) -> float:
    r""":math:`\sqrt{\sum \lVert BA \rVert_F^2}` over the adapted matrices."""
    return math.hypot(*(product_norm(adapter[b], adapter[a]) for a, b in map(matrices.names, matrices.shapes)))


def combine_by_norm(updates: Iterable[tuple[State, float]], state: State) -> State:
    """The mean of adapters padded to the server's rank, weighted by the norms of their products; with equal weights if all products
    are zero.
    """
    by_norm, equal, matrices = WeightedMean(), WeightedMean(), Matrices.of(state)
    for update, weight in updates:
        padded = matrices.of_largest(update)
        if (norm := adapter_norm(update, matrices)) > 0:
            by_norm.add(padded, norm)
        equal.add(padded, weight)
    return by_norm.result() or equal.result()
