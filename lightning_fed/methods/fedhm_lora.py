"""FedHM on adapters (FedLoRA, Section 5 of Yao et al. 2021, https://arxiv.org/abs/2111.14655)."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from jsonargparse.typing import PositiveFloat
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.nn.functional import pad

from lightning_fed.core import ClientInfo, ClientUpdate, FederationError, Server, State
from lightning_fed.methods.families.adapter_module import default_adam
from lightning_fed.methods.families.lora import COMMON, LoRAModule
from lightning_fed.methods.families.model_sizes import Assignment
from lightning_fed.methods.fedhm import Decomposed, FedHMServer, exponent
from lightning_fed.models.transformer import TransformerFactory
from lightning_fed.nn.factorize import Energy, Spectrum, layer_weights, recover, unroll
from lightning_fed.options import NonNegativeInt, PositiveInt


class Matrix(NamedTuple):
    """What the tensors of an adapted matrix are called.

    Attributes:
        change: what is added to the matrix, on the server.
        first: A.
        second: B; or, of several matrices that have one A, their B's, which are stacked.
    """

    change: str
    first: str
    second: tuple[str, ...]


class FedHMLoRA(LoRAModule):
    r"""Clients train adapters of different ranks on the attention of a frozen network; the server averages what they add to it.

    A round (Section 5.2):

    1. The server decomposes the change :math:`\Delta W` of each matrix once, and sends client p the best factors of its rank,
       :math:`B = P_r \Sigma_r^{1/2}` and :math:`A = \Sigma_r^{1/2} Q_r^\top`. Ranks that :math:`\Delta W` does not have start as
       LoRA's: A random and the same for everybody, B zero. In the first round these are all.
    2. A participant trains A, B and the head.
    3. The server takes :math:`\Delta W_p = BA` and averages at full rank, :math:`\Delta W = \sum a_p \Delta W_p` with :math:`a =
       \mathrm{softmax}(\gamma / \tau)` over the participants; so it does the head.

    Averages of products are not products of averages, even of equal ranks: with equal ranks this is the paper's "FedLoRA", with
    different ones the curve "FedHM" of its Figure 8. Monitored: accuracy of the global model, :math:`W_0 + \Delta W` at full rank,
    on everybody's test data. ``server/energy_rank_…`` is the part :math:`\lVert BA \rVert_F^2 / \lVert \Delta W \rVert_F^2` that a
    rank keeps, over all matrices together, and ``server/energy_tail`` the part that no rank keeps.

    Readings. The paper does not define :math:`\gamma` for adapters. Relative to the width of the network it would make the
    weights nearly equal, 0.246 to 0.256; here it is :math:`r_p / r_{max}`, which for ranks 2, 4, 8 and 16 gives FedHM's weights.
    The authors' script has equal weights. The text adapts four matrices per block, the sizes in its Table 5 are those of
    ``fused_qkv``, without head.

    Args:
        backbone: builds the network, given the number of classes: ``VisionTransformer``. The paper: ViT-Small.
        num_classes: number of classes; None: as many as the data have.
        ranks: of the adapters; client ``k`` has entry ``k mod len(list)``. The paper: 2, 4, 8, 16.
        assignment: ``"fixed"``, or ``"redrawn"``: each round, every client gets one of the ranks at random.
        targets: ``"fused_qkv"``: query, key and value have one A and a B each, as if they were one matrix; output has its own.
            ``"separate"``: each of the four has its own A and B.
        weights: ``"paper"``: :math:`\mathrm{softmax}(\gamma_p / \tau)`; ``"uniform"``: all the same.
        temperature: :math:`\tau`.
        lora_alpha: scaling is ``lora_alpha / max(ranks)`` for every rank; None: 1, as in the authors' code.
        lora_dropout: dropout before the adapter.
        optimizer: of adapter and head. Default: Adam, lr 2e-3 (Section 6.1). It starts afresh in each turn: the factors do, too.
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
        self.ranks = ranks
        self.assignment: Assignment = assignment
        self.targets = targets
        self.weights: Literal["paper", "uniform"] = weights
        self.temperature = temperature

    def architecture(self, client: ClientInfo | None) -> Hashable:
        """The client's rank."""
        return client.model_size if client else None

    def rank(self) -> int:
        """The client's rank; that of the whole model holds any change."""
        if self.client is not None and self.client.model_size is not None:
            return int(self.client.model_size)
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
        """The adapter; layers that share their A use that of the first."""
        super().attach()
        for first, *others in self._groups():
            for name in others:
                layer: Any = self.get_submodule(name)
                layer.lora_A[COMMON] = Shared(self.get_submodule(f"{first}.lora_A.{COMMON}"))

    def _groups(self) -> list[list[str]]:
        """Names of the adapted layers, those that share their A together."""
        query, key, value, output = self.adapted_layers()
        together = [[query, key, value], [output]] if self.targets == "fused_qkv" else [[query], [key], [value], [output]]
        blocks = [name.removesuffix(query) for name, _ in self.named_modules() if name.rpartition(".")[2] == query]
        return [[f"{block}{layer}" for layer in layers] for block in blocks for layers in together]

    @property
    def server_class(self) -> type["FedHMLoRAServer"]:
        """What merges the updates."""
        return FedHMLoRAServer

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        """Multiplies the factors and averages the products."""
        matrices = [
            Matrix(f"{group[0]}.change", f"{group[0]}.lora_A.{COMMON}.weight", tuple(f"{n}.lora_B.{COMMON}.weight" for n in group))
            for group in self._groups()
        ]

        def weigh(rank: float) -> float:
            return exponent(rank / max(self.ranks), self.weights, self.temperature)

        return self.server_class(self.shared_state(), clients, self.ranks, self.assignment, matrices, weigh)


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
        """The layer's."""
        return cast(Tensor, self._layer[0].weight)

    def forward(self, x: Tensor) -> Tensor:
        """What the layer makes of it."""
        return cast(Tensor, self._layer[0](x))


