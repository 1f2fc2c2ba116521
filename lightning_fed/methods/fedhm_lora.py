"""FedHM on adapters (FedLoRA, Section 5 of Yao et al. 2021, https://arxiv.org/abs/2111.14655)."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.nn.functional import pad

from lightning_fed.core import ClientInfo, ClientUpdate, FederationError, Server, State
from lightning_fed.methods.families.adapter_module import default_adam
from lightning_fed.methods.families.lora import LoRAModule, refuse_persistent
from lightning_fed.methods.families.model_sizes import Assignment
from lightning_fed.methods.fedhm import Anchor, Decomposed, FedHMServer
from lightning_fed.models.adapters import COMMON
from lightning_fed.models.transformer import TransformerFactory
from lightning_fed.nn.factorize import Energy, Spectrum, layer_weights, recover, unroll
from lightning_fed.options import NonNegativeInt, PositiveFloat, PositiveInt


class Matrix(NamedTuple):
    """Names of the tensors of an adapted matrix.

    Attributes:
        change: of the full-rank change, on the server.
        first: of A.
        second: of B; or, if several matrices share one A, of their B's, which are stacked.
    """

    change: str
    first: str
    second: tuple[str, ...]


class FedHMLoRA(LoRAModule):
    r"""Clients train LoRA of different ranks on a frozen network's attention, and the server averages the products at full rank.

    A round (Section 5.2):

    1. The server decomposes the change :math:`\Delta W` of each matrix once, and sends client p the best factors of its rank,
       :math:`B = P_r \Sigma_r^{1/2}` and :math:`A = \Sigma_r^{1/2} Q_r^\top`. Ranks that :math:`\Delta W` does not have start as
       in LoRA: A random and the same for all clients, B zero. In the first round these are all ranks.
    2. A participant trains A, B and the head.
    3. The server takes :math:`\Delta W_p = BA` and averages at full rank, :math:`\Delta W = \sum a_p \Delta W_p` with :math:`a =
       \mathrm{softmax}(\gamma / \tau)` over the participants, and the head likewise.

    Averages of products are not products of averages, even with equal ranks. With equal ranks this is the paper's "FedLoRA", with
    different ones the curve "FedHM" of its Figure 8. Monitored: accuracy of the global model, :math:`W_0 + \Delta W` at full rank,
    on the test data of all clients. ``server/energy_rank_…`` is the share :math:`\lVert BA \rVert_F^2 / \lVert \Delta W \rVert_F^2`
    that a rank keeps, over all matrices together, and ``server/energy_tail`` the share that no rank keeps.

    Readings. The paper does not define :math:`\gamma` for adapters. Relative to the width of the network it would make the
    weights nearly equal, 0.246 to 0.256; here it is :math:`r_p / r_{max}`, which for ranks 2, 4, 8 and 16 gives FedHM's weights.
    The authors' script has equal weights. The text adapts four matrices per block; the sizes in Table 5 are those of
    ``fused_qkv``, without the head.

    Args:
        backbone: builds the network, given the number of classes: ``VisionTransformer``. The paper: ViT-Small.
        num_classes: number of classes; None: as many as the data have.
        ranks: of the adapters; client ``k`` has entry ``k mod len(list)``. The paper: 2, 4, 8, 16.
        assignment: ``"fixed"``, or ``"redrawn"``: each round, every client gets one of the ranks at random.
        targets: ``"fused_qkv"``: query, key and value share A and have a B each, as if they were one matrix; output has its own.
            ``"separate"``: each of the four has its own A and B.
        weights: ``"paper"``: :math:`\mathrm{softmax}(\gamma_p / \tau)`; ``"uniform"``: all equal.
        temperature: :math:`\tau`.
        lora_alpha: scaling is ``lora_alpha / max(ranks)`` for every rank; None: 1, as in the authors' code.
        lora_dropout: dropout before the adapter.
        optimizer: optimizer of adapter and head. Default: Adam, lr 2e-3 (Section 6.1). Fresh in each turn, as the factors are.
        steps: optimizer steps per round; None: ``epochs`` epochs, by default one (Section 6.1).
        **kwargs: see :class:`lightning_fed.methods.families.adapter_module.AdapterModule`.
    """

    monitor_model = "global"

    def __init__(
        self,
        backbone: TransformerFactory,
        num_classes: PositiveInt | None = None,
        ranks: Sequence[PositiveInt] = (2, 4, 8, 16),
        assignment: Assignment = "fixed",
        targets: Literal["fused_qkv", "separate"] = "fused_qkv",
        weights: Literal["paper", "uniform"] = "paper",
        temperature: PositiveFloat = 1.0,
        optimizer: OptimizerCallable = default_adam,
        steps: NonNegativeInt | None = None,
        **kwargs: Any,
    ) -> None:
        if min(ranks, default=0) < 1:
            raise FederationError(f"ranks is {list(ranks)}: give at least one, and none below 1.")
        refuse_persistent(type(self).__name__, kwargs)
        super().__init__(
            backbone,
            num_classes,
            r=max(ranks),
            target_modules=None,
            optimizer=optimizer,
            steps=steps,
            persistent=False,
            **kwargs,
        )
        self.model_sizes = ranks
        self.assignment: Assignment = assignment
        self.targets = targets
        self.weights: Literal["paper", "uniform"] = weights
        self.temperature = temperature

    def rank(self) -> int:
        """The client's rank; for the whole model, the rank that holds any change."""
        if self.model_size is not None:
            return int(self.model_size)
        layers = [layer for name, layer in self.backbone.named_modules() if name.rpartition(".")[2] in self.adapted_layers()]
        return max(self.r, *(cast(nn.Linear, layer).in_features for layer in layers))

    def adapted_layers(self) -> list[str]:
        """Query, key, value and output of attention."""
        if self.backbone.projections is None:
            raise FederationError(
                f"{type(self.backbone).__name__} does not say what the projections of its attention are called: FedHMLoRA needs a "
                "network that does, such as VisionTransformer."
            )
        return list(self.backbone.projections)

    def attach(self) -> None:
        """Add the adapter; layers that share their A use that of the first."""
        super().attach()
        for first, *others in self._groups():
            for name in others:
                layer: Any = self.get_submodule(name)
                layer.lora_A[COMMON] = Shared(self.get_submodule(f"{first}.lora_A.{COMMON}"))

    def continued_names(self) -> set[str]:
        """The head: the factors are new in each round."""
        return super().continued_names() - self.adapter(COMMON).keys()

    def _groups(self) -> list[list[str]]:
        """Names of the adapted layers, grouped by the A that they share."""
        query, key, value, output = self.adapted_layers()
        together = [[query, key, value], [output]] if self.targets == "fused_qkv" else [[query], [key], [value], [output]]
        blocks = [name.removesuffix(query) for name, _ in self.named_modules() if name.rpartition(".")[2] == query]
        return [[f"{block}{layer}" for layer in layers] for block in blocks for layers in together]

    @property
    def server_class(self) -> type["FedHMLoRAServer"]:
        """Class of the server that merges the updates."""
        return FedHMLoRAServer

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        """A server that multiplies the factors and averages the products."""
        matrices = [
            Matrix(f"{group[0]}.change", f"{group[0]}.lora_A.{COMMON}.weight", tuple(f"{n}.lora_B.{COMMON}.weight" for n in group))
            for group in self._groups()
        ]
        return self.server_class(self.shared_state(), clients, self, matrices)


