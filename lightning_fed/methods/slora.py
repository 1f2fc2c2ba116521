"""SLoRA (Babakniya et al. 2023, https://arxiv.org/abs/2308.06522)."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from lightning_fed.core import Broadcast, ClientInfo, ClientUpdate, FederationError, PartialUpdate, Server, State
from lightning_fed.methods.families.adapter_module import default_adam
from lightning_fed.methods.families.lora import LoRAModule, refuse_persistent
from lightning_fed.models.adapters import COMMON
from lightning_fed.models.transformer import TransformerFactory
from lightning_fed.nn.factorize import Spectrum
from lightning_fed.nn.sparse_change import Change, SparseChange, draw_masks, masked_count, scattered
from lightning_fed.options import Fraction, NonNegativeInt, PositiveInt

log = logging.getLogger(__name__)

A, B = f"lora_A.{COMMON}.weight", f"lora_B.{COMMON}.weight"
START_A, START_B = "start_A", "start_B"
VALUES = "parametrizations.weight.0.values"
"""What tensors are called after the name of their layer and a dot."""

MASK_SEED = "mask_seed"
"""What the seed of the masks is called: it belongs to no layer."""


class SLoRA(LoRAModule):
    r"""Federated LoRA whose adapter is initialized from a few rounds of sparse fine-tuning.

    1. For ``sparse_rounds`` rounds clients train only the entries of the adapted matrices that a random mask selects. The server
       draws one mask per matrix, the same for all clients, and sends the seed. Only the values of these entries travel, and the
       server averages them.
    2. The server decomposes the change, :math:`\Delta W = W_{R_1} - W_0 \approx s BA` with :math:`B = P_r
       \Sigma_r^{1/2} / \sqrt s` and :math:`A = \Sigma_r^{1/2} Q_r^\top / \sqrt s`. In the remaining rounds B and A are trained,
       and averaged separately. Ranks that :math:`\Delta W` lacks start as in LoRA: A random, B zero.

    Without sparse rounds this is HOMLoRA, weighted by training examples and with a fresh optimizer in each turn. A trained head
    learns in both stages. A random sparse matrix is far from low rank: ``server/energy``, in the round that ends the first
    stage, is the share :math:`\lVert s BA \rVert_F^2 / \lVert \Delta W \rVert_F^2` that is kept, over all matrices together.

    Monitored: accuracy of the global model on the test data of all clients.

    Args:
        backbone: builds the network, given the number of classes: ``VisionTransformer``.
        num_classes: number of classes; None: as many as the data have.
        sparse_rounds: rounds :math:`R_1` of the first stage. Default: a quarter of the 40 rounds of FedHM's comparison, which
            leaves it open.
        density: share of a matrix's entries that the mask selects. The paper: about 0.01.
        base: the matrix that the adapter is added to in the second stage: ``original`` is :math:`W_0`; ``residual`` is
            :math:`W_{R_1} - s BA` with the initial B and A, so that the change of stages does not change the function. The
            broadcast then also contains the values for it, and a model has one more matrix per adapted layer.
        optimizer: optimizer of all trained tensors. Default: Adam, lr 2e-3.
        steps: optimizer steps per round; None: ``epochs`` epochs, by default one.
        **kwargs: see :class:`.LoRAModule`. ``target_modules`` are linear layers; None: query, key, value and
            output of attention, if the network knows their names.
    """

    weighting = "examples"
    monitor_model = "global"
    mask_seed: Tensor

    def __init__(
        self,
        backbone: TransformerFactory,
        num_classes: PositiveInt | None = None,
        sparse_rounds: NonNegativeInt = 10,
        density: Fraction = 0.01,
        base: Literal["original", "residual"] = "original",
        optimizer: OptimizerCallable = default_adam,
        steps: NonNegativeInt | None = None,
        **kwargs: Any,
    ) -> None:
        refuse_persistent(type(self).__name__, kwargs)
        super().__init__(backbone, num_classes, optimizer=optimizer, steps=steps, persistent=False, **kwargs)
        if not 0 < density <= 1:
            raise FederationError(f"density is {density}: give the share of entries that the masks select, in (0, 1].")
        self.sparse_rounds = sparse_rounds
        self.density = density
        self.base = base
        self.shapes: dict[str, torch.Size] = {}  # of the adapted matrices, by layer

    @property
    def sparse(self) -> bool:
        """Whether this is a model of the first stage, in which the density is sent as the client's ``model_size``. A module without
        a server is in the second stage.
        """
        return self.model_size is not None

    def check_rounds(self, rounds: int) -> None:
        """Report a run of the first stage alone."""
        super().check_rounds(rounds)
        if rounds <= self.sparse_rounds:
            log.warning(
                f"SLoRA's sparse_rounds is {self.sparse_rounds} and the run has {rounds} rounds: no adapter is trained. Set "
                "sparse_rounds lower."
            )

    def adapted_layers(self) -> list[str] | str | None:
        """All four projections of attention by default."""
        if self.target_modules is None and self.backbone.projections is not None:
            return list(self.backbone.projections)
        return super().adapted_layers()

    def attach(self) -> None:
        """Add the adapter; in the first stage it only determines the layers, and is replaced by values."""
        super().attach()
        self.shapes = {}
        for name, layer in self.linear_layers(changes=True).items():
            linear = layer.get_base_layer()
            if not isinstance(linear, nn.Linear):
                raise FederationError(
                    f"{name} is a {type(linear).__name__}, but SLoRA adapts linear layers: name linear layers in target_modules."
                )
            self.shapes[name] = linear.weight.shape
            if self.sparse:
                self.set_submodule(name, linear)
                register_parametrization(linear, "weight", SparseChange(linear.weight, self.density))
            elif self.base == "residual":
                register_parametrization(linear, "weight", Change(linear.weight))
        if self.sparse:
            self.register_buffer(MASK_SEED, torch.tensor(-1))  # none yet

    def load_shared_state(self, state: State) -> None:
        """Load the server's state; another seed means other masks."""
        before = int(self.mask_seed) if self.sparse else None
        super().load_shared_state(state)
        if self.sparse and int(state[MASK_SEED]) != before:
            for name, entries in draw_masks(self.shapes, self.density, state[MASK_SEED]).items():
                self._parametrization(name).entries.copy_(entries)

    def load_broadcast(self, broadcast: Broadcast) -> None:
        """Load the server's state, with the tensors of a residual base."""
        state = dict(broadcast.state)
        if self.base == "residual" and not self.sparse:
            for name, entries in draw_masks(self.shapes, self.density, state.pop(MASK_SEED)).items():
                a, b, values = (state.pop(f"{name}.{part}") for part in (START_A, START_B, VALUES))
                self._parametrization(name).change.copy_(scattered(values, entries, self.shapes[name]) - self.scaling * b @ a)
        super().load_broadcast(replace(broadcast, state=state))

    def _parametrization(self, name: str) -> Any:
        layer: Any = self.get_submodule(name)
        return (layer if self.sparse else layer.get_base_layer()).parametrizations.weight[0]

    def effective_weights(self, private: bool = True) -> State:
        """The effective adapted matrices, ``(out, in)``, by name of the layer."""
        if not self.sparse:
            return super().effective_weights(private)
        return {name: cast(Tensor, self.get_submodule(name).weight).detach() for name in self.shapes}

    def export_adapter(self, folder: Path, private: bool = True) -> None:
        """Write a peft adapter, see :class:`.LoRAModule`; or, if the model differs by more than an adapter (in
        the first stage, or on a residual base), the whole network.
        """
        if self.sparse or self.base == "residual":
            self.export_merged(folder, private)
        else:
            super().export_adapter(folder, private)

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        """A server that averages values in the first stage, then factors."""
        return SLoRAServer(self.shared_state(), self)


