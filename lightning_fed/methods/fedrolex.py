"""FedRolex (Alam et al., NeurIPS 2022, https://arxiv.org/abs/2212.01548)."""

from collections.abc import Iterable, Sequence

import torch

from lightning_fed.core import ClientInfo, ClientUpdate, Server, State
from lightning_fed.methods.heterofl import HeteroFL, HeteroFLServer, narrowed


class FedRolex(HeteroFL):
    r"""HeteroFL with a window of channels that rolls from round to round, so that each channel is trained equally often.

    In round :math:`t`, counted from 0, a client of width :math:`s` gets, of each hidden layer with :math:`K` channels, the
    :math:`\mathrm{round}(sK)` from :math:`t \bmod K` on, wrapping around: in K rounds each channel is in as many windows. Layers
    of equal width share the window, which keeps the two branches of a residual block aligned. The global network may be larger
    than any client's.

    The authors' code moves the window backwards, rounds up, and weights norms and head by how often they were updated before; here
    the window moves as in the paper and all entries are averaged alike. Arguments and defaults are those of :class:`HeteroFL`; the
    paper's settings are 1 local epoch, batch size 10, SGD with lr 2e-4 and momentum 0.9, for 2,500 rounds and more, and a gradient
    norm of at most 1.
    """

    changes_in_each_round = "a client trains other channels"

    def continued_names(self) -> set[str]:
        """None: each round has other channels."""
        return set()

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        """A server that averages each entry over the clients whose window covered it."""
        self.refuse_frozen("cuts narrower networks out of one")
        return FedRolexServer(self, clients)


class FedRolexServer(HeteroFLServer):
    """Rolls the window to the front, treats it as HeteroFL does, and rolls it back.

    Args:
        method: the method, built.
        clients: all clients.

    Attributes:
        hidden: the dimensions of each tensor that are hidden channels, and the number of entries that each channel has there.
    """

    def __init__(self, method: HeteroFL, clients: Sequence[ClientInfo]) -> None:
        super().__init__(method, clients)
        # What is hidden: the dimensions that a narrower network has smaller. The narrowest possible has one channel everywhere, so
        # that its sizes are those of one channel: 1, or the pixels of each channel if a layer takes flattened images.
        narrowest = method.shapes(1e-9)
        self.hidden = {
            name: {d: least for d, (size, least) in enumerate(zip(tensor.shape, narrowest[name], strict=True)) if least < size}
            for name, tensor in self.state.items()
        }
        self.start = 0

    def on_round_start(self, round: int, cohort: Sequence[ClientInfo]) -> None:
        super().on_round_start(round, cohort)
        self.start = round - 1

    def version(self, size: float | None) -> State:
        """The channels in the window."""
        return self.state if size is None else narrowed(self.rolled(self.state, -self.start), self.shapes[size])

    def embed(self, update: ClientUpdate) -> State:
        """Roll the whole model like the server's state; smaller versions were cut from the rolled state."""
        return self.rolled(update.state, -self.start) if self.model_size[update.client] is None else update.state

    def aggregate(self, updates: Iterable[ClientUpdate]) -> dict[str, float]:
        """Merge where the window is at the front; see :meth:`Server.aggregate`."""
        self.state = self.rolled(self.merge(updates, self.rolled(self.state, -self.start)), self.start)
        return {}

    def rolled(self, state: State, by: int) -> State:
        """The state with all hidden channels moved up by so many, each with all its entries."""
        return {
            name: torch.roll(tensor, [by * places for places in hidden.values()], list(hidden)) if hidden else tensor
            for name, tensor in state.items()
            for hidden in [self.hidden[name]]
        }
