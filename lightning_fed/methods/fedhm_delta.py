"""FedHM (Yao et al. 2021, https://arxiv.org/abs/2111.14655) that averages what clients learned instead of what they hold."""

from collections.abc import Iterable
from dataclasses import replace

import torch

from lightning_fed.core import ClientUpdate, State
from lightning_fed.methods.fedhm import FedHM, FedHMServer


class AddsChanges(FedHMServer):
    """A FedHM server that adds the mean of what clients changed to what it has.

    What a client was sent is not kept until it comes back: in a round it is the same for all clients of a size.
    """

    def embed(self, update: ClientUpdate) -> State:
        r"""How far the client moved its part of the whole, in float64.

        Of two factors it is :math:`U V^\top - U_0 V_0^\top = U (V - V_0)^\top + (U - U_0) V_0^\top`: exactly zero where nothing
        changed, and without subtracting two large products from each other.
        """
        start = {name: tensor.double() for name, tensor in self.version(self.model_size[update.client]).items()}
        end = {name: tensor.double() for name, tensor in update.state.items()}
        change = {name: tensor - start[name] for name, tensor in end.items()}
        first, second = (names & end.keys() for names in self.factor_names())
        ahead = super().embed(replace(update, state=change | {name: end[name] for name in first}))
        parts = {name: change[name] for name in first} | {name: start[name] for name in second}
        behind = super().embed(replace(update, state=parts))
        return ahead | {name: ahead[name] + tensor for name, tensor in behind.items()}

    def unchanged(self) -> State:
        """No change."""
        return {name: torch.zeros_like(tensor) for name, tensor in self.state.items()}

    def merge(self, updates: Iterable[ClientUpdate], whole: State) -> State:
        """The whole and the mean change of each entry; none where nobody covers it."""
        none = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in whole.items()}
        changes = super().merge(updates, none)
        return {name: (tensor.double() + changes[name]).to(tensor.dtype) for name, tensor in whole.items()}


class FedHMDeltaServer(AddsChanges, FedHMServer):
    """For factorized layers."""


class FedHMDelta(FedHM):
    r"""FedHM whose server adds up changes: an extension of ours, not the paper's method.

    FedHM takes the mean of recovered networks, and with it of what truncation took from them: each round erodes what lies behind
    the ranks of most clients, whatever was learned. Here the server moves by what participants changed, from what they were sent,
    :math:`h_p^0`, to what they sent back, :math:`h_p`:

    .. math:: w \leftarrow w + \sum_p \alpha_p \left(\mathrm{recover}(h_p) - \mathrm{recover}(h_p^0)\right)

    A round in which nobody learns changes nothing, at any mix of ranks. With full-size clients alone it is FedAvg with equal
    weights, as FedHM is. A client of rank r moves a layer by a matrix of rank 2r at most. Nothing else differs: what travels, what
    clients do, the weights :math:`\alpha`, static batch norm and the masked loss are FedHM's, and so are the arguments; ``anchor``
    here is one more participant who changed nothing, and shortens the step.
    """

    server_class = FedHMDeltaServer