class SLoRAServer(Server):
    """Keeps the values, the adapter and the head, and knows the stage.

    Args:
        state: the adapter and the head before the first round.
        method: the method with these stages.
    """

    def __init__(self, state: State, method: SLoRA) -> None:
        self.method = method
        self.round = 1
        values = {
            f"{name}.{VALUES}": state[f"{name}.{A}"].new_zeros(masked_count(shape, method.density))
            for name, shape in method.shapes.items()
        }
        factors = ((START_A, A), (START_B, B)) if method.base == "residual" else ()
        starts = {f"{name}.{start}": torch.zeros_like(state[f"{name}.{own}"]) for name in method.shapes for start, own in factors}
        self.adapter_names = {f"{name}.{factor}" for name in method.shapes for factor in (A, B)}
        self.sparse_names = {*values, MASK_SEED}
        self.start_names = set(starts)
        super().__init__(
            {**state, **values, MASK_SEED: torch.randint(2**31, ()), **starts},
            method.weighting,
            holds_model=True,
            update=PartialUpdate(),
        )

    @property
    def sparse(self) -> bool:
        """Whether the round belongs to the first stage."""
        return self.round <= self.method.sparse_rounds

    def trained(self) -> State:
        """The tensors that clients train and return in this stage."""
        others = self.start_names | (self.adapter_names if self.sparse else self.sparse_names)
        return {name: tensor for name, tensor in self.state.items() if name not in others}

    def broadcast(self, client: ClientInfo) -> Broadcast:
        return self.global_models()["global"]

    def global_models(self) -> dict[str, Broadcast]:
        """``global``, the stage's model."""
        if self.sparse:
            return {"global": Broadcast(self.trained(), self.method.density)}
        return {"global": Broadcast(self.state if self.start_names else self.trained())}

    def expected_payload(self, update: ClientUpdate, sent: Broadcast) -> State:
        """The tensors trained in this stage: a residual base is sent, but not returned."""
        return self.trained()

    def aggregate(self, updates: Iterable[ClientUpdate]) -> dict[str, float]:
        """Merge a round's updates; the last of the first stage returns ``server/energy``, unless nothing was learned in it."""
        super().aggregate(updates)
        return self.start_adapter() if self.round == self.method.sparse_rounds else {}

    def start_adapter(self) -> dict[str, float]:
        """Set the adapter to the best approximation of its rank; returns the energy that it keeps."""
        method, state, kept, total = self.method, dict(self.state), 0.0, 0.0
        for name, entries in draw_masks(method.shapes, method.density, state[MASK_SEED]).items():
            spectrum = Spectrum.of(scattered(state[f"{name}.{VALUES}"], entries, method.shapes[name]))
            a, b = state[f"{name}.{A}"].clone(), state[f"{name}.{B}"].clone()
            energies = spectrum.values.square()
            kept, total = kept + energies[: len(a)].sum().item(), total + energies.sum().item()
            if rank := min(len(a), spectrum.rank(torch.float64)):
                left, right = spectrum.factors(rank)
                a[:rank], b[:, :rank] = right.T / method.scaling**0.5, left / method.scaling**0.5
            state |= {f"{name}.{A}": a, f"{name}.{B}": b}
            if self.start_names:
                state |= {f"{name}.{START_A}": a.clone(), f"{name}.{START_B}": b.clone()}
        self.state = state
        return {"server/energy": kept / total} if total else {}
