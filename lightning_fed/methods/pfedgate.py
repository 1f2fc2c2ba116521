"""pFedGate (Chen et al., ICML 2023, https://arxiv.org/abs/2305.02776)."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn

from lightning_fed.core import (
    Broadcast,
    ClientInfo,
    ClientUpdate,
    FederationError,
    KeepsGlobalParameters,
    Phase,
    Server,
    State,
    WeightedMean,
    default_optimizer,
    pack_bits,
    unpack_bits,
)
from lightning_fed.models import Backbones
from lightning_fed.nn.blocks import Blocks, Gate
from lightning_fed.nn.joint_optimizer import jointly
from lightning_fed.nn.losses import call_with
from lightning_fed.options import PositiveFloat, PositiveInt

MOVED = "moved_blocks"
"""The mask on the wire: a bit per block."""

PREFIX = "backbone."


class PFedGate(KeepsGlobalParameters):
    r"""Clients share one dense network, of which each client's private gate selects a sparse part for each batch.

    The trainable parameters :math:`\theta` are cut into blocks. For each batch, the client's gate :math:`\phi_i` gives each block
    an importance and a scale :math:`g_l`, both in (0, 1). The kept blocks :math:`m_l` are chosen by importance within a
    budget, see :meth:`lightning_fed.nn.blocks.Blocks.keep`, and the client predicts with :math:`\theta'_l = g_l m_l \theta_l`. The
    gate's importance learns through the kept blocks (straight-through: as if :math:`m_l` grew with it), and through
    :math:`g`.

    In a turn :math:`\theta` and :math:`\phi_i` learn together. Blocks of :math:`\theta` that are not kept get no gradient, but
    momentum or weight decay still move them. The client sends the blocks that moved in the turn and a bit per block. The
    server fills in the rest, averages, weighted by training examples, and sends the whole network. The gate stays.

    Importance and scale are means over a batch: the prediction for an example depends on the others in its batch, also in an
    evaluation, with the gate in eval mode. Monitored: accuracy after aggregation.

    Args:
        backbone: the network of every client.
        num_classes: number of classes; None: as many as the data have.
        densities: s, the share of :math:`\theta` that may be kept; client ``k`` has entry ``k mod len(list)``. The authors: 1, 0.5,
            0.3. With 1 all blocks are kept, and scaled.
        blocks: B, the largest number of blocks per tensor; the authors: 5.
        input_shape: channels, height and width of the images: the gate is a linear layer on all pixels. None: those of the data.
        separate_scale: whether a second branch of the gate gives the scale; else it is the importance.
        alternating: whether the gate learns for ``epochs`` epochs and then :math:`\theta`, as the paper describes it; otherwise
            both at once, as in the authors' scripts.
        absentees: how clients that are not sampled enter the average: ``"left_out"``, or ``"stale"``, with the previous
            :math:`\theta`, as in the authors' code.
        optimizer: optimizer of :math:`\theta`. The authors, for s = 0.5 and CIFAR-10: SGD, lr 0.05, momentum 0.9, decay 5e-4.
        gate_optimizer: optimizer of the gate. Default: the same as ``optimizer``.
        **kwargs: see :class:`.FederatedModule`. The authors: 1 epoch per round, and ``gradient_clip`` 10, which clips network and
            gate separately.
    """

    refuses_adapters = "it gates the network's own weights"

    accumulates = False  # a gate's output belongs to one batch
    flops_without_values = False  # the kept blocks depend on values
    dynamic_payload = True

    def __init__(
        self,
        backbone: Backbones,
        num_classes: PositiveInt | None = None,
        densities: Sequence[PositiveFloat] = (0.5,),
        blocks: PositiveInt = 5,
        input_shape: Sequence[PositiveInt] | None = None,
        separate_scale: bool = False,
        alternating: bool = False,
        absentees: Literal["left_out", "stale"] = "left_out",
        optimizer: OptimizerCallable = default_optimizer,
        gate_optimizer: OptimizerCallable | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, num_classes, optimizer, **kwargs)
        if not densities or any(not 0 < density <= 1 for density in densities):
            raise FederationError(f"densities is {list(densities)}: give at least one share in (0, 1].")
        if input_shape is not None and len(input_shape) != 3:
            raise FederationError(f"input_shape is {list(input_shape)}: give channels, height and width of the images.")
        self.densities = list(densities)
        self.blocks_per_tensor = blocks
        self.input_shape = None if input_shape is None else tuple(input_shape)
        self.separate_scale = separate_scale
        self.alternating = alternating
        self.absentees = absentees
        self.gate_optimizer = gate_optimizer or optimizer
        self._moved: Tensor | None = None

    # ------------------------------------------------------------------------------------------------------------ the state

    def know_data(self, datamodule: Any) -> None:
        """The usual settings, and the shape of the gate's inputs."""
        super().know_data(datamodule)
        if self.input_shape is None and (shape := getattr(datamodule, "input_shape", None)) is not None:
            self.input_shape = self.hparams["input_shape"] = shape

    def build(self) -> None:
        """Build the network and, drawn after it, the gate."""
        if self.input_shape is None or len(self.input_shape) != 3:
            raise FederationError(
                f"The gate is for images of one size, and the data have {self.input_shape or 'no known shape'}: give input_shape, "
                "channels, height and width."
            )
        super().build()
        self.blocks = Blocks(self.backbone, self.blocks_per_tensor)
        self.gate = Gate(self.input_shape, len(self.blocks), self.separate_scale)

    def shared_names(self) -> set[str]:
        return {name for name in super().shared_names() if name.startswith(PREFIX)}

    def continued_names(self) -> set[str]:
        """None: each round has other blocks."""
        return set()

    def payload(self) -> State:
        """Bits that mark the moved blocks; empty before the client has trained."""
        return {} if self._moved is None else {MOVED: pack_bits(self._moved)}

    def load_payload(self, payload: State) -> None:
        """Start a new turn; a broadcast has no such bits."""
        self._moved = None

    def after_training(self, sums: State) -> None:
        before = {name.removeprefix(PREFIX): tensor for name, tensor in self.global_parameters.items()}
        self._moved = self.blocks.moved(self.learning(), before)

    def learning(self) -> dict[str, nn.Parameter]:
        """The trainable parameters of the network, by name."""
        own = dict(self.backbone.named_parameters())
        return {name: own[name] for name in self.blocks.names}

    def update_state(self) -> State:
        """The moved blocks of each parameter, concatenated, and the buffers."""
        state = super().update_state()
        if self._moved is None:
            return state
        parameters = {name: state[f"{PREFIX}{name}"] for name in self.blocks.names}
        return state | {f"{PREFIX}{name}": part for name, part in self.blocks.cut(parameters, self._moved).items()}

    # --------------------------------------------------------------------------------------------------------- the training

    @property
    def density(self) -> float:
        """The share that this client may keep."""
        return self.densities[self.client.id % len(self.densities) if self.client else 0]

    def coefficients(self, x: Tensor) -> Tensor:
        """Factor of each block for a batch, ``(L,)``; 0 for blocks that are not kept."""
        if not isinstance(x, Tensor) or tuple(x.shape[1:]) != self.input_shape:
            got = tuple(x.shape[1:]) if isinstance(x, Tensor) else f"{type(x).__name__}s"
            raise FederationError(f"The gate was built for images of shape {self.input_shape}, got {got}: set input_shape.")
        importance, scale = self.gate(x)
        if self.density == 1:
            return scale
        importance = importance.clamp(min=self.blocks.least(self.density))
        kept = self.blocks.keep(importance, self.density).to(scale)
        return scale * kept * (1 + (importance - importance.detach()))  # the last factor is 1, and has a gradient

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(B, C)`` of the sparse network for this batch."""
        weights = self.blocks.scaled(self.learning(), self.coefficients(x))
        logits: Tensor = call_with(self.backbone, weights, x)
        return logits

    def phases(self) -> list[Phase]:
        """Network and gate at once; or the gate, then the network."""
        network, gate = list(self.backbone.parameters()), list(self.gate.parameters())
        if self.alternating:
            return [
                self.local_phase("gate", gate, self.client_loss, optimizer=self.gate_optimizer),
                self.local_phase("local", network, self.client_loss),
            ]
        both = jointly((self.optimizer, network), (self.gate_optimizer, gate))
        return [self.local_phase("local", [*network, *gate], self.client_loss, optimizer=both)]

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        """A server that fills in the missing blocks and averages."""
        total = sum(client.num_train for client in clients if client.takes_part) if self.absentees == "stale" else 0
        return GateServer(self.shared_state(), self.blocks, total)


class GateServer(Server):
    """Sends the whole network, receives the moved blocks, and averages, weighted by examples.

    Args:
        state: the initial network.
        blocks: of its parameters.
        total: number of examples that count, those of absent clients with the previous network; 0: the participants only.
    """

    def __init__(self, state: State, blocks: Blocks, total: int) -> None:
        super().__init__(state)
        self.blocks = blocks
        self.total = total

    def expected_payload(self, update: ClientUpdate, sent: Broadcast) -> State:
        """As many values as the mask has blocks, and buffers as they were sent."""
        mask = torch.empty(-(-len(self.blocks) // 8), dtype=torch.uint8, device="meta")
        came = update.state.get(MOVED)
        expected = {MOVED: mask, **sent.state}
        if came is None or came.shape != mask.shape or came.dtype != mask.dtype:
            return expected
        parts = self.blocks.parts(self._parameters(sent.state), unpack_bits(came, len(self.blocks)))
        return expected | {f"{PREFIX}{name}": part for name, part in parts.items()}

    def aggregate(self, updates: Iterable[ClientUpdate]) -> dict[str, float]:
        """Merge a round's updates; returns ``server/moved``, the mean share of the parameters that was sent."""
        mean, examples, shares = WeightedMean(), 0, []
        own = self._parameters(self.state)
        for update in updates:
            moved = unpack_bits(update.state[MOVED], len(self.blocks))
            whole = self.blocks.filled(self._parameters(update.state), moved, own)
            state = {name: update.state[name] for name in self.state}
            mean.add(state | {f"{PREFIX}{name}": tensor for name, tensor in whole.items()}, update.num_examples)
            examples += update.num_examples
            shares.append((torch.tensor(self.blocks.sizes) * moved).sum().item() / sum(self.blocks.sizes))
        if not shares:
            return {}
        if examples < self.total:
            mean.add(self.state, self.total - examples)
        self.state = mean.result()
        return {"server/moved": sum(shares) / len(shares)}

    def _parameters(self, state: State) -> State:
        return {name: state[f"{PREFIX}{name}"] for name in self.blocks.names}
