"""RoLoRA (Chen, Guo, Ju, Dalal, Zhu & Khisti, NeurIPS 2025, https://arxiv.org/abs/2502.01755)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from torch import nn

from lightning_fed.core import Broadcast, ClientInfo, ClientUpdate, PartialUpdate, Phase, Server, State
from lightning_fed.methods.families.lora import LoRAModule
from lightning_fed.models.adapters import adapter_names


class RoLoRA(LoRAModule):
    r"""Clients train the factors of a LoRA adapter alternately, B in odd rounds and A in even ones, with the other one frozen.

    The server averages the trained factor, with equal weights. As all clients have the same frozen factor, the mean of the factors
    is the mean of the products, in every round, and yet both factors learn. The frozen factor has no optimizer, whose momentum or
    weight decay would move it, and is not sent back; moments of both stay with the client. A head learns in every round.

    B comes first: while it is zero, A has no gradient. A plain Trainer, which counts no rounds, trains B alone. Monitored: accuracy
    after aggregation. Arguments as in :class:`.LoRAModule`.
    """

    has_trained = False
    """Whether it has, since the last broadcast came: then one factor is sent, else both are shared."""

    def resting_names(self) -> set[str]:
        """The factor that is frozen in this round."""
        return {f"backbone.{name}" for name in adapter_names(self.backbone, resting(self.rounds_before + 1))}

    def trainable(self) -> list[nn.Parameter]:
        """The other factor, and the head."""
        names = self._shared - self.resting_names()
        return [p for name, p in self.named_parameters() if name in names]

    def phases(self) -> list[Phase]:
        """The phase of LoRA, named by the trained factor: each has its own moments."""
        learning = "B" if resting(self.rounds_before + 1) == "A" else "A"
        return [replace(phase, name=learning) for phase in super().phases()]

    def load_broadcast(self, broadcast: Broadcast) -> None:
        """Load both factors."""
        super().load_broadcast(broadcast)
        self.has_trained = False

    def after_training(self, sums: State) -> None:
        """Restrict the payload to the trained factor."""
        self.has_trained = True

    def update_state(self) -> State:
        """All shared tensors; after training without the frozen factor."""
        rested = self.resting_names() if self.has_trained else set()
        return {name: tensor for name, tensor in super().update_state().items() if name not in rested}

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        """A server that averages the trained factor and keeps the other."""
        factors = {factor: {f"backbone.{name}" for name in adapter_names(self.backbone, factor)} for factor in ("A", "B")}
        return RoLoRAServer(self.shared_state(), self.weighting, factors)


class RoLoRAServer(Server):
    """Sends both factors and receives one.

    Args:
        state: the adapter and the head.
        weighting: how updates are weighted.
        factors: names of the tensors of A and of B.
    """

    def __init__(self, state: State, weighting: Literal["examples", "uniform"], factors: dict[str, set[str]]) -> None:
        super().__init__(state, weighting, holds_model=True, update=PartialUpdate())
        self.factors = factors

    def expected_payload(self, update: ClientUpdate, sent: Broadcast) -> State:
        """The sent state without the frozen factor."""
        rests = self.factors[resting(self.round)]
        return {name: tensor for name, tensor in sent.state.items() if name not in rests}


def resting(round: int) -> Literal["A", "B"]:
    """The factor that is frozen in a round, counted from 1."""
    return "A" if round % 2 else "B"
