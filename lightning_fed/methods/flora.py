"""FLoRA, by stacking (Wang, Shen, He, Sun, Sun, Huang & Li, NeurIPS 2024, https://arxiv.org/abs/2409.05976)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from lightning_fed.core import Broadcast, ClientInfo, Server, State
from lightning_fed.methods.families.exact_lora import ExactLoRA, ExactServer, Gathered, Matrices
from lightning_fed.methods.families.lora import refuse_persistent
from lightning_fed.models.transformer import TransformerFactory
from lightning_fed.nn.low_rank_sums import stacked
from lightning_fed.options import PositiveInt

START = "start_seed"
"""What the seed of a round's adapters is called: it belongs to no layer."""


class FLoRA(ExactLoRA):
    r"""The server stacks the LoRA adapters of a round, of any ranks, and adds their product to the frozen matrices.

    A client starts each round with a new adapter, A random and B zero, on the current matrices; the server moves these by
    :math:`W \leftarrow W + \sum_k p_k s_k B_k A_k = W + [B_1 \dots B_K] [p_1 s_1 A_1; \dots; p_K s_K A_K]`, which is exact for
    any ``ranks``. Only one of the two stacks contains the weights. A is drawn from a seed that the server sends, anew in each
    round and the same for all clients; smaller ranks get the first rows. No moments are kept: their factors are discarded.

    Every broadcast has the stacks of all rounds, for clients that join late, until the matrix itself has fewer values. With one
    client this is LoRA that is merged and restarted in every round, not HOMLoRA.

    Monitored: accuracy after aggregation. Updates are weighted by training examples.

    Args:
        backbone: builds the network, given the number of classes.
        num_classes: number of classes; None: as many as the data have.
        **kwargs: see :class:`.ExactLoRA`. The paper: 10 clients of rank 16, or of ranks 64, 32, 16, 16, 8, 8, 4, 4, 4, 4 with
            ``scale`` per rank; ``lora_alpha`` / r 2, lr 3e-4.
    """

    weighting: Literal["examples", "uniform"] = "examples"

    def __init__(self, backbone: TransformerFactory, num_classes: PositiveInt | None = None, **kwargs: Any) -> None:
        refuse_persistent(type(self).__name__, kwargs)
        super().__init__(backbone, num_classes, persistent=False, **kwargs)

    def load_broadcast(self, broadcast: Broadcast) -> None:
        """Load the server's state, with a new adapter."""
        state = dict(broadcast.state)
        drawn = draw_adapters(self.matrices, int(state.pop(START)))
        super().load_broadcast(replace(broadcast, state=state | self.matrices.of_rank(drawn, self.rank())))

    def continued_names(self) -> set[str]:
        """The head: the factors are new in each round."""
        return super().continued_names() - self.matrices.factor_names()

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        """A server that stacks the adapters."""
        return FLoRAServer(self, clients)


class FLoRAServer(ExactServer):
    """Keeps the head, the changes of the frozen matrices, and the seed of the round's adapters.

    Args:
        method: the method, built.
        clients: all clients.
    """

    def __init__(self, method: FLoRA, clients: Sequence[ClientInfo]) -> None:
        super().__init__(method, clients, Stack(method.matrices))
        factors = self.matrices.factor_names()
        self.state = {name: t for name, t in self.state.items() if name not in factors} | {START: torch.randint(2**31, ())}

    def broadcast(self, client: ClientInfo) -> Broadcast:
        """Everything but the adapter, which the client draws."""
        return Broadcast(self.state, self.ranks[client.id])


@dataclass(frozen=True)
class Stack:
    """A ``combine``: the stacks are added to the changes, the next adapters get another seed, and everything else is averaged.

    Args:
        matrices: the adapted matrices.
    """

    matrices: Matrices

    def __call__(self, updates: Iterable[tuple[State, float]], state: State) -> State:
        """The new state; empty without updates."""
        came = Gathered.of(updates, self.matrices)
        if not came.factors:
            return {}
        merged = came.mean | {START: state[START] + 1}
        for layer in self.matrices.shapes:
            merged |= self.matrices.added(state, layer, *stacked(*came.terms(layer, self.matrices, came.shares())))
        return merged


def draw_adapters(matrices: Matrices, seed: int) -> State:
    r"""A new adapter of the largest rank: A as peft draws it, uniform in :math:`\pm 1 / \sqrt{n}`, and B zero."""
    stream, drawn = torch.Generator().manual_seed(seed), {}
    for layer, (rows, columns) in matrices.shapes.items():
        a, b = matrices.names(layer)
        drawn[a] = torch.empty(matrices.rank, columns).uniform_(-(columns**-0.5), columns**-0.5, generator=stream)
        drawn[b] = torch.zeros(rows, matrices.rank)
    return drawn
