"""FedDecomp (Wu et al., ACM MM 2024, https://arxiv.org/abs/2406.19931; submitted to ICLR 2024 as "FedLoRA")."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from lightning.pytorch.cli import OptimizerCallable
from torch import nn
from torch.nn.utils import parametrize

from lightning_fed.core import (
    ClientInfo,
    ClientUpdate,
    FederatedModule,
    FederationError,
    Phase,
    Server,
    ServerUpdate,
    State,
    default_optimizer,
    noted,
    weighted_mean,
)
from lightning_fed.errors import refuse_given
from lightning_fed.models import Backbones
from lightning_fed.models.factory import name_of
from lightning_fed.nn.joint_optimizer import jointly
from lightning_fed.nn.low_rank import Variant, decompose, factors
from lightning_fed.options import Fraction, NonNegativeInt, PositiveInt


class FedDecomp(FederatedModule):
    r"""Every weight is :math:`\sigma + \tau_i`, a shared full-rank part plus a private low-rank part, trained alternately.

    Convolutional, linear and attention weights of any network are decomposed (see :func:`lightning_fed.nn.decompose`); biases,
    norms and embeddings belong to :math:`\sigma`. A frozen weight has no :math:`\tau_i`, a tied one a single one, which all its
    layers share. A round of a client (Algorithm 1):

    1. Load the server's :math:`\sigma`.
    2. Train :math:`\tau_i` for ``lora_epochs`` epochs with :math:`\sigma` frozen: it absorbs the client-specific knowledge.
    3. Train :math:`\sigma` for ``global_epochs`` epochs with :math:`\tau_i` frozen.
    4. Send :math:`\sigma`; the server averages with equal weights (eq. 8).

    It saves no traffic: :math:`\sigma` has the size of the network, and :math:`\tau` is not small either (a square convolution
    saves parameters only below a ratio of 1/2). Batch-norm statistics are shared, averaged, and follow the data in both phases,
    as in the authors' code. Monitored: accuracy after aggregation, :math:`\bar\sigma + \tau_i`. The paper reports the best round
    on test data; here the last round is reported and, if validation data are held out, the round chosen on them.

    Args:
        backbone: the network of every client.
        num_classes: number of classes; None: as many as the data have.
        rank_ratio_conv: :math:`R_c`. Table 2: 0.6 for CIFAR-10, 0.8 for CIFAR-100 and Tiny-ImageNet.
        rank_ratio_linear: :math:`R_l`. Table 2: 0.6 for CIFAR-10, 0.4 for CIFAR-100 and Tiny-ImageNet.
        lora_epochs: epochs on :math:`\tau`. The authors' code: 2; 0 is exactly FedAvg with equal weights.
        global_epochs: epochs on :math:`\sigma`. The paper trains 5 epochs in all; 0 is local training of :math:`\tau`.
        layers: names of the layers to decompose, see :func:`lightning_fed.nn.decompose`; None: all. The paper's language
            experiments (Appendix E): attention and classifier, ``["*.self_attn", "head"]`` for ``TextTransformer``.
        alternating: false trains both parts together for the sum of the epochs (Table 3).
        variant: ``"paper"`` or ``"official"``, which differ in rank, scale, initialization and reshape; see
            :class:`lightning_fed.nn.LowRankDelta`.
        absentees: how clients that are not sampled enter the average: ``"left_out"``, or ``"stale"``, with the previous
            :math:`\bar\sigma`, as in the authors' code.
        optimizer: optimizer of both phases, an own one in each. The paper: SGD, lr 0.1; the authors' code adds momentum 0.9.
        lora_optimizer: optimizer of :math:`\tau`. Default: the same as ``optimizer``.
        track_drift: log the clients' mean distance from the average (eq. 9), which keeps a round's updates in memory.
        **kwargs: see :class:`.FederatedModule`.
    """

    refuses_adapters = "it decomposes the network's own weights"

    weighting = "uniform"

    def __init__(
        self,
        backbone: Backbones,
        num_classes: PositiveInt | None = None,
        rank_ratio_conv: Fraction = 0.6,
        rank_ratio_linear: Fraction = 0.6,
        lora_epochs: NonNegativeInt = 2,
        global_epochs: NonNegativeInt = 3,
        layers: list[str] | None = None,
        alternating: bool = True,
        variant: Variant = "paper",
        absentees: Literal["left_out", "stale"] = "left_out",
        optimizer: OptimizerCallable = default_optimizer,
        lora_optimizer: OptimizerCallable | None = None,
        track_drift: bool = True,
        **kwargs: Any,
    ) -> None:
        refuse_given(type(self).__name__, kwargs, "epochs", "it has lora_epochs and global_epochs")
        super().__init__(backbone, num_classes, optimizer, lora_epochs + global_epochs, **kwargs)
        if alternating and self.steps is not None:
            raise FederationError(
                f"FedDecomp got steps={self.steps}, but its two phases are counted in lora_epochs and global_epochs: leave steps "
                "out, or train both parts together with alternating=false."
            )
        self.rank_ratio_conv = rank_ratio_conv
        self.rank_ratio_linear = rank_ratio_linear
        self.lora_epochs = lora_epochs
        self.global_epochs = global_epochs
        self.layers = layers
        self.alternating = alternating
        self.variant: Variant = variant
        self.absentees = absentees
        self.lora_optimizer = lora_optimizer or optimizer
        self.track_drift = track_drift

    def build(self) -> None:
        """Build the network, whose weights become σ, and the factors of τ, drawn after it."""
        super().build()
        decompose(self.backbone, self.rank_ratio_conv, self.rank_ratio_linear, self.variant, self.layers)
        if not factors(self.backbone):
            raise FederationError(
                "FedDecomp decomposes convolutional, linear and attention weights that learn, and "
                f"{name_of(self.backbone)} has none: let some learn, or use FedAvg."
            )

    def shared_names(self) -> set[str]:
        """Names of σ with biases, norms and buffers: all but the factors."""
        private = {id(p) for p in factors(self.backbone)}
        return super().shared_names() - {name for name, p in self.named_parameters(remove_duplicate=False) if id(p) in private}

    def export_state(self, private: bool = True) -> State:
        """Weights of the plain network: σ + τ, or σ alone."""
        state = super().export_state(private)
        for path, layer in self.named_modules(remove_duplicate=False):
            if parametrize.is_parametrized(layer):
                for weight, own in cast(nn.ModuleDict, layer.parametrizations).items():
                    if not factors(own):  # a parametrization of the network
                        continue
                    inside = f"{path}.parametrizations.{weight}."
                    plain = getattr(layer, weight) if private else state[f"{inside}original"]
                    state = {name: tensor for name, tensor in state.items() if not name.startswith(inside)}
                    state[f"{path}.{weight}"] = plain
        return state

    def phases(self) -> list[Phase]:
        """Train τ, then σ; or both at once."""
        low_rank = factors(self.backbone)
        own = {id(p) for p in low_rank}
        full_rank = [p for p in self.backbone.parameters() if id(p) not in own]
        if not self.alternating:
            apart = self.lora_optimizer is not self.optimizer
            optimizer = jointly((self.optimizer, full_rank), (self.lora_optimizer, low_rank)) if apart else self.optimizer
            return [self.local_phase("local", full_rank + low_rank, self.client_loss, optimizer=optimizer)]
        return [
            self.local_phase("low_rank", low_rank, self.client_loss, optimizer=self.lora_optimizer, epochs=self.lora_epochs),
            self.local_phase("full_rank", full_rank, self.client_loss, epochs=self.global_epochs),
        ]

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        """A server that averages σ with equal weights."""
        counted = sum(client.takes_part for client in clients)
        parameters = {name for name, _ in self.named_parameters()} if self.track_drift else set()
        return DecompServer(self.shared_state(), counted if self.absentees == "stale" else None, parameters)


@dataclass
class StaleClients(ServerUpdate):
    """Counts absent clients with the previous state.

    Args:
        num_clients: number of clients that count.
    """

    num_clients: int

    def __call__(self, state: State, combined: State, clients: int) -> State:
        absent = self.num_clients - clients
        return weighted_mean([combined, state], [clients, absent]) if absent > 0 else combined


class DecompServer(Server):
    r"""Averages with equal weights; can count absent clients with the previous state and measure the clients' drift.

    Args:
        state: the initial σ.
        num_clients: number of clients that count, the absent ones with the previous state; None: the participants only.
        tracked: names of the tensors over which :math:`\lVert \sigma_i - \bar\sigma \rVert_2` is measured; empty: no measurement.
    """

    def __init__(self, state: State, num_clients: int | None, tracked: set[str]) -> None:
        super().__init__(state, "uniform", update=StaleClients(num_clients) if num_clients else None)
        self.tracked = sorted(tracked & state.keys())  # in a fixed order: the last bit of the sum depends on it

    def aggregate(self, updates: Iterable[ClientUpdate]) -> dict[str, float]:
        """Merge the updates; returns ``server/drift``, the participants' mean distance from the average (eq. 9)."""
        states: list[State] = []
        super().aggregate(noted(updates, lambda update: states.append({name: update.state[name] for name in self.tracked})))
        if not (states and self.tracked):
            return {}
        # Distance from the average that the clients get, stale copies included.
        return {"server/drift": sum(distance(state, self.state) for state in states) / len(states)}


def distance(state: State, other: State) -> float:
    """Euclidean distance over the tensors of ``state``, taken as one vector."""
    return math.sqrt(sum((tensor - other[name]).double().square().sum().item() for name, tensor in state.items()))