class FedHMLoRAServer(FedHMServer):
    r"""Keeps the change :math:`\Delta W` of each matrix at full rank, the head, and the rows with which new ranks start.

    Args:
        state: an adapter that can hold any change, and the head, as they are before the first round.
        clients: all clients.
        ranks: their ranks; client ``k`` has entry ``k mod len(list)``.
        assignment: whether that is for good or drawn anew each round.
        matrices: what is adapted.
        exponent: what the softmax of the weights is taken of, for a rank.
    """

    def __init__(
        self,
        state: State,
        clients: Sequence[ClientInfo],
        ranks: Sequence[int],
        assignment: Assignment,
        matrices: Sequence[Matrix],
        exponent: Callable[[float], float],
    ) -> None:
        self.matrices = matrices
        self.ranks = sorted(set(ranks))
        self.rows = {name: len(state[name]) for matrix in matrices for name in (matrix.first, *matrix.second)}
        whole = self.recovered(state)
        for change, first, _ in matrices:
            whole |= {change: whole[change].to(state[first].dtype), first: state[first][: max(ranks)].clone()}
        super().__init__(whole, clients, ranks, assignment, (), layers=[], exponent=exponent, anchor="never")

    def factor_names(self) -> tuple[set[str], set[str]]:
        """A and B of all matrices."""
        return {matrix.first for matrix in self.matrices}, {name for matrix in self.matrices for name in matrix.second}

    def recovered(self, payload: State) -> State:
        """The changes, in float64, that the factors of a payload make; the head as it is."""
        changes = {
            matrix.change: recover(payload[matrix.first].double(), torch.cat([payload[name] for name in matrix.second]).double())
            for matrix in self.matrices
        }
        return changes | {name: tensor for name, tensor in payload.items() if name not in self.rows}

    def embed(self, update: ClientUpdate) -> State:
        """The products."""
        return self.recovered(update.state)

    def version(self, size: float | None) -> State:
        """The factors of a rank and the head; for the whole, the change times the identity."""
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
                if known := min(rank, spectrum.rank(change.dtype)):  # the others would have no gradients if both sides were zero
                    first[:known], second[:, :known] = layer_weights(*spectrum.factors(known), change.shape)
                versions[rank] |= self._payload(matrix, first, second)
        return Decomposed(versions, energy)

    def _head(self) -> State:
        others = {name for matrix in self.matrices for name in (matrix.change, matrix.first)}
        return {name: tensor for name, tensor in self.state.items() if name not in others}

    def _payload(self, matrix: Matrix, first: Tensor, second: Tensor) -> State:
        parts = second.split([self.rows[name] for name in matrix.second])
        return {matrix.first: first, **dict(zip(matrix.second, parts, strict=True))}
