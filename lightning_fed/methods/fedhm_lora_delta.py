"""FedHM on adapters that averages what clients learned instead of what they hold; see :mod:`.fedhm_delta`."""

from lightning_fed.methods.fedhm_delta import AddsChanges
from lightning_fed.methods.fedhm_lora import FedHMLoRA, FedHMLoRAServer


class FedHMLoRADeltaServer(AddsChanges, FedHMLoRAServer):
    """For adapters."""


class FedHMLoRADelta(FedHMLoRA):
    r"""FedHM-LoRA whose server adds up changes: an extension of ours, not the paper's method.

    Where FedHM-LoRA replaces the change :math:`\Delta W` of each adapted matrix by the mean of the products that come back,
    whatever the ranks could hold of it, here the server moves it by what participants of a round changed:

    .. math:: \Delta W \leftarrow \Delta W + \sum_p a_p \left(B_p A_p - B_p^0 A_p^0\right)

    The head likewise. What lies behind a client's rank stays as it is, a round in which nobody learns changes nothing, and a client
    of rank r moves a matrix by one of rank 2r at most. Arguments, weights and what travels are those of :class:`.FedHMLoRA`; see
    :class:`.FedHMDelta`.
    """

    server_class = FedHMLoRADeltaServer
