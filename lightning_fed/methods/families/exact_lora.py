r"""Federated LoRA whose server merges the products of the factors, :math:`\sum_k p_k s_k B_k A_k`, instead of each factor."""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.nn.utils.parametrize import register_parametrization

from lightning_fed.core import (
    Broadcast,
    ClientInfo,
    ClientUpdate,
    Combine,
    FederationError,
    Server,
    ServerOptimizer,
    State,
    WeightedMean,
    check_fits,
)
from lightning_fed.methods.families.lora import LoRAModule
from lightning_fed.models.adapters import COMMON
from lightning_fed.models.transformer import TransformerFactory
from lightning_fed.nn.low_rank_sums import stacked
from lightning_fed.nn.sparse_change import Change
from lightning_fed.options import PositiveFloat, PositiveInt

Scale = Literal["common", "per_rank"]

LEFT, RIGHT, WHOLE = "change_left", "change_right", "change"
"""What the change of an adapted matrix is called on the wire, after the name of its layer and a dot: its factors, or the matrix."""


@dataclass(frozen=True)
class Matrices:
    """The adapted matrices, and the scale of adapters of a rank.

    Args:
        shapes: ``(out, in)``, by name of the layer.
        rank: the largest.
        lora_alpha: see :class:`ExactLoRA`.
        scale: see :class:`ExactLoRA`.
    """

    shapes: Mapping[str, tuple[int, int]]
    rank: int
    lora_alpha: float | None = None
    scale: Scale = "common"

    @classmethod
    def of(cls, adapter: Mapping[str, Tensor]) -> Self:
        """Those of an adapter of the largest rank, with one scale for all ranks; other tensors are left out."""
        found = {name.partition(".lora_A.")[0]: a for name, a in adapter.items() if ".lora_A." in name}
        shapes = {layer: (len(adapter[f"{layer}.lora_B.{COMMON}.weight"]), a.shape[1]) for layer, a in found.items()}
        return cls(shapes, max(map(len, found.values())))

    def scaling(self, rank: int) -> float:
        """The scale of an adapter of a rank."""
        return 1.0 if self.lora_alpha is None else self.lora_alpha / (self.rank if self.scale == "common" else rank)

    def names(self, layer: str) -> tuple[str, str]:
        """Names of the tensors of A and of B."""
        return f"{layer}.lora_A.{COMMON}.weight", f"{layer}.lora_B.{COMMON}.weight"

    def factor_names(self) -> set[str]:
        """Of all matrices."""
        return {name for layer in self.shapes for name in self.names(layer)}

    def change_names(self) -> set[str]:
        """Possible names of the change of a matrix."""
        return {f"{layer}.{part}" for layer in self.shapes for part in (LEFT, RIGHT, WHOLE)}

    def of_rank(self, state: State, rank: int) -> State:
        """The first rows of A and columns of B, with B rescaled so that their scaled product does not change."""
        cut, factor = dict(state), self.scaling(self.rank) / self.scaling(rank)
        for a, b in map(self.names, self.shapes):
            cut[a], cut[b] = state[a][:rank], state[b][:, :rank] if factor == 1 else factor * state[b][:, :rank]
        return cut

    def of_largest(self, state: State) -> State:
        """The inverse of :meth:`of_rank`: pads missing ranks with zeros."""
        whole = dict(state)
        for layer, (rows, columns) in self.shapes.items():
            a, b = self.names(layer)
            rank = len(state[a])
            if (factor := self.scaling(rank) / self.scaling(self.rank)) != 1:
                whole[b] = factor * state[b]
            if lacking := self.rank - rank:
                whole[a] = torch.cat([state[a], state[a].new_zeros(lacking, columns)])
                whole[b] = torch.cat([whole[b], state[b].new_zeros(rows, lacking)], dim=1)
        return whole

    def added(self, state: State, layer: str, left: Tensor, right: Tensor) -> State:
        """The sum of a matrix's change in a state and the product of two factors: as factors while these have fewer values than
        the matrix, then as the matrix. Empty if there is none.
        """
        rows, columns = self.shapes[layer]
        if (whole := state.get(f"{layer}.{WHOLE}")) is not None:
            return {f"{layer}.{WHOLE}": torch.addmm(whole, left, right)}
        if (before := state.get(f"{layer}.{LEFT}")) is not None:
            left, right = stacked([before, left], [state[f"{layer}.{RIGHT}"], right])
        if (rank := left.shape[1]) * (rows + columns) >= rows * columns:
            return {f"{layer}.{WHOLE}": left @ right}
        return {f"{layer}.{LEFT}": left, f"{layer}.{RIGHT}": right} if rank else {}

    def change(self, state: State, layer: str) -> Tensor | None:
        """The change of a matrix in a state, ``(out, in)``; None if there is none."""
        if (left := state.get(f"{layer}.{LEFT}")) is not None:
            return left @ state[f"{layer}.{RIGHT}"]
        return state.get(f"{layer}.{WHOLE}")

    def changes_like(self, state: State, dtype: torch.dtype) -> State:
        """Names, shapes and dtype that the changes in a state must have, on the meta device; only the ranks are taken from it."""
        like: State = {}
        for layer, (rows, columns) in self.shapes.items():
            sizes: dict[str, tuple[int, int]] = {}
            if (left := state.get(f"{layer}.{LEFT}")) is not None:
                rank = left.shape[-1] if left.dim() else 0
                sizes = {LEFT: (rows, rank), RIGHT: (rank, columns)}
            elif f"{layer}.{WHOLE}" in state:
                sizes = {WHOLE: (rows, columns)}
            like |= {f"{layer}.{part}": torch.empty(size, dtype=dtype, device="meta") for part, size in sizes.items()}
        return like


