"""FlexLoRA (Bai, Chen, Qian, Yao & Li, NeurIPS 2024, https://arxiv.org/abs/2402.11505)."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fed.core import Broadcast, ClientInfo, ClientUpdate, Server, State
from lightning_fed.methods.families.exact_lora import ExactLoRA, ExactServer, Gathered, Matrices
from lightning_fed.methods.families.lora import refuse_persistent
from lightning_fed.models.transformer import TransformerFactory
from lightning_fed.nn.factorize import Energy
from lightning_fed.nn.low_rank_sums import product_spectrum, stacked
from lightning_fed.options import PositiveInt

Partition = Literal["none", "keep", "drop"]


class FlexLoRA(ExactLoRA):
    r"""The server averages the products of LoRA adapters of different ranks, and sends each client the best factors of its rank.

    The server's change of a matrix is :math:`\Delta W = \sum_k p_k s_k B_k A_k`. With :math:`\Delta W = U \Sigma V^\top` a client
    of rank :math:`r_k` gets :math:`B = U_{r_k} \Sigma_{r_k} / s_k` and :math:`A = V_{r_k}^\top`, trains them and sends them back.
    Ranks that :math:`\Delta W` does not have start as in LoRA: A random and the same for all clients, B zero; in the first round
    these are all ranks. The frozen matrices never move, and moments start anew with the factors. The server decomposes the stacked
    factors, by QR: no matrix of the network's size is formed.

    Everything beyond the ranks of the participants is lost, as they count as if they had zeros there. ``partition`` is raFLoRA's
    remedy (Wu, Hu, Min & Wang 2026, https://arxiv.org/abs/2602.13486): the ranks between one of the clients' ranks and the next are
    averaged over the clients that have them, :math:`p_k = n_k / \sum_{j: r_j \ge i} n_j` for rank i.

    Monitored: accuracy of the global model :math:`W_0 + \Delta W`, without truncation, on the test data of all clients.
    ``server/energy_rank_…`` is the share :math:`\lVert B A \rVert_F^2 / \lVert \Delta W \rVert_F^2` that a rank keeps, over all
    matrices together. Updates are weighted by training examples.

    Args:
        backbone: builds the network, given the number of classes.
        num_classes: number of classes; None: as many as the data have.
        partition: ``none``: FlexLoRA. raFLoRA: the part beyond the ranks of all participants of a round keeps the server's values
            (``keep``), or is lost (``drop``), which its abstract leaves open.
        **kwargs: see :class:`.ExactLoRA`.
    """

    weighting: Literal["examples", "uniform"] = "examples"
    monitor_model = "global"
    moves_base = False

    def __init__(
        self, backbone: TransformerFactory, num_classes: PositiveInt | None = None, partition: Partition = "none", **kwargs: Any
    ) -> None:
        refuse_persistent(type(self).__name__, kwargs)
        super().__init__(backbone, num_classes, persistent=False, **kwargs)
        self.partition: Partition = partition

    def continued_names(self) -> set[str]:
        """The head: the factors are new in each round."""
        return super().continued_names() - self.matrices.factor_names()

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        """A server that averages products and decomposes their mean."""
        return FlexLoRAServer(self, clients)


class FlexLoRAServer(ExactServer):
    """Keeps the mean of the products as stacked factors, its best factors of the largest rank, and the head.

    Args:
        method: the method, built.
        clients: all clients.
    """

    def __init__(self, method: FlexLoRA, clients: Sequence[ClientInfo]) -> None:
        ranks = set(method.rank_of(clients).values())
        self.decompose = Decompose(method.matrices, ranks, method.shared_state(), method.partition)
        super().__init__(method, clients, self.decompose)

    def broadcast(self, client: ClientInfo) -> Broadcast:
        """The best factors of the client's rank: ranks beyond it do not travel."""
        sent = super().broadcast(client)
        changes = self.matrices.change_names()
        return Broadcast({name: tensor for name, tensor in sent.state.items() if name not in changes}, sent.model_size)

    def global_models(self) -> dict[str, Broadcast]:
        """``global``, the whole mean: the change of the matrices, with an adapter that adds nothing."""
        nothing = {b: torch.zeros_like(self.state[b]) for _, b in map(self.matrices.names, self.matrices.shapes)}
        return {"global": Broadcast(self.state | nothing)}

    def aggregate(self, updates: Iterable[ClientUpdate]) -> dict[str, float]:
        """Merge a round's updates; returns ``server/energy_rank_…``."""
        super().aggregate(updates)
        return {f"server/energy_rank_{rank:g}": share for rank, share in self.decompose.energy.shares().items()}


class Decompose:
    """A ``combine``: the mean of the products as stacks, and its best factors of the largest rank; all else is averaged.

    Args:
        matrices: the adapted matrices.
        ranks: the clients' ranks.
        start: the adapter of the largest rank before the first round; its A is used for ranks without a singular value.
        partition: see :class:`FlexLoRA`.
    """

    def __init__(self, matrices: Matrices, ranks: Iterable[int], start: State, partition: Partition) -> None:
        self.matrices = matrices
        self.ranks = sorted(ranks)
        self.start = start
        self.partition: Partition = partition
        self.energy = Energy()
        """What the ranks keep of the round's mean; empty without one."""

    def __call__(self, updates: Iterable[tuple[State, float]], state: State) -> State:
        """The new state; empty without updates."""
        came, self.energy = Gathered.of(updates, self.matrices), Energy()
        if not came.factors:
            return {}
        merged = dict(came.mean)
        for layer in self.matrices.shapes:
            a, b = self.matrices.names(layer)
            present = [len(factors[a]) for factors in came.factors]
            shares = came.shares() if self.partition == "none" else partitioned(came.weights, present)
            left, right, scales = came.terms(layer, self.matrices, shares)
            scaling, most = self.matrices.scaling(self.matrices.rank), max(present)
            if self.partition == "keep":
                left, right, scales = [*left, state[b][:, most:]], [*right, state[a][most:]], [*scales, torch.tensor(scaling)]
            mean = stacked(left, right, scales)
            spectrum = product_spectrum(*mean, self.matrices.rank)
            self.energy.add(spectrum, {rank: rank for rank in self.ranks})
            known = min(self.matrices.rank, spectrum.rank(torch.float64))
            first, second = self.start[a].clone(), torch.zeros_like(self.start[b])
            first[:known] = spectrum.right[:, :known].T
            second[:, :known] = spectrum.left[:, :known] * spectrum.values[:known] / scaling
            merged |= {a: first, b: second} | self.matrices.added({}, layer, *mean)
        return merged


def partitioned(weights: Sequence[float], ranks: Sequence[int]) -> list[Tensor]:
    r"""Weights of raFLoRA: :math:`n_k / \sum_{j: r_j \ge i} n_j` for rank i of client k, in float64.

    Args:
        weights: n.
        ranks: r.

    >>> [share.tolist() for share in partitioned([1, 3], [1, 2])]
    [[0.25], [0.75, 1.0]]
    """
    counts = torch.tensor(weights, dtype=torch.float64)
    have = torch.arange(max(ranks)) < torch.tensor(ranks)[:, None]
    totals = (counts[:, None] * have).sum(dim=0)
    return [count / totals[:rank] for count, rank in zip(counts, ranks, strict=True)]