class Shared(nn.Module):
    """A layer that belongs to another module: it computes the same and has no parameters of its own.

    Args:
        layer: a layer with a weight.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._layer = [layer]  # in a list, where nn.Module does not see it

    @property
    def weight(self) -> Tensor:
        return cast(Tensor, self._layer[0].weight)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self._layer[0](x))


class FedHMLoRAServer(FedHMServer):
    r"""Keeps the change :math:`\Delta W` of each matrix at full rank, the head, and the rows of A with which new ranks start.

    Args:
        state: an adapter that can hold any change, and the head, before the first round.
        clients: all clients.
        method: gives the clients' ranks; see :class:`.SizedServer`.
        matrices: the adapted matrices.
    """

    anchor: Anchor = "never"

    def __init__(self, state: State, clients: Sequence[ClientInfo], method: FedHMLoRA, matrices: Sequence[Matrix]) -> None:
        self.matrices = matrices
        self.ranks = sorted(set(method.model_sizes))
        self.rows = {name: len(state[name]) for matrix in matrices for name in (matrix.first, *matrix.second)}
        whole = self.recovered(state)
        for change, first, _ in matrices:
            whole |= {change: whole[change].to(state[first].dtype), first: state[first][: self.ranks[-1]].clone()}
        super().__init__(whole, clients, method)

    def log_weight(self, size: float | None) -> float:
        """Logarithm of a weight, which depends on the rank relative to the largest."""
        return super().log_weight(None if size is None else size / self.ranks[-1])

    def factor_names(self) -> tuple[set[str], set[str]]:
        """Names of A and of B of all matrices."""
        return {matrix.first for matrix in self.matrices}, {name for matrix in self.matrices for name in matrix.second}

    def recovered(self, payload: State) -> State:
        """The products of a payload's factors, in float64, and its head."""
        changes = {
            matrix.change: recover(payload[matrix.first].double(), torch.cat([payload[name] for name in matrix.second]).double())
            for matrix in self.matrices
        }
        return changes | {name: tensor for name, tensor in payload.items() if name not in self.rows}

    def embed(self, update: ClientUpdate) -> State:
        """Multiply the factors."""
        return self.recovered(update.state)

    def version(self, size: float | None) -> State:
        """The factors of a rank and the head; for the whole model, the change times the identity."""
        if size is not None:
            return super().version(size)
        version = self._head()
        for matrix in self.matrices:
            change, rank = self.state[matrix.change], self.rows[matrix.first]
            width = change.shape[1]
            version |= self._payload(matrix, torch.eye(rank, width, dtype=change.dtype), pad(change, (0, rank - width)))
        return version

    def decompose(self) -> Decomposed:
        """Every rank's version, from one decomposition per matrix."""
        versions: dict[float, State] = {rank: self._head() for rank in self.ranks}
        energy = Energy()
        for matrix in self.matrices:
            change = self.state[matrix.change]
            spectrum = Spectrum.of(unroll(change))
            energy.add(spectrum, {rank: rank for rank in self.ranks})
            for rank in self.ranks:
                first = self.state[matrix.first][:rank].clone()
                second = change.new_zeros(len(change), rank)
                if known := min(rank, spectrum.rank(change.dtype)):  # the rest keep a random A: two zero factors have no gradient
                    first[:known], second[:, :known] = layer_weights(*spectrum.factors(known), change.shape)
                versions[rank] |= self._payload(matrix, first, second)
        return Decomposed(versions, energy)

    def _head(self) -> State:
        others = {name for matrix in self.matrices for name in (matrix.change, matrix.first)}
        return {name: tensor for name, tensor in self.state.items() if name not in others}

    def _payload(self, matrix: Matrix, first: Tensor, second: Tensor) -> State:
        parts = second.split([self.rows[name] for name in matrix.second])
        return {matrix.first: first, **dict(zip(matrix.second, parts, strict=True))}