class ExactLoRA(LoRAModule):
    """Base of methods whose server merges products exactly: clients may have different ranks, and the server sends the change of
    the frozen matrices as factors, which clients add to them.

    Args:
        backbone: builds the network, given the number of classes.
        num_classes: number of classes; None: as many as the data have.
        r: rank of the adapters.
        lora_alpha: see ``scale``; None: s is 1.
        ranks: different ranks of the clients' adapters: client ``k`` has entry ``k mod len(list)``; None: all have ``r``.
        scale: of adapters of different ranks: ``common``: ``lora_alpha`` over the largest rank, for all; ``per_rank``: over their
            own rank, as in peft. The server's sum includes each client's s.
        **kwargs: see :class:`.LoRAModule`. ``target_modules`` are linear layers.
    """

    dynamic_payload = True  # a change has any rank

    moves_base = True
    """Whether clients train on matrices that have changed, or only the whole model has such."""

    def __init__(
        self,
        backbone: TransformerFactory,
        num_classes: PositiveInt | None = None,
        r: PositiveInt = 8,
        lora_alpha: PositiveFloat | None = None,
        ranks: Sequence[PositiveInt] | None = None,
        scale: Scale = "common",
        **kwargs: Any,
    ) -> None:
        if ranks is not None and min(ranks, default=0) < 1:
            raise FederationError(f"ranks is {list(ranks)}: give at least one, and none below 1; or leave it out, and give r.")
        super().__init__(backbone, num_classes, r=r if ranks is None else max(ranks), lora_alpha=lora_alpha, **kwargs)
        self.ranks = [r] if ranks is None else list(ranks)
        self.matrices = Matrices({}, self.r, lora_alpha, scale)

    def architecture(self, client: ClientInfo | None) -> Hashable:
        """The client's rank; None: the server's model."""
        return client.model_size if client else None

    def rank(self) -> int:
        """The client's rank; the server's is the largest."""
        return self.r if self.client is None or self.client.model_size is None else int(self.client.model_size)

    @property
    def has_changes(self) -> bool:
        """Whether frozen tensors change between broadcasts."""
        return self.moves_base or self.client is None or self.client.model_size is None

    def attach(self) -> None:
        """Add the adapter, and a buffer for the change of each matrix."""
        self.scaling = self.matrices.scaling(self.rank())
        super().attach()
        layers = self.linear_layers(self.has_changes)
        if self.has_changes:
            for layer in layers.values():
                base: Any = layer.get_base_layer()
                register_parametrization(base, "weight", Change(base.weight))
        shapes = {name: (layer.out_features, layer.in_features) for name, layer in layers.items()}
        self.matrices = replace(self.matrices, shapes=shapes)

    def load_payload(self, payload: State) -> None:
        """Load the changes of the frozen matrices; a matrix without one is the pretrained one.

        Raises:
            FederationError: for a change that does not fit.
        """
        like = self.matrices.changes_like(payload, torch.float32) if self.has_changes else {}
        check_fits(payload, like, f"What was sent to {type(self).__name__}")
        for name in self.matrices.shapes if self.has_changes else ():
            layer: Any = self.get_submodule(name)
            buffer = layer.get_base_layer().parametrizations.weight[0].change
            if (change := self.matrices.change(payload, name)) is None:
                buffer.zero_()
            else:
                buffer.copy_(change.T if layer.fan_in_fan_out else change)

    def export_adapter(self, folder: Path, private: bool = True) -> None:
        """Write a peft adapter, see :class:`.LoRAModule`; or, if more than an adapter has changed, the whole network."""
        if self.has_changes:
            self.export_merged(folder, private)
        else:
            super().export_adapter(folder, private)

    def rank_of(self, clients: Sequence[ClientInfo]) -> dict[int, int]:
        """The rank of each client, by its id."""
        return {client.id: self.ranks[client.id % len(self.ranks)] for client in clients}


