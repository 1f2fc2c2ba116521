"""FedHM (Yao et al. 2021, https://arxiv.org/abs/2111.14655) that averages the clients' changes instead of their networks."""

from collections.abc import Iterable
from dataclasses import replace

import torch

from lightning_fed.core import ClientUpdate, State
from lightning_fed.methods.fedhm import FedHM, FedHMServer


class AddsChanges(FedHMServer):
    """A FedHM server that adds the mean of the clients' changes to its model.

    It does not store what it sent to each client: in a round all clients of one size get the same version.
    """

    def embed(self, update: ClientUpdate) -> State:
        r"""The client's change of its part of the whole, in float64.

        Of two factors it is :math:`U V^\top - U_0 V_0^\top = U (V - V_0)^\top + (U - U_0) V_0^\top`: exactly zero if nothing
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
        """Add to the whole the mean change of each entry; entries that no client covers do not change."""
        none = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in whole.items()}
        changes = super().merge(updates, none)
        return {name: (tensor.double() + changes[name]).to(tensor.dtype) for name, tensor in whole.items()}


class FedHMDelta(FedHM):
    r"""FedHM whose server averages the clients' changes: our extension, not the paper's method.

    FedHM averages the recovered networks, including what truncation removed from them: each round erodes what lies beyond
    the ranks of most clients, whatever was learned. Here the server adds the participants' changes, from the version that they were
    sent, :math:`h_p^0`, to the one that they sent back, :math:`h_p`:

    .. math:: w \leftarrow w + \sum_p \alpha_p \left(\mathrm{recover}(h_p) - \mathrm{recover}(h_p^0)\right)

    A round without any learning changes nothing, at any mix of ranks. With full-size clients alone it is FedAvg with equal
    weights, as FedHM is. A client of rank r moves a layer by a matrix of rank 2r at most. Everything else is FedHM's: what travels,
    what clients do, the weights :math:`\alpha`, static batch norm, the masked loss, and the arguments. ``anchor``
    here adds one more participant without a change, which shortens the step.
    """

    server_class = AddsChanges
