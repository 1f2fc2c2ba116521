"""FedHM (Yao et al. 2021, https://arxiv.org/abs/2111.14655)."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn

from lightning_fed.core import ClientInfo, ClientUpdate, FederationError, Phase, Server, State
from lightning_fed.methods.families.model_sizes import Assignment, Contribution, SizedModule, SizedServer
from lightning_fed.models import BackboneFactory
from lightning_fed.models.factory import name_of
from lightning_fed.nn.factorize import (
    Energy,
    Factorized,
    Spectrum,
    factorize,
    frobenius_decay,
    layer_weights,
    rank_of,
    recover,
    require_own_tensors,
    require_plain_weight,
    unroll,
)
from lightning_fed.options import NonNegativeFloat, PositiveFloat, PositiveInt

Weights = Literal["paper", "uniform", "official"]
Anchor = Literal["never", "missing_largest", "always"]


class FedHM(SizedModule):
    r"""Clients train low-rank versions of the server's full-rank model.

    A round (Section 3, eq. 2):

    1. The server factorizes its model once per rank ratio :math:`\gamma`: truncated SVD turns each of the layers into two of
       rank :math:`\mathrm{round}(\gamma n)`, where :math:`n` is the number of output channels or a linear layer's smaller side.
    2. A participant trains the version of its ratio. Instead of weight decay, the two layers :math:`U, V` of a factorized one get
       Frobenius decay :math:`\frac{\lambda}{2} \lVert UV^\top \rVert_F^2`.
    3. The server multiplies the factors back and averages with weights :math:`\mathrm{softmax}(\gamma_p / \tau)` over the
       participants, regardless of their numbers of examples.

    Batch norm is static and the loss masked: see :class:`lightning_fed.methods.families.model_sizes.SizedModule`.

    Readings. The paper's text has a learning rate of 0.1, its Table 3 has 0.01, which is merely a default in the authors' code;
    their CIFAR scripts pass 0.1, momentum 0.9 and weight decay 1e-4, and so do the configurations here. "γ = {1, 2, 4, 8}" in the
    experiments means 1/γ; the formulas take :math:`\gamma \in \{1, 1/2, 1/4, 1/8\}`. The choice of factorized layers follows from
    the sizes in Table 2, which ``ResNet18`` and ``ResNet34`` reproduce; the paper's ρ counts the stem for one network only.

    A round without any learning still changes the model: it multiplies the j-th singular value of a layer by the weight of the
    participants whose rank is at least j. Without a full-size participant it erases everything beyond the largest rank.
    ``anchor`` is the authors' remedy; :class:`.FedHMDelta` averages changes instead. Two metrics show the erosion:
    ``server/energy_rank_<ratio>``, the share of the squared norm of all factorized layers that the version of a ratio keeps, and
    ``server/energy_tail``, the share beyond the largest of these versions, which only full-size clients have.

    Args:
        backbone: the server's model.
        num_classes: number of classes; None: as many as the data have.
        ratios: :math:`\gamma`, in (0, 1]; client ``k`` has entry ``k mod len(list)``. The paper: 1, 1/2, 1/4, 1/8 in equal shares.
        assignment: ``"fixed"``, or ``"redrawn"``: each round, every client gets one of the ratios at random, as with the authors'
            flag "dynamic".
        layers: names of the layers to factorize; None: the trainable ones among the backbone's ``factorizable``.
        weights: ``"paper"``: :math:`\mathrm{softmax}(\gamma_p / \tau)`. ``"uniform"``: all equal, as in the authors' code without
            "dynamic". ``"official"``: :math:`\mathrm{softmax}(-\gamma_p^{-1} / \tau)`, far steeper, as in that with "dynamic".
        temperature: :math:`\tau`.
        anchor: whether the server's previous model takes part as one more full-size client. ``"never"``: as in the paper.
            ``"missing_largest"``: in rounds to which no client of the largest of ``ratios`` contributes, as in the authors' code.
            ``"always"``: in every round.
        decay: :math:`\lambda`, the weight decay of the products. None: the optimizer's weight decay, as in the paper.
        masked: whether to mask absent classes.
        **kwargs: see :class:`.SizedModule`. The paper: 10 ``epochs`` per round. The weight decay of ``optimizer``, 5e-4 in the
            paper and 1e-4 in its scripts, acts on everything that is not factorized.
    """

    changes_in_each_round = "layers are factorized anew"

    def __init__(
        self,
        backbone: BackboneFactory,
        num_classes: PositiveInt | None = None,
        ratios: Sequence[PositiveFloat] = (1.0, 0.5, 0.25, 0.125),
        assignment: Assignment = "fixed",
        layers: list[str] | None = None,
        weights: Weights = "paper",
        temperature: PositiveFloat = 1.0,
        anchor: Anchor = "never",
        decay: NonNegativeFloat | None = None,
        masked: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, ratios, num_classes, assignment, masked, **kwargs)
        if any(not 0 < ratio <= 1 for ratio in ratios):
            raise FederationError(f"ratios is {list(ratios)}: give rank ratios in (0, 1], that is 0.125 where the paper says 8.")
        self.layers = layers
        self.weights: Weights = weights
        self.temperature = temperature
        self.anchor: Anchor = anchor
        self.decay = decay

    def build(self) -> None:
        """Build the network, factorized at the client's ratio; its values come from the server."""
        super().build()
        if self.model_size is not None:
            factorize(self.backbone, self.low_rank_layers(), self.model_size, spectral=False)

    def low_rank_layers(self) -> list[str]:
        """Names of the layers to factorize, within the backbone."""
        layers = self.backbone.factorizable if self.layers is None else self.layers
        if not layers:
            names = [name for name, layer in self.backbone.named_modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
            raise FederationError(
                f"{name_of(self.backbone)} does not say which of its layers can be factorized: name them in layers, such as "
                f"{', '.join(names[len(names) // 2 :][:2])}."  # from the middle of the network
            )
        known = dict(self.backbone.named_modules())
        if missing := [name for name in layers if name not in known]:
            raise FederationError(
                f"layers names {missing[0]!r}, but {type(self.backbone).__name__} has no such layer: take names from "
                f"named_modules(), such as {', '.join(list(known)[1:4])}."
            )
        if other := [name for name in layers if not isinstance(known[name], nn.Conv2d | nn.Linear)]:
            raise FederationError(
                f"layers names {other[0]!r}, a {type(known[other[0]]).__name__}: only Conv2d and Linear layers can be factorized."
            )
        frozen = [name for name in layers if not all(p.requires_grad for p in known[name].parameters())]
        if frozen and self.layers is not None:
            raise FederationError(
                f"layers names {frozen[0]!r}, which is frozen, and so does not travel: leave it out, or let it learn."
            )
        learning = [name for name in layers if name not in frozen]
        for name in learning:
            require_plain_weight(self.backbone, known[name], "factorize")
        require_own_tensors(self.backbone, learning, "factorize")
        return learning

    def continued_names(self) -> set[str]:
        """Without the factors, which are new in each round."""
        factors = {id(p) for p in self.factors()}
        return super().continued_names() - {name for name, p in self.named_parameters() if id(p) in factors}

    def factors(self) -> list[Tensor]:
        """The factors of all layers."""
        return [p for layer in self.modules() if isinstance(layer, Factorized) for p in layer.weights]

    def phases(self) -> list[Phase]:
        """One phase for all parameters; the factors get Frobenius decay, the phase's penalty, instead of weight decay."""
        weight = weight_decay_of(self.optimizer) if self.decay is None else self.decay
        decay = partial(frobenius_decay, self.backbone, weight) if weight else None
        optimizer = partial(self._optimize, self.factors())
        return [self.local_phase("local", list(self.parameters()), self.client_loss, optimizer=optimizer, penalty=decay)]

    def _optimize(self, factors: list[Tensor], parameters: Sequence[nn.Parameter]) -> Any:
        mine = {id(p) for p in factors}
        rest = [p for p in parameters if id(p) not in mine]
        return self.optimizer([{"params": rest}, {"params": factors, "weight_decay": 0.0}] if factors else rest)

    @property
    def server_class(self) -> type["FedHMServer"]:
        """Class of the server that merges the updates."""
        return FedHMServer

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        """A server that multiplies the factors back and averages at full rank."""
        layers = self.low_rank_layers()
        for ratio in filter(None, self.model_sizes):
            for name in layers:
                rank_of(cast(Tensor, self.backbone.get_submodule(name).weight), ratio, name)  # refuses an impossible rank
        factorized = [f"backbone.{name}" for name in layers]
        return self.server_class(self.shared_state(), clients, self, self.head_names(), factorized)


def weight_decay_of(optimizer: OptimizerCallable) -> float:
    """Weight decay of the optimizers that this callable makes; 0 if they have none."""
    return float(optimizer([nn.Parameter(torch.empty(0))]).defaults.get("weight_decay", 0.0))


def exponent(ratio: float, rule: Weights, temperature: float) -> float:
    r"""Argument of the weights' softmax for an update of a rank ratio; see :class:`FedHM`."""
    return {"paper": ratio, "uniform": 0.0, "official": -1 / ratio}[rule] / temperature


class Decomposed(NamedTuple):
    """The factorized versions of a model.

    Attributes:
        versions: the payloads, by size.
        energy: the share of the factorized layers that each size keeps.
    """

    versions: dict[float, State]
    energy: Energy


class FedHMServer(SizedServer):
    """Sends truncated factors, multiplies them back and averages at full rank.

    Args:
        state, clients, method, heads: see :class:`.SizedServer`; sizes are rank ratios.
        layers: names of the factorized layers.
    """

    version_name = "rank"

    def __init__(
        self, state: State, clients: Sequence[ClientInfo], method: Any, heads: Collection[str] = (), layers: Sequence[str] = ()
    ) -> None:
        super().__init__(state, clients, method, heads)
        self.layers = layers
        self._source: State | None = None
        self._decomposed = Decomposed({}, Energy())

    def version(self, size: float | None) -> State:
        """The model with factorized layers; the same tensors until the model changes."""
        return self.state if size is None else self.decomposed.versions[size]

    @property
    def decomposed(self) -> Decomposed:
        """The current model, decomposed once."""
        if self._source is not self.state:
            self._source, self._decomposed = self.state, self.decompose()
        return self._decomposed

    def decompose(self) -> Decomposed:
        """Every ratio's version, from one decomposition per layer."""
        ratios = {size for size in self.model_sizes if size is not None}
        kept = {name: t for name, t in self.state.items() if name.rpartition(".")[0] not in self.layers}
        versions, energy = {ratio: dict(kept) for ratio in ratios}, Energy()
        for layer in self.layers if ratios else ():
            weight = self.state[f"{layer}.weight"]
            spectrum = Spectrum.of(unroll(weight))
            ranks = {ratio: rank_of(weight, ratio, layer) for ratio in ratios}
            energy.add(spectrum, ranks)
            for ratio, version in versions.items():
                factors = spectrum.factors(ranks[ratio])
                for which, part in enumerate(layer_weights(*factors, weight.shape)):
                    version[f"{layer}.{which}.weight"] = part.to(weight.dtype).contiguous()
                if (bias := self.state.get(f"{layer}.bias")) is not None:
                    version[f"{layer}.1.bias"] = bias
        return Decomposed(versions, energy)

    def factor_names(self) -> tuple[set[str], set[str]]:
        """Names of the first and of the second factors in a payload."""
        first, second = ({f"{layer}.{which}.weight" for layer in self.layers} for which in (0, 1))
        return first, second

    def embed(self, update: ClientUpdate) -> State:
        """Multiply the factors back."""
        state = update.state
        if self.model_size[update.client] is None:
            return state
        whole = {name: tensor for name, tensor in state.items() if name in self.state}
        for layer in self.layers:
            whole[f"{layer}.weight"] = recover(state[f"{layer}.0.weight"], state[f"{layer}.1.weight"])
            if f"{layer}.1.bias" in state:
                whole[f"{layer}.bias"] = state[f"{layer}.1.bias"]
        return whole

    def log_weight(self, size: float | None) -> float:
        """Logarithm of a weight, which depends on the rank ratio."""
        return exponent(1.0 if size is None else size, self.method.weights, self.method.temperature)

    @property
    def anchor(self) -> Anchor:
        """Whether the previous model takes part; see :class:`FedHM`."""
        return self.method.anchor

    def contributions(self, updates: Iterable[ClientUpdate]) -> Iterator[Contribution]:
        """The updates and, depending on ``anchor``, the previous model: always, or if no update of the largest size arrived."""
        sizes: set[float | None] = set()
        for contribution in super().contributions(updates):
            sizes.add(contribution.model_size)
            yield contribution
        largest = None if None in self.model_sizes else max(filter(None, self.model_sizes))
        if sizes and (self.anchor == "always" or (self.anchor == "missing_largest" and largest not in sizes)):
            yield Contribution(self.unchanged(), None)

    def unchanged(self) -> State:
        """Contribution of a full-size client that learned nothing."""
        return self.state

    def aggregate(self, updates: Iterable[ClientUpdate]) -> dict[str, float]:
        """Merge a round's updates; returns :meth:`energies`. See :meth:`Server.aggregate`."""
        return super().aggregate(updates) | self.energies()

    def energies(self) -> dict[str, float]:
        """``server/energy_rank_<size>``: the share of the squared norm of all factorized layers that a size keeps.
        ``server/energy_tail``: the share beyond the largest of these sizes. Empty if all clients have the whole model.
        """
        if all(size is None for size in self.model_sizes) or not all(torch.isfinite(t).all() for t in self.state.values()):
            return {}  # a model that is not finite cannot be decomposed; the run refuses it next
        shares = self.decomposed.energy.shares()
        kept = {f"server/energy_{self.version_name}_{size:g}": shares[size] for size in sorted(shares, reverse=True)}
        return kept | {"server/energy_tail": 1 - shares[max(shares)]}