class ExactServer(Server):
    """Keeps the adapter of the largest rank, the head, and the changes of the frozen matrices.

    Args:
        method: the method, built.
        clients: all clients.
        combine: merges updates.
    """

    def __init__(self, method: ExactLoRA, clients: Sequence[ClientInfo], combine: Combine) -> None:
        super().__init__(method.shared_state(), method.weighting, holds_model=True, combine=combine)
        self.matrices = method.matrices
        self.ranks = method.rank_of(clients)
        self.like = {name: torch.empty_like(tensor, device="meta") for name, tensor in self.state.items()}  # what clients train

    def optimize_with(self, optimizer: ServerOptimizer, parameters: Collection[str], method: str) -> None:
        """Refuse: the merged products fit the factors that were sent, and no others."""
        raise FederationError(
            f"{method} got server_optimizer={type(optimizer).__name__}, but its server merges the products of the factors exactly, "
            "which a step of the factors would not: leave server_optimizer out, or choose another method, such as HOMLoRA."
        )

    def broadcast(self, client: ClientInfo) -> Broadcast:
        """The client's ranks of the adapter, and all changes so far, also for a client that joins late."""
        rank = self.ranks[client.id]
        return Broadcast(self.matrices.of_rank(self.state, rank), rank)

    def expected_payload(self, update: ClientUpdate, sent: Broadcast) -> State:
        """An adapter of the client's rank, and the head."""
        rank = self.ranks[update.client]
        like = dict(self.like)
        for a, b in map(self.matrices.names, self.matrices.shapes):
            like[a], like[b] = like[a][:rank], like[b][:, :rank]
        return like

    def expected_state(self, stored: State) -> State:
        """Changes may have any rank."""
        own, changes = self.state_dict(), self.matrices.change_names()
        dtype = next(iter(self.like.values())).dtype
        return {name: t for name, t in own.items() if name not in changes} | self.matrices.changes_like(stored, dtype)


@dataclass(frozen=True)
class Gathered:
    """A round's updates, all at once.

    Attributes:
        factors: the adapters' factors in the updates.
        weights: of the updates, not normalized.
        mean: of all other tensors.
    """

    factors: list[State]
    weights: list[float]
    mean: State

    @classmethod
    def of(cls, updates: Iterable[tuple[State, float]], matrices: Matrices) -> Self:
        """Separate factors from other tensors."""
        names, factors, weights, mean = matrices.factor_names(), [], [], WeightedMean()
        for update, weight in updates:
            factors.append({name: update[name] for name in names})
            weights.append(weight)
            mean.add({name: tensor for name, tensor in update.items() if name not in names}, weight)
        return cls(factors, weights, mean.result())

    def shares(self) -> list[Tensor]:
        """The weights, of sum 1, in float64."""
        return list(torch.tensor(self.weights, dtype=torch.float64) / sum(self.weights))

    def terms(self, layer: str, matrices: Matrices, shares: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """The received B and A of a matrix, and the scales of their products: the client's share times its s.

        Args:
            layer: name of the matrix.
            matrices: the adapted matrices.
            shares: of each update, a number or one for each of its ranks.
        """
        a, b = matrices.names(layer)
        left, right = [factors[b] for factors in self.factors], [factors[a] for factors in self.factors]
        return left, right, [matrices.scaling(len(a)) * share for a, share in zip(right, shares, strict=True)]
