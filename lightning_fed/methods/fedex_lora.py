"""FedEx-LoRA (Singhal, Ponkshe & Vepakomma, ACL 2025, https://arxiv.org/abs/2410.09432)."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_fed.core import ClientInfo, Server, State, WeightedMean
from lightning_fed.methods.families.exact_lora import ExactLoRA, ExactServer, Matrices
from lightning_fed.nn.learn_in_float32 import HALF
from lightning_fed.nn.low_rank_sums import averaging_error

log = logging.getLogger(__name__)


class FedExLoRA(ExactLoRA):
    r"""HOMLoRA with exact aggregation, which adds the residual error of averaging the factors to the frozen matrices.

    The server averages A and B, with equal weights, and moves each adapted matrix by the error of this average,
    :math:`W \leftarrow W + s (\sum_k p_k B_k A_k - \bar B \bar A)`, so that all clients continue from the exact mean of the
    products. With one client, or if all have the same A, there is no such error, and it is HOMLoRA, bit for bit.

    The error of a round has rank :math:`(K - 1) r` with K participants. It is computed, sent and stored as factors. Every broadcast
    has those of all rounds, for clients that join late, until the matrix itself has fewer values. Moments stay with the client: the
    factors are HOMLoRA's. Clients of different ``ranks`` start from the first ranks of the mean, as in HETLoRA.

    Monitored: accuracy after aggregation. Arguments as in :class:`.ExactLoRA`. The paper: 3 clients, AdamW with lr 1e-3, r 4,
    ``lora_alpha`` 8, query and value.
    """

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        """A server that averages and keeps the errors of the means."""
        kinds = {layer.get_base_layer().weight.dtype for layer in self.linear_layers().values()}
        if half := next(iter(kinds.intersection(HALF)), None):
            log.warning(
                f"FedExLoRA adds the averaging error to weights in {half}, and most of it is smaller than their spacing: it acts "
                "once it has grown, and until then this is HOMLoRA. Load the network in float32."
            )
        return ExactServer(self, clients, MeanAndError(self.matrices))


@dataclass(frozen=True)
class MeanAndError:
    r"""A ``combine`` that averages everything and adds the error of :math:`\bar B \bar A` to the changes.

    Args:
        matrices: the adapted matrices.
    """

    matrices: Matrices

    def __call__(self, updates: Iterable[tuple[State, float]], state: State) -> State:
        """The new state; empty without updates."""
        mean, came, weights = WeightedMean(), [], []
        for update, weight in updates:
            came.append(self.matrices.of_largest(update))  # at one scale: otherwise the means are not of the scaled products
            weights.append(weight)
            mean.add(came[-1], weight)
        merged, scaling = mean.result(), self.matrices.scaling(self.matrices.rank)
        for layer in self.matrices.shapes if came else ():
            a, b = self.matrices.names(layer)
            shares = [weight / sum(weights) for weight in weights]
            left, right = averaging_error([one[b] for one in came], [one[a] for one in came], shares, merged[b])
            merged |= self.matrices.added(state, layer, left, scaling * right)
        return merged
